"""Attention on the ranks of a context: a checked call, ready to run forward and backward on this process's ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ringflash.context import ContextParallel
from ringflash.kernels import select
from ringflash.layouts.grid import split_rows
from ringflash.masks import Mask, described
from ringflash.ops.call import AttentionCall
from ringflash.ops.guard import Guard, Phase, in_ring
from ringflash.ops.one_device import OneDevice, PackedCall
from ringflash.ring import ulysses
from ringflash.ring.plan import Plan
from ringflash.ring.tiles import KernelRun
from ringflash.ring.ulysses import Group
from ringflash.state import lse_dtype
from ringflash.transport.all_to_all import LocalHeads
from ringflash.transport.base import Transport
from ringflash.transport.local import LocalNetwork, run_alone, run_lockstep

T = TypeVar("T")
R = TypeVar("R", bound=tuple[Tensor, ...])
_Planned = tuple[list[Plan], tuple[int, ...]]  # the plans of this process's ranks, and the rows that every rank stores


class RingCall:
    """Attention of shards with the shapes, dtype and device that it was made for.

    Contexts keep their calls, so a call refers to no context. It holds no tensor except the mask's, sinks and slopes.
    """

    def __init__(
        self, context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, mask: Mask
    ) -> None:
        """Keeps a checked call on the ranks of `context`.

        Args:
            context: the ranks.
            q: this process's queries, for shape, dtype and device.
            k: likewise the keys.
            v: likewise the values.
            call: parameters of the call.
            mask: the mask of the call.
        """
        self.call = call.without_tensors()
        self._mask, self._kernel_run = mask, call.kernel_run(q)
        self._local_seqlen = q.shape[1]
        self._row_bytes = _row_bytes(q, k, v, context.grid.heads) if k.is_cuda else None
        self._fields = _fields(q, k, v, self._mask, self._kernel_run)
        self._kind = q.device, q.dtype, q.shape, k.shape, v.shape, self._mask, *_values(self._kernel_run)
        self._planned: _Planned | None = None  # of virtual ranks, which need no agreement
        self._rings = [context.grid.ring_of(rank) for rank in context.local_ranks]

    @staticmethod
    def of(context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> RingCall:
        """Returns the call on the ranks of `context`, made now or before."""
        key = call.key(q, k, v)
        if key is not None and (known := context.operator_calls.get(key)) is not None:
            return known
        made = RingCall(context, q, k, v, call, call.mask_of(k.shape[1]))
        return made if key is None else context.operator_calls.put(key, made)

    def forward(self, context: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns out and lse of this process's queries over the keys of all ranks, as the operator `attention`."""
        with Guard(context) as guard:
            ranks = self._agreed("attention", context, guard)

            def compute(kernel_run: KernelRun, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                shards = zip(*ranks[:3], *map(ranks.shards, (q, k, v)), strict=True)
                outs, lses = ranks.run(
                    [
                        ulysses.forward(q, k, v, plan, kernel_run, transport, group)
                        for plan, transport, group, q, k, v in shards
                    ]
                )
                return _joined(outs, 1), _joined(lses, 2)

            with select.kernels_of(q):
                return self._computed("attention", ranks, compute, (q, k, v))

    def backward(
        self,
        context: ContextParallel,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns dq, dk, dv and dsinks of this process's shards, as the operator `attention_backward`."""
        with Guard(context) as guard:
            ranks = self._agreed("attention backward", context, guard)

            def compute(
                kernel_run: KernelRun, dlse: Tensor | None, lse: Tensor, *rows: Tensor
            ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
                lse = lse.to(lse_dtype(q.dtype))  # a hook of saved tensors may return it rounded
                dlses = [None] * len(ranks.plans) if dlse is None else ranks.shards(dlse, 2)
                shards = zip(*map(ranks.shards, rows), dlses, ranks.shards(lse, 2), strict=True)
                dqs, dks, dvs, dsinks = ranks.run(
                    [
                        ulysses.backward(dout, dlse, q, k, v, out, lse, plan, kernel_run, transport, group)
                        for (dout, q, k, v, out, dlse, lse), plan, transport, group in zip(
                            shards, *ranks[:3], strict=True
                        )
                    ]
                )
                total = dsinks[0] if len(dsinks) == 1 else torch.stack(dsinks).sum(0)
                return _joined(dqs, 1), _joined(dks, 1), _joined(dvs, 1), total

            with select.kernels_of(q):
                return self._computed("attention backward", ranks, compute, (dlse, lse, dout, q, k, v, out))

    def _agreed(self, operation: str, context: ContextParallel, guard: Guard) -> _Ranks:
        """Agrees with all ranks on the call, and returns the ranks of this process for one pass."""
        guard.phase = Phase.AGREEING
        context.own_passes += 1
        if self._planned is not None and context.is_virtual:
            plans, lengths = self._planned
        else:
            described = lambda: {"operation": operation, **self._fields}  # noqa: E731
            planned = partial(_planned, context, self._mask, self._row_bytes)
            kind = operation, *self._kind
            plans, lengths = context.agree_on(kind, described, self._local_seqlen, self._mask, planned)
            if context.is_virtual:
                self._planned = plans, lengths
        guard.phase = Phase.RUNNING
        network, local_ranks = LocalNetwork(), context.local_ranks
        transports: list[Transport] = [context.transport] if context.transport is not None else []
        if not transports:
            transports += [network.transport(rank, ring) for rank, ring in zip(local_ranks, self._rings, strict=True)]
        groups: list[Group | None] = [None] * len(plans)
        if context.grid.heads > 1:
            groups = [_group(context, network, lengths, rank) for rank in local_ranks]
        return _Ranks(plans, transports, groups, [lengths[rank] for rank in local_ranks], context, network)

    def _computed(self, operation: str, ranks: _Ranks, compute: Callable[..., R], inputs: Sequence[Tensor | None]) -> R:
        """Returns `compute(kernel_run, *inputs)`, replayed from a CUDA graph if the context captures such passes.

        Calls with a mask of tensors, such as documents, or with dropout are not captured, because they seldom recur.
        """
        context, plan = ranks.context, ranks.plans[0]
        kernel_run = replace(self._kernel_run, cache={})  # of this pass
        score_config, graphs = kernel_run.score_config, context.graphs
        if graphs is None or not graphs.takes(plan, self._row_bytes):
            return compute(kernel_run, *inputs)
        words, tensors = plan.mask.spec
        if tensors or score_config.dropout_p or torch.cuda.is_current_stream_capturing():
            return compute(kernel_run, *inputs)

        def anew(alibi_slopes: Tensor | None, sinks: Tensor | None, *inputs: Tensor | None) -> R:
            return compute(
                replace(kernel_run, score_config=replace(score_config, alibi_slopes=alibi_slopes, sinks=sinks)), *inputs
            )

        plain = kernel_run.kernels, kernel_run.deterministic, score_config.softmax_scale, score_config.softcap
        kind = operation, words, plan.layout, *plain
        inputs = score_config.alibi_slopes, score_config.sinks, *inputs
        return graphs.run(kind, anew, inputs, partial(in_ring, context, plan), partial(context.watch, plan))


def call_of(
    context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> RingCall | OneDevice | PackedCall:
    """Returns `RingCall.of`, or attention on one device for a context of one rank, which holds the whole sequence.

    CUDA graphs that the context asks for are those of a ring, also of one rank.
    """
    if context.world_size > 1 or context.graphs is not None:
        return RingCall.of(context, q, k, v, call)
    context.check_alive()
    return OneDevice.of(q, k, v, call)


class BoundCall(NamedTuple):
    """A `RingCall` with the context that it runs on."""

    ring_call: RingCall
    context: ContextParallel

    @property
    def call(self) -> AttentionCall:
        """Parameters of the call."""
        return self.ring_call.call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `RingCall.forward`."""
        return self.ring_call.forward(self.context, q, k, v)

    def backward(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns `RingCall.backward`."""
        return self.ring_call.backward(self.context, *tensors)  # pyright: ignore[reportArgumentType]


class _Ranks(NamedTuple):
    """Ranks that one pass runs in this process: one, or all virtual ranks.

    Args:
        plans: the plan of each rank.
        transports: the transport of each rank.
        groups: the group with which each rank splits heads, if any.
        lengths: rows that each rank stores.
        context: the ranks of the whole ring.
        network: carries messages between virtual ranks.
    """

    plans: Sequence[Plan]
    transports: Sequence[Transport]
    groups: Sequence[Group | None]
    lengths: list[int]
    context: ContextParallel
    network: LocalNetwork

    def shards(self, x: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """Returns each rank's part of `x`."""
        return [x] if len(self.plans) == 1 else x.split(self.lengths, dim)

    def run(self, ranks: Sequence[Generator[None, None, tuple[T, ...]]]) -> list[tuple[T, ...]]:
        """Runs all ranks to their ends, and returns for each result its values on all ranks."""
        with in_ring(self.context, self.plans[0]):
            results = [run_alone(ranks[0])] if len(ranks) == 1 else run_lockstep(ranks, self.network)
        return list(zip(*results, strict=True))


def _group(context: ContextParallel, network: LocalNetwork, lengths: Sequence[int], rank: int) -> Group:
    """Returns the group with which `rank` splits heads; `lengths` are the rows that each rank stores."""
    members = context.grid.group(rank)
    transport = context.heads_transport or LocalHeads(network.transport(rank, members))
    return Group(members.index(rank), tuple(lengths[member] for member in members), transport)


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


def _fields(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel_run: KernelRun) -> dict[str, int | float | str]:
    """Returns the arguments that all ranks must agree on besides the operation, by name."""
    score_config = kernel_run.score_config
    slopes, sinks = (
        None if x is None else str(tuple(x.shape)) for x in (score_config.alibi_slopes, score_config.sinks)
    )
    return {
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
