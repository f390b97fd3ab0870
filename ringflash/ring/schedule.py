"""The executor of a plan on one rank: it runs the plan's steps forward and backward.

`ring.ulysses` calls `forward` and `backward_from_delta`. If heads are split over a group of ranks, `ring.ulysses` first
runs an all-to-all. Each rank then has all tokens of its group for some heads. Each pass (a whole forward or backward)
is a generator that yields before it waits for messages, so that every rank can send before any rank waits. With one
rank per process `transport.local.run_alone` runs the generator to its end. `run_lockstep` runs the generators of all
virtual ranks from yield to yield. So all ranks must yield equally often. Their plans have equally many steps, and a
rank also yields where it waits for nothing.

A hop is the KV that a rank holds at one step, and the computation with it. From hop to hop, all KV moves on by one
rank. A grouped plan (`gathered_plan`) has one hop instead: each rank first receives all keys that it sees. A step
starts transfers and computes with the KV of at most one hop. A hop without a visible (query, key) pair computes
nothing. Two kinds of steps have no hop. The last step of every plan only returns gradients, and the first step of a
grouped plan only starts transfers. A `Batch` is transfers that start together and are awaited together; in shapes,
`batch` is the batch size. A slot is one buffer, which holds keys and values together, or dK and dV together. The
planners choose slots and due steps so that no step writes a slot that is still being sent. Comments here describe a
ring. Double rings and grouped hops run the same code, with other transfers in their steps. `plan.py` documents the
fields of `Plan`, `Step`, `Hop`, `Batch` and `Transfer`.

Pictures of both passes, step by step, are in docs/internals/schedule.md.
Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.contract import ForwardArguments, PendingDelta
from ringflash.ring.buffers import Buffers, buffers_of
from ringflash.ring.plan import Batch, Kind, Plan, Transfer
from ringflash.ring.tiles import KernelRun, TileGradients, empty_results
from ringflash.state import AttentionState
from ringflash.transport.base import Message, Transport


class _Moves:
    """Batches of transfers in flight, of KV or of gradients, between `buffers` and the buffers of the peers."""

    def __init__(self, buffers: Buffers, transport: Transport) -> None:
        self._buffers, self._transport = buffers, transport
        self._under_way: list[tuple[Batch, Any]] = []

    def start(self, batches: Sequence[Batch]) -> None:
        """Starts the messages of batches; the messages of a batch start together.

        An empty batch is started too: the transport then checks for a broken ring.
        """
        for batch in batches:
            messages = [self._message(transfer, batch.hop) for transfer in batch.transfers]
            self._under_way.append((batch, self._transport.start(messages)))

    def _message(self, transfer: Transfer, hop: int) -> Message:
        span_of = self._buffers.message
        mirror = None
        if transfer.mirror is not None:
            # All ranks allocate slots to send from alike. The peer's span therefore has the offset in its slot that
            # `mirror` has in this rank's slot. Transports that read the peer's memory compute the address from it.
            slot, first = transfer.mirror
            mirror = span_of(slot, range(first, first + len(transfer.rows)))
        span = span_of(transfer.slot, transfer.rows)
        return Message(transfer.peer, span, transfer.kind, transfer.sends, hop, mirror)

    def finish(self, step: int) -> None:
        """Waits for the batches that are due at `step`, and frees the slots of transfers marked `is_last_use`.

        Gradients of this rank's own KV that return are added to those that it already has, if any.
        """
        due = [(batch, handle) for batch, handle in self._under_way if batch.due_step == step]
        self._under_way = [(batch, handle) for batch, handle in self._under_way if batch.due_step != step]
        for batch, handle in due:
            self._transport.finish(handle)
            for transfer in batch.transfers:
                if transfer.own_row is not None:  # only gradients that return to this rank have it
                    self._buffers.add_returned(transfer.slot, transfer.rows, transfer.own_row)
                if transfer.is_last_use:
                    self._buffers.free(transfer.slot)


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Computes the attention of this rank's queries over the keys of all ranks.

    Args:
        q: (batch, seqlen_local, nheads, headdim).
        k: (batch, seqlen_local, nheads_kv, headdim).
        v: (batch, seqlen_local, nheads_kv, headdim_v).
        plan: the steps of this rank.
        kernel_run: kernels and score settings.
        transport: carries messages between the ranks of the plan.

    Returns:
        out (batch, seqlen_local, nheads, headdim_v) in the dtype of q, and lse (batch, nheads, seqlen_local), natural
        logarithm, in `state.lse_dtype`.
    """
    batch, seqlen, nheads, _ = q.shape
    kernels = kernel_run.kernels
    out, lse = empty_results(q, v)
    computed = [hop.index for hop in plan.hops if hop.pairs]
    if not computed:  # no kernel would write the results
        out.zero_()
        lse.fill_(-torch.inf)
    state = None  # the kernel of a single hop writes out and lse directly
    if len(computed) > 1:
        dtype = kernels.state_dtype(q.dtype)
        state = AttentionState.allocate(batch, seqlen, nheads, v.shape[3], device=q.device, dtype=dtype)
    kv = buffers_of((k, v), k.dtype, Kind.KV, plan, transport)
    kv_moves = _Moves(kv, transport)
    if plan.own_slot is not None:
        # Peers can read slots, but not the caller's tensors. A ring's plan names no slot if this rank sends its KV to
        # no peer. Hop 0 of a ring computes with the caller's tensors in either case.
        kv.load(plan.own_slot)
    # The last step only returns gradients, and no KV is due there.
    for index, step in enumerate(plan.steps[:-1]):
        # 1. Wait for the KV that arrives for this step, and for earlier sends, whose buffers are used again.
        if index > 0:
            yield
            kv_moves.finish(index)
        # 2. Send this KV on to the next rank, and start to receive the next KV from the previous rank.
        kv_moves.start(step.kv)
        # 3. Meanwhile continue the online softmax over this KV. The last hop that computes writes out and lse.
        hop = step.hop
        if hop is not None and hop.pairs:  # not `hop.meets`: the property would cost a Python call a hop
            # In a grouped plan `keys_and_values` sorts the rows into other memory and frees `hop.kv_slot`.
            problem, keys_and_values = kernel_run.problem(plan, hop), kv.keys_and_values(hop)
            first, last = hop.index == computed[0], hop.index == computed[-1]
            kernels.forward(ForwardArguments(q, *keys_and_values, problem, state, out, lse, first, last))
    return out, lse


