"""Attention as torch.library custom ops, forward and backward, returning (out, lse).

A custom op takes tensors and plain values, so a context crosses its boundary by name, and a mask as words and tensors.
The empty name is no context, a single device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringflash import ring
from ringflash.context import ContextParallel, context_by_name, described
from ringflash.kernels import backend as backends
from ringflash.kernels.meeting import Scoring
from ringflash.masks import Mask, mask_from_spec
from ringflash.plan import Plan, single_device_plan
from ringflash.ring import Tiles
from ringflash.transport.base import Transport
from ringflash.transport.local import LocalNetwork, run_alone, run_lockstep

T = TypeVar("T")


class _Ranks:
    """The ranks that one call runs in this process: one, or all virtual ones."""

    def __init__(self, operation: str, context: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, tiles: Tiles) -> None:
        self._context: ContextParallel | None = context_by_name(context) if context else None
        self._network = LocalNetwork()
        if self._context is None:
            mask.validate(k.shape[1])  # here, for what torch.compile has traced too
            self.plans: list[Plan] = [single_device_plan(q.shape[1], k.shape[1], mask)]
        else:
            seqlen = self._context.agree(_fields(operation, q, k, v, mask, tiles), q.shape[1])
            mask.validate(seqlen)
            self.plans = [self._context.plan(mask, seqlen, rank) for rank in self._context.local_ranks]

    @property
    def transports(self) -> list[Transport]:
        """One for each plan."""
        if self._context is not None and self._context.transport is not None:
            return [self._context.transport]
        return [self._network.transport(plan.rank) for plan in self.plans]

    def shards(self, x: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """Each rank's part of `x`."""
        if len(self.plans) == 1:
            return [x]
        return x.split([plan.layout.length(plan.rank) for plan in self.plans], dim)

    def run(self, ranks: Sequence[Generator[None, None, T]]) -> list[T]:
        """Runs all ranks to their ends."""
        if self._context is None:
            return [run_alone(ranks[0])]
        with self._context.in_ring(self.plans[0]):
            return [run_alone(ranks[0])] if len(ranks) == 1 else run_lockstep(ranks, self._network)


def _fields(operation: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, tiles: Tiles) -> dict[str, int | float | str]:
    """What all ranks must call with alike."""
    scoring = tiles.scoring
    slopes, sinks = (None if x is None else str(tuple(x.shape)) for x in (scoring.alibi_slopes, scoring.sinks))
    return {
        "operation": operation,
        "device": q.device.type,
        "batch": q.shape[0],
        "nheads": q.shape[2],
        "nheads_kv": k.shape[2],
        "headdim": q.shape[3] if q.shape[3] == v.shape[3] else f"{q.shape[3]}, of v {v.shape[3]}",
        "dtype": str(q.dtype),
        "state_dtype": str(tiles.kernels.state_dtype(q.dtype)),  # of messages; backends differ in it
        "mask": described(mask),
        "softmax_scale": scoring.softmax_scale,
        "softcap": scoring.softcap,
        "dropout": f"{scoring.dropout_p}, seed {scoring.dropout_seed}" if scoring.dropout_p else "none",
        "alibi_slopes": slopes or "none",
        "sinks": sinks or "none",
    }


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


@torch.library.custom_op("ringflash::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    context: str,
    mask: str,
    mask_tensors: Sequence[Tensor],
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Out and lse of the queries of this process over the keys of all ranks of the named context."""
    scoring = Scoring.of(
        q.dtype,
        softmax_scale,
        softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    tiles = Tiles(backends.choose(backend, q), scoring, deterministic)
    ranks = _Ranks("attention", context, q, k, v, mask_from_spec(mask, mask_tensors), tiles)
    shards = zip(ranks.plans, ranks.transports, *map(ranks.shards, (q, k, v)), strict=True)
    with backends.kernels_of(q):
        results = ranks.run([ring.forward(q, k, v, plan, tiles, transport) for plan, transport, q, k, v in shards])
    outs, lses = zip(*results, strict=True)
    return _joined(outs, 1), _joined(lses, 2)


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    context: str,
    mask: str,
    mask_tensors: Sequence[Tensor],
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)


@torch.library.custom_op("ringflash::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    context: str,
    mask: str,
    mask_tensors: Sequence[Tensor],
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv of this process's part of the sequence, and dsinks, its rows' share (empty without)."""
    scoring = Scoring.of(
        q.dtype,
        softmax_scale,
        softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    tiles = Tiles(backends.choose(backend, q), scoring, deterministic)
    ranks = _Ranks("attention backward", context, q, k, v, mask_from_spec(mask, mask_tensors), tiles)
    dlses = [None] * len(ranks.plans) if dlse is None else ranks.shards(dlse, 2)
    shards = zip(ranks.plans, ranks.transports, dlses, *map(ranks.shards, (dout, q, k, v, out)), strict=True)
    with backends.kernels_of(q):
        results = ranks.run(
            [
                ring.backward(dout, dlse, q, k, v, out, lse, plan, tiles, transport)
                for (plan, transport, dlse, dout, q, k, v, out), lse in zip(shards, ranks.shards(lse, 2), strict=True)
            ]
        )
    dqs, dks, dvs, dsinks = zip(*results, strict=True)
    return _joined(dqs, 1), _joined(dks, 1), _joined(dvs, 1), torch.stack(dsinks).sum(0)


@attention_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    context: str,
    mask: str,
    mask_tensors: Sequence[Tensor],
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, alibi_slopes, dropout_seed, *ctx.values = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks, alibi_slopes, dropout_seed)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, alibi_slopes, dropout_seed = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    _, _, mask_tensors, *rest = ctx.values
    dq, dk, dv, dsinks = attention_backward(
        dout, dlse, q, k, v, out, lse, sinks, alibi_slopes, dropout_seed, *ctx.values
    )
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    # None for each further input, for the mask's tensors nested as they are.
    return dq, dk, dv, dsinks, None, None, None, None, [None] * len(mask_tensors), *[None] * len(rest)


attention.register_autograd(_backward, setup_context=_save)
