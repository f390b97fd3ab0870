"""The peer Ulysses: each rank computes some heads over the whole sequence, between all-to-alls of torch.

KV heads fewer than the ranks are repeated to the number of ranks before the exchange, as its users do. All tensors are
exchanged in one piece each, so that the kernels get contiguous rows.
Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf
from ringflash.bench.attention.single import Unavailable, cute, out_of
from ringflash.bench.common.problem import Contender, Problem, Setup

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (batch, seqlen, heads, headdim), causal


def local_attentions(device_type: str) -> dict[str, Callable[[], Attend]]:
    """Returns makers of the attention functions for Ulysses on this kind of device, by name."""
    if device_type != "cuda":
        return {"SDPA math": partial(_sdpa, SDPBackend.MATH)}
    return {
        "FA4": lambda: out_of(cute().flash_attn_func, causal=True),
        "cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    }


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            is_grouped = q.shape[1] > k.shape[1]
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
            return out.transpose(1, 2)

    return attend


def ulysses(mesh: DeviceMesh, make: Callable[[], Attend]) -> Contender:
    """Returns the contender over all ranks of `mesh`; `make` returns the attention on one of them.

    Ranks must divide the query heads and the length.
    """
    # A separate group: a call that fails leaves messages behind, which other contenders must not receive.
    group = dist.new_group()

    @contextmanager
    def prepare(problem: Problem) -> Generator[Setup, None, None]:
        attend, ranks = make(), mesh.size()
        check_split(ranks, problem.q.shape[2], problem.k.shape[2], problem.seqlen)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (repeated(x, ranks) for x in (k, v))
            some_heads = (_Exchange.apply(x, group, True) for x in (q, k, v))
            return _Exchange.apply(attend(*some_heads), group, False)

        context = rf.ContextParallel(mesh, layout="contiguous")
        local = problem.map(context.shard)
        yield Setup(local.leaves(), local.dout, call, context.unshard)

    return prepare


def check_split(ranks: int, nheads: int, nheads_kv: int, seqlen: int) -> None:
    """Raises Unavailable unless `ranks` ranks can split tokens, query heads and KV heads evenly."""
    for name, number in (("query heads", nheads), ("tokens", seqlen)):
        if number % ranks:
            raise Unavailable(f"takes {name} that {ranks} ranks divide, not {number}")
    if max(nheads_kv, ranks) % min(nheads_kv, ranks):
        raise Unavailable(f"takes KV heads that divide {ranks} ranks or are divided by them, not {nheads_kv}")


def repeated(x: Tensor, ranks: int) -> Tensor:
    """Returns keys or values (batch, rows, nheads_kv, headdim) with a KV head for each rank at least."""
    nheads_kv = x.shape[2]
    return x if nheads_kv >= ranks else x.repeat_interleave(ranks // nheads_kv, 2)


class _Exchange(torch.autograd.Function):
    """All-to-all between some rows of all heads and all rows of some heads; the backward is the opposite one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return to_some_heads(x, group) if to_heads else to_all_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        back = to_all_heads if ctx.to_heads else to_some_heads
        return back(gradient, ctx.group), None, None


def to_some_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns all rows of this rank's heads, from some rows of all heads (batch, rows, heads, headdim)."""
    batch, rows, heads, headdim = x.shape
    ranks = dist.get_world_size(group)
    by_rank = x.view(batch, rows, ranks, heads // ranks, headdim).permute(2, 0, 1, 3, 4).contiguous()
    arrived = torch.empty_like(by_rank)
    dist.all_to_all_single(arrived, by_rank, group=group)
    return arrived.transpose(0, 1).reshape(batch, ranks * rows, heads // ranks, headdim)


def to_all_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's rows of all heads, from all rows of some heads; the inverse of `to_some_heads`."""
    batch, seqlen, heads, headdim = x.shape
    ranks = dist.get_world_size(group)
    by_rank = x.reshape(batch, ranks, seqlen // ranks, heads, headdim).transpose(0, 1).contiguous()
    arrived = torch.empty_like(by_rank)
    dist.all_to_all_single(arrived, by_rank, group=group)
    return arrived.permute(1, 2, 0, 3, 4).reshape(batch, seqlen // ranks, ranks * heads, headdim)
