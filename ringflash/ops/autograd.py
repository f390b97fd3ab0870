"""Attention as torch.library custom operators, forward and backward, returning (out, lse)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringflash.context import ContextParallel, context_by_name
from ringflash.kernels import select
from ringflash.layouts.grid import split_rows
from ringflash.masks import Mask, described
from ringflash.ops.call import SCHEMA, AttentionCall
from ringflash.ops.guard import Guard, Phase, in_ring
from ringflash.ring import ulysses
from ringflash.ring.plan import Plan, single_device_plan
from ringflash.ring.tiles import KernelRun, empty_results
from ringflash.ring.ulysses import Group
from ringflash.state import lse_dtype
from ringflash.transport.all_to_all import LocalHeads
from ringflash.transport.base import Transport
from ringflash.transport.local import LocalNetwork, run_alone, run_lockstep

T = TypeVar("T")
R = TypeVar("R", bound=tuple[Tensor, ...])


class _Ranks:
    """Ranks that one call runs in this process: one, or all virtual ranks."""

    def __init__(
        self,
        operation: str,
        context: ContextParallel | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        guard: Guard,
    ) -> None:
        self._operation, self._context = operation, context
        self._network = LocalNetwork()
        mask = call.mask_of(k.shape[1])
        self._kernel_run = kernel_run = call.kernel_run(q)
        if self._context is None:
            self.plans: Sequence[Plan] = [single_device_plan(q.shape[1], k.shape[1], mask)]
            self.groups: list[Group | None] = [None]
            self._lengths = [q.shape[1]]
        else:
            row_bytes = _row_bytes(q, k, v, self._context.grid.heads) if k.is_cuda else None
            fields = partial(_fields, operation, q, k, v, mask, kernel_run)
            planned = partial(_planned, self._context, mask, row_bytes)
            kind = operation, q.device, q.dtype, q.shape, k.shape, v.shape, mask, *_values(kernel_run)
            guard.phase = Phase.AGREEING
            self.plans, lengths = self._context.agree_on(kind, fields, q.shape[1], mask, planned)
            guard.phase = Phase.RUNNING
            self.groups = [self._group(self._context, lengths, rank) for rank in self._context.local_ranks]
            self._lengths = [lengths[rank] for rank in self._context.local_ranks]

    @property
    def transports(self) -> list[Transport]:
        """Transport of each plan."""
        if self._context is not None and self._context.transport is not None:
            return [self._context.transport]
        if self._context is None:
            return [self._network.transport(0)]
        return [self._network.transport(r, self._context.grid.ring_of(r)) for r in self._context.local_ranks]

    def _group(self, context: ContextParallel, lengths: Sequence[int], rank: int) -> Group | None:
        """Returns the group with which `rank` splits heads, if any; `lengths` are the rows that each rank stores."""
        if context.grid.heads == 1:
            return None
        members = context.grid.group(rank)
        transport = context.heads_transport or LocalHeads(self._network.transport(rank, members))
        return Group(members.index(rank), tuple(lengths[member] for member in members), transport)

    def shards(self, x: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """Returns each rank's part of `x`."""
        if len(self.plans) == 1:
            return [x]
        return x.split(self._lengths, dim)

    def computed(self, compute: Callable[..., R], inputs: Sequence[Tensor | None]) -> R:
        """Returns `compute(kernel_run, *inputs)`, replayed from a CUDA graph if the context captures its passes.

        Calls with a mask of tensors, such as documents, or with dropout are not captured, because they seldom recur.
        """
        context, plan, kernel_run = self._context, self.plans[0], self._kernel_run
        score_config = kernel_run.score_config
        (words, tensors), replays = plan.mask.spec, None if context is None else context.replays
        if replays is None or tensors or score_config.dropout_p or torch.cuda.is_current_stream_capturing():
            return compute(kernel_run, *inputs)
        assert context is not None

        def anew(alibi_slopes: Tensor | None, sinks: Tensor | None, *inputs: Tensor | None) -> R:
            return compute(
                replace(kernel_run, score_config=replace(score_config, alibi_slopes=alibi_slopes, sinks=sinks)), *inputs
            )

        plain = kernel_run.kernels, kernel_run.deterministic, score_config.softmax_scale, score_config.softcap
        kind = self._operation, words, plan.layout, *plain
        inputs = score_config.alibi_slopes, score_config.sinks, *inputs
        return replays.run(kind, anew, inputs, partial(in_ring, context, plan), partial(context.watch, plan))

    def run(self, ranks: Sequence[Generator[None, None, T]]) -> list[T]:
        """Runs all ranks to their ends and returns their results."""
        if self._context is None:
            return [run_alone(ranks[0])]
        with in_ring(self._context, self.plans[0]):
            return [run_alone(ranks[0])] if len(ranks) == 1 else run_lockstep(ranks, self._network)