def backward_from_delta(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor | PendingDelta,
    plan: Plan,
    kernel_run: KernelRun,
    transport: Transport,
    wide_kv: bool = False,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """Computes the gradients of `forward`. dq stays on this rank; dK and dV follow their KV one hop behind.

    Args:
        dout: gradient of out (batch, seqlen_local, nheads, headdim_v), with stride 1 in the last dimension.
        q: as in `forward`.
        k: as in `forward`.
        v: as in `forward`.
        lse: (batch, nheads, seqlen_local), contiguous, over the keys of all ranks.
        delta: the sum of dout * out over headdim_v, less the gradient of lse; contiguous, in the shape of lse. In a
            plan of one hop it may be a `PendingDelta`, which is computed just before the gradients of the hop.
        plan: as in `forward`.
        kernel_run: as in `forward`.
        transport: as in `forward`.
        wide_kv: return dk and dv in the kernels' `state_dtype`, because the caller adds those of ranks that share a KV
            head.

    Returns:
        dq in the dtype of q, then dk and dv in the dtype of k unless `wide_kv`. Sums over hops are in `state_dtype`.
    """
    wide = kernel_run.kernels.state_dtype(q.dtype)
    # If dK and dV are summed over neither hops nor ranks, kernels write them in the inputs' dtype.
    gradient_dtype = q.dtype if plan.world_size == 1 and not wide_kv else wide
    kv = buffers_of((k, v), k.dtype, Kind.KV, plan, transport)
    gradients = buffers_of((k, v), gradient_dtype, Kind.GRADIENT, plan, transport)
    kv_moves, gradient_moves = _Moves(kv, transport), _Moves(gradients, transport)
    # A tile of `TileGradients` is all queries and keys of a hop, unlike a tile of a kernel.
    hop_gradients = TileGradients(dout, q, lse, delta, plan, kernel_run, gradients)
    if plan.own_slot is not None:
        kv.load(plan.own_slot)
    for index, step in enumerate(plan.steps[:-1]):
        # 1. Wait for the KV that arrives for this step, and for earlier sends, whose buffers are used again.
        if index > 0:
            yield
            kv_moves.finish(index)
        # 2. Send the gradient of the previous hop. It follows its KV to the next rank, or returns to the owner if its
        #    KV went no further. Start to receive the gradient of this hop's KV, and of this rank's own KV if that
        #    returns now.
        gradient_moves.start(step.gradients)
        # 3. Send KV on, and start to receive the next KV, as in the forward.
        kv_moves.start(step.kv)
        # 4. Meanwhile compute dQ. A kernel that computes all gradients at once also computes this rank's
        #    share of dK and dV.
        if step.hop is not None:
            hop_gradients.before_arrival(step.hop, kv)
        # 5. Wait for the gradient, and add this rank's share to it.
        yield
        gradient_moves.finish(index)
        if step.hop is not None:
            hop_gradients.after_arrival(step.hop)
    # 6. Return the last gradients to their owners, and round dq meanwhile.
    gradient_moves.start(plan.steps[-1].gradients)
    dq = hop_gradients.dq()
    yield
    gradient_moves.finish(len(plan.steps) - 1)
    return dq, *gradients.own_gradient(wide if wide_kv else k.dtype)
