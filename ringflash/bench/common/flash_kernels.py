"""Kernels of FlashAttention for peers that call them without autograd: FlashAttention-4's, or torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernels:
    """Attention on one device.

    Args:
        name: name in the tables.
        forward: takes q, k, v, scale and causal; returns out, lse (batch, nheads, seqlen), and possibly other values.
        backward: takes dout, q, k, v, out, lse, scale, causal, dq, dk and dv; writes the last three.
    """

    name: str
    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., None]


@lru_cache
def installed_kernels() -> Kernels:
    """Returns the kernels of FlashAttention-4 if it is installed, else torch's FlashAttention-2."""
    try:
        from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]
    except ImportError:
        return Kernels("torch's FA2", _torch_forward, _torch_backward)

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Any, ...]:
        return interface._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        out, lse, scale, causal, dq, dk, dv = rest
        given = {"softmax_scale": scale, "causal": causal, "dq": dq, "dk": dk, "dv": dv}
        interface._flash_attn_bwd(q, k, v, out, dout, lse, **given)

    return Kernels("FA4", forward, backward)


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Any, ...]:
    attend = torch.ops.aten._flash_attention_forward
    return attend(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)


def _torch_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    out, lse, scale, causal, *targets = rest
    lengths = None, None, q.shape[1], k.shape[1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    attend = torch.ops.aten._flash_attention_backward
    gradients = attend(dout, q, k, v, out, lse, *lengths, 0.0, causal, *no_dropout, scale=scale)
    for target, gradient in zip(targets, gradients, strict=True):
        target.copy_(gradient)