def _row_bytes(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> int:
    """Returns the bytes of a token's keys and values on the rank with most KV heads, if `ranks` ranks split heads."""
    nheads_kv = ulysses.most_kv_heads(q.shape[2], k.shape[2], ranks)
    return k.shape[0] * nheads_kv * (k.shape[3] + v.shape[3]) * k.itemsize


def _planned(
    context: ContextParallel, mask: Mask, row_bytes: int | None, seqlen: int
) -> tuple[list[Plan], tuple[int, ...]]:
    """Returns the plans of this process's ranks, and the number of rows that every rank stores."""
    plans = [context.plan(mask, seqlen, rank, row_bytes=row_bytes) for rank in context.local_ranks]
    return plans, split_rows(plans[0].layout, context.grid).lengths


def _values(kernel_run: KernelRun) -> tuple[Hashable, ...]:
    """Returns the parts of `kernel_run` that all ranks must agree on, except the dtype."""
    score_config = kernel_run.score_config
    slopes, sinks = (None if x is None else x.shape for x in (score_config.alibi_slopes, score_config.sinks))
    plain = score_config.softmax_scale, score_config.softcap, score_config.dropout_p, score_config.dropout_seed
    return kernel_run.kernels, *plain, slopes, sinks


def _fields(
    operation: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel_run: KernelRun
) -> dict[str, int | float | str]:
    """Returns the arguments that all ranks must agree on, by name."""
    score_config = kernel_run.score_config
    slopes, sinks = (
        None if x is None else str(tuple(x.shape)) for x in (score_config.alibi_slopes, score_config.sinks)
    )
    return {
        "operation": operation,
        "device": q.device.type,
        "batch": q.shape[0],
        "nheads": q.shape[2],
        "nheads_kv": k.shape[2],
        "headdim": q.shape[3] if q.shape[3] == v.shape[3] else f"{q.shape[3]}, of v {v.shape[3]}",
        "dtype": str(q.dtype),
        "state_dtype": str(kernel_run.kernels.state_dtype(q.dtype)),  # of messages; backends differ in it
        "mask": described(mask),
        "softmax_scale": score_config.softmax_scale,
        "softcap": score_config.softcap,
        "dropout": f"{score_config.dropout_p}, seed {score_config.dropout_seed}" if score_config.dropout_p else "none",
        "alibi_slopes": slopes or "none",
        "sinks": sinks or "none",
    }


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


@torch.library.custom_op(
    "ringflash::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)"
)
def attention(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    """Returns out and lse of this process's queries over the keys of all ranks of the context.

    `parameters` are the fields of an `AttentionCall`. lse is in `lse_dtype`, more precise than what users get, for the
    backward.
    """
    call = AttentionCall(*parameters)
    if not call.context:
        return _on_one_device(q, k, v, call)
    whole = context_by_name(call.context)
    with Guard(whole) as guard:
        ranks = _Ranks("attention", whole, q, k, v, call, guard)

        def compute(kernel_run: KernelRun, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            shards = zip(ranks.plans, ranks.transports, ranks.groups, *map(ranks.shards, (q, k, v)), strict=True)
            results = ranks.run(
                [
                    ulysses.forward(q, k, v, plan, kernel_run, transport, group)
                    for plan, transport, group, q, k, v in shards
                ]
            )
            outs, lses = zip(*results, strict=True)
            return _joined(outs, 1), _joined(lses, 2)

        with select.kernels_of(q):
            return ranks.computed(compute, (q, k, v))


def _on_one_device(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Computes `attention` without a context, as a ring of one rank would: one tile problem, no messages."""
    kernel_run = call.kernel_run(q)
    plan = single_device_plan(q.shape[1], k.shape[1], call.mask_of(k.shape[1]))
    hop = plan.hops[0]
    out, lse = empty_results(q, v)
    if not hop.meets:
        return out.zero_(), lse.fill_(-torch.inf)
    with select.kernels_of(q):
        problem = kernel_run.problem(plan, hop)
        kernel_run.kernels.forward(q, k, v, problem, state=None, out=out, lse=lse, first=True, last=True)
    return out, lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))


@torch.library.custom_op(
    "ringflash::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv of this process's part of the sequence, and its rows' share of dsinks (empty without).

    `parameters` are the fields of an `AttentionCall`.
    """
    call = AttentionCall(*parameters)
    whole = context_by_name(call.context) if call.context else None
    with Guard(whole) as guard:
        ranks = _Ranks("attention backward", whole, q, k, v, call, guard)

        def compute(
            kernel_run: KernelRun, dlse: Tensor | None, lse: Tensor, *rows: Tensor
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            dlses = [None] * len(ranks.plans) if dlse is None else ranks.shards(dlse, 2)
            shards = zip(*map(ranks.shards, rows), dlses, ranks.shards(lse, 2), strict=True)
            ends = zip(ranks.plans, ranks.transports, ranks.groups, strict=True)
            results = ranks.run(
                [
                    ulysses.backward(dout, dlse, q, k, v, out, lse, plan, kernel_run, transport, group)
                    for (dout, q, k, v, out, dlse, lse), (plan, transport, group) in zip(shards, ends, strict=True)
                ]
            )
            dqs, dks, dvs, dsinks = zip(*results, strict=True)
            total = dsinks[0] if len(dsinks) == 1 else torch.stack(dsinks).sum(0)
            return _joined(dqs, 1), _joined(dks, 1), _joined(dvs, 1), total

        with select.kernels_of(q):
            return ranks.computed(compute, (dlse, lse, dout, q, k, v, out))


@attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = AttentionCall(*parameters).sinks
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps on `ctx` what `gradients` needs of the operator's inputs and output."""
    q, k, v, *parameters = inputs
    call = AttentionCall(*parameters)
    ctx.call = call._replace(sinks=None, alibi_slopes=None, dropout_seed=None)
    ctx.context = context_by_name(call.context) if call.context else None  # the backward finds it by name
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, call.sinks, call.alibi_slopes, call.dropout_seed)


def gradients(
    backward: Callable[..., tuple[Tensor, ...]],
    call: AttentionCall,
    saved: Sequence[Any],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of q, k, v and sinks by `backward`, the backward operator or a stand-in of it."""
    q, k, v, out, lse, sinks, alibi_slopes, dropout_seed = saved
    if dout is None:
        dout = torch.zeros_like(out)
    call = call._replace(sinks=sinks, alibi_slopes=alibi_slopes, dropout_seed=dropout_seed)
    dq, dk, dv, dsinks = backward(dout, dlse, q, k, v, out, lse, *call)
    return dq, dk, dv, None if sinks is None else dsinks.to(sinks.dtype)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dv, dsinks = gradients(attention_backward, ctx.call, ctx.saved_tensors, dout, dlse)
    # None for each parameter without a gradient; autograd wants the mask's tensors nested as they are.
    others: dict[str, Any] = dict.fromkeys(AttentionCall._fields)
    others |= {"sinks": dsinks, "mask_tensors": [None] * len(ctx.call.mask_tensors)}
    return dq, dk, dv, *others.values()


attention.register_autograd(_backward, setup_context=save)
