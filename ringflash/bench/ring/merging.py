"""Attention of a ring in one process by three ways to merge its hops, which round at different places.

    float32 state     ringflash: kernels continue (m, l, O) in float32, and gradients add up in float32
    rounded partials  out and gradients of each hop are rounded to the inputs' dtype, and merged in float32
    rounded sums      merged in the inputs' dtype too

torch's context_parallel and ring-flash-attn round partials. With `convert_to_f32=False`, torch's rounds sums too.
All ways compute a hop by the same kernels. The sequence is cut into one contiguous part a rank, and the mask is causal,
so rank r computes r + 1 hops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

import ringflash as rf
from ringflash.masks import spec_of
from ringflash.ops.call import AttentionCall
from ringflash.ops.operators import attention, attention_backward

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ways(world_size: int) -> dict[str, Attention]:
    """Returns causal attention over a ring of `world_size` ranks by each way, differentiable.

    Each takes q (batch, seqlen, nheads, headdim), k and v (batch, seqlen, nheads_kv, headdim), whole sequences of which
    the number of ranks is a divisor.
    """
    context = rf.ContextParallel.local(world_size, "contiguous")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cast("Tensor", rf.ring_attention(q, k, v, context, mask=rf.Causal()))

    def merged(wide: bool) -> Attention:
        return lambda q, k, v: cast("Tensor", _Merged.apply(q, k, v, world_size, torch.float32 if wide else q.dtype))

    return {"float32 state": ours, "rounded partials": merged(True), "rounded sums": merged(False)}


class _Merged(torch.autograd.Function):
    """Attention whose hops are rounded to the inputs' dtype and merged in the dtype `sums`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, world_size: int, sums: torch.dtype) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        for rows, hops in _ranks(q, world_size):
            total, of_rows = None, None
            for keys, call in hops:
                of_hop, lse_of_hop = attention(q[:, rows], k[:, keys], v[:, keys], *call)
                of_hop = of_hop.to(sums)
                if total is None or of_rows is None:
                    total, of_rows = of_hop, lse_of_hop
                    continue
                # The merge of torch's `_SDPAMerger` (torch/distributed/tensor/experimental/_context_parallel).
                weight = functional.sigmoid(lse_of_hop - of_rows).transpose(1, 2)[..., None].to(sums)
                total = total - weight * (total - of_hop)
                of_rows = of_rows - functional.logsigmoid(of_rows - lse_of_hop)
            assert total is not None
            assert of_rows is not None
            out[:, rows], lse[:, :, rows] = total.to(q.dtype), of_rows
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = world_size, sums
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,), (q, k, v, out, lse), (world_size, sums) = grads, ctx.saved_tensors, ctx.ring
        dq, dk, dv = (torch.zeros_like(x, dtype=sums) for x in (q, k, v))
        for rows, hops in _ranks(q, world_size):
            dout_of_rows, lse_of_rows = dout[:, rows].contiguous(), lse[:, :, rows].contiguous()
            for keys, call in hops:
                inputs = q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse_of_rows
                parts = attention_backward(dout_of_rows, None, *inputs, *call)
                dq[:, rows] += parts[0]
                dk[:, keys] += parts[1]
                dv[:, keys] += parts[2]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _ranks(q: Tensor, world_size: int) -> Iterator[tuple[slice, list[tuple[slice, AttentionCall]]]]:
    """Yields the rows of each rank and its hops: the rows of their keys, this rank's own first, and the call."""
    length, scale = q.shape[1] // world_size, q.shape[3] ** -0.5
    parts = [slice(rank * length, (rank + 1) * length) for rank in range(world_size)]
    own, earlier = (
        AttentionCall(None, None, None, "", *spec_of(mask), scale, 0.0, 0.0, "auto", False)
        for mask in (rf.Causal(), rf.Full())
    )
    for rank, rows in enumerate(parts):
        yield rows, [(parts[owner], own if owner == rank else earlier) for owner in range(rank, -1, -1)]
