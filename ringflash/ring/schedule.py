"""The executor of a ring's plan on one rank: exchange -> tile kernel -> state, forward and backward.

`ring.ulysses` calls `forward` and `backward_from_delta`; for a grouped plan it calls those of `ring.gathered` instead.
Each pass (a whole forward or backward) is a generator that yields before it waits for messages. With a process group
the generator simply runs to its end; the local transport runs the generators of all virtual ranks in lockstep. All
ranks have the same number of hops, so they yield equally often.

In a double ring, an inner pass is a full pass of KV around the inner ring: see `ring.double_ring`. Pictures of both
passes hop by hop are in docs/internals/schedule.md.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.contract import DqSum, ScoreConfig, TileProblem
from ringflash.kernels.select import TileKernels
from ringflash.ring.double_ring import FarGradients
from ringflash.ring.plan import Hop, Plan
from ringflash.state import AttentionState, lse_dtype
from ringflash.transport.base import FAR, Message, Transport

KV, GRADIENT, _GRADIENT_HOME = range(3)  # channels of messages
_FAR_KV, _FAR_GRADIENT = FAR, FAR + 1


@dataclass(frozen=True)
class KernelRun:
    """Kernels of a pass, with the settings common to all hops.

    Args:
        kernels: the backend's tile kernels.
        score_config: parameters of scores and weights.
        deterministic: whether gradients must be bitwise repeatable.
        cache: values that kernels keep from one hop of the pass for the next.
    """

    kernels: TileKernels
    score_config: ScoreConfig
    deterministic: bool
    cache: dict[str, Any] = field(default_factory=dict, compare=False)

    def problem(self, plan: Plan, hop: Hop) -> TileProblem:
        """Returns the positions of the queries and keys at `hop`, with the mask and score settings for the kernels."""
        return TileProblem(plan.q_chunks, plan.owner_chunks(hop), plan.mask, self.score_config, self.cache)

    def single_pass(self, q: Tensor, v: Tensor, plan: Plan, *, hops: int) -> bool:
        """Returns whether one kernel computes dq, dk and dv at each hop, instead of one for dq and one for dk and dv.

        The choice is made once for a backward of `hops` hops. It assumes that every hop has as many keys as `v` has
        rows.
        """
        deterministic = self.deterministic
        return self.kernels.fuses_dq(q, v, plan.mask, self.score_config, hops=hops, deterministic=deterministic)

    def new_dq(self, q: Tensor, *, hops: int) -> DqSum:
        """Returns the accumulator to which the one kernel of `single_pass` adds dq over `hops` hops."""
        return self.kernels.new_dq(q, hops=hops, deterministic=self.deterministic)


class _PairBuffer:
    """Storage of keys and values, or of their gradients, as one message; each is (batch, rows, nheads_kv, headdim).

    Args:
        like: keys and values with the batch, heads and headdims of the pair; their number of rows may differ.
        max_rows: rows of the longest message.
        dtype: dtype of the storage.
        transport: allocates the storage under `slot`; None allocates ordinary memory.
        slot: (channel, number of the buffer), as in `Transport.allocate`.
    """

    def __init__(
        self,
        like: tuple[Tensor, Tensor],
        max_rows: int,
        dtype: torch.dtype,
        transport: Transport | None = None,
        slot: tuple[int, int] = (0, 0),
    ) -> None:
        batch, _, *first = like[0].shape
        second = like[1].shape[2:]
        self._batch, self._heads = batch, (tuple(first), tuple(second))
        self._widths = batch * first[0] * first[1], batch * second[0] * second[1]
        self._rows = max_rows
        numel = max_rows * sum(self._widths)
        if transport is None:  # only the symmetric transport must allocate what it sends, and it has no double rings
            self._storage = like[0].new_empty(numel, dtype=dtype)
        else:
            self._storage = transport.allocate(slot, numel, like[0], dtype)
        self._views: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}  # cached: every hop uses them

    def message(self, rows: int) -> Tensor:
        """Returns the storage of both tensors of `rows` rows as one contiguous vector."""
        return self._views_of(rows)[0]

    def pair(self, rows: int) -> tuple[Tensor, Tensor]:
        """Returns both tensors of `rows` rows as views."""
        return self._views_of(rows)[1]

    def _views_of(self, rows: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        views = self._views.get(rows)
        if views is None:
            start, (first, second) = int(self._storage.storage_offset()), self._widths
            message = self._storage if rows == self._rows else self._storage[: rows * (first + second)]
            pair = self._view(rows, 0, start), self._view(rows, 1, start + rows * first)
            views = self._views[rows] = message, pair
        return views

    def _view(self, rows: int, which: int, start: int) -> Tensor:
        """Returns one of the tensors in a single step, because more steps take noticeable time for short sequences."""
        nheads, headdim = self._heads[which]
        row = nheads * headdim
        return self._storage.as_strided((self._batch, rows, nheads, headdim), (rows * row, row, headdim, 1), start)


class _KVRing:
    """KV of the other ranks, hop by hop, in two rotating buffers.

    A double ring uses two more buffers, because the KV that opens an inner pass is still being sent to the next group
    while it is used.
    """

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, transport: Transport) -> None:
        self._plan, self._transport = plan, transport
        self._own = (k, v)
        rows = max(plan.layout.lengths)
        count = 0 if plan.world_size == 1 else 2 if plan.inner is None else 4
        self._buffers = [_PairBuffer(self._own, rows, k.dtype, transport, (KV, i)) for i in range(count)]
        self._far_handle: object = None
        first = plan.hops[0]
        # Hop 0 computes with the caller's own tensors; they are copied to a buffer only to be sent.
        if first.send_kv or first.far_to is not None:
            for target, source in zip(self._buffers[self._slot(first)].pair(k.shape[1]), self._own, strict=True):
                target.copy_(source)

    def _slot(self, hop: Hop) -> int:
        return 2 + hop.revolution % 2 if hop.starts and self._plan.inner is not None else hop.index % 2

    def visiting(self, hop: Hop) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of `hop`."""
        if hop.index == 0:
            return self._own
        return self._buffers[self._slot(hop)].pair(self._plan.layout.length(hop.owner))

    def _message(self, hop: Hop, owner: int) -> Tensor:
        """Returns the buffer in use at `hop` as a vector, as long as the KV of `owner`."""
        return self._buffers[self._slot(hop)].message(self._plan.layout.length(owner))

    def start(self, hop: Hop) -> object:
        """Starts to send the KV of `hop` on, and to receive the KV of the next hop.

        In a double ring, also starts the far messages of an inner pass. Returns the handle of the other messages.
        """
        messages = []
        if hop.send_kv:
            buffer = self._message(hop, hop.owner)
            messages.append(Message(self._plan.next_rank, buffer, KV, sends=True, hop=hop.index))
        if hop.receive_kv:
            following = self._plan.hops[hop.index + 1]
            # The sender is at `hop`, so its message lies in the buffer that every rank uses at `hop`.
            buffer, mirror = (self._message(at, following.owner) for at in (following, hop))
            source = self._plan.previous_rank
            messages.append(Message(source, buffer, KV, sends=False, hop=hop.index, mirror=mirror))
        moving = self._transport.start(messages)
        far = []
        if hop.far_to is not None:
            far.append(Message(hop.far_to, self._message(hop, hop.owner), _FAR_KV, sends=True, hop=hop.index))
        if hop.far_from is not None:
            following = self._plan.next_revolution(hop)
            buffer = self._message(following, following.owner)
            far.append(Message(hop.far_from, buffer, _FAR_KV, sends=False, hop=hop.index))
        if far:
            self._far_handle = self._transport.start(far)
        return moving

    def finish(self, hop: Hop, moving: object) -> None:
        """Waits for the messages that `start` returned at `hop`; at the end of an inner pass, also for its far ones."""
        self._transport.finish(moving)
        if self._far_handle is not None and self._plan.ends_revolution(hop):
            self._transport.finish(self._far_handle)
            self._far_handle = None


class _GradientRing:
    """dK and dV of the KV that moves around the ring, in `dtype`: the state's dtype unless the ring has one rank.

    A gradient follows its KV one hop behind. From the last stop of the KV it returns to the owner. In a double ring one
    gradient returns from each inner pass, and the owner adds them up.
    """

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype, plan: Plan, transport: Transport) -> None:
        self._plan, self._transport, self._kv, self._dtype = plan, transport, (k, v), dtype
        rows = max(plan.layout.lengths)
        count = 2 if plan.world_size > 1 else 0
        self._travelling = [_PairBuffer(self._kv, rows, dtype, transport, (GRADIENT, i)) for i in range(count)]
        self._far = FarGradients(transport)
        self._own: tuple[Tensor, Tensor] | None = None
        if not plan.hops[0].send_kv:  # this rank's gradient never leaves, so no later hop may overwrite its buffer
            self._own = self._empty(k.shape[1])

    def _empty(self, rows: int) -> tuple[Tensor, Tensor]:
        dk, dv = (x.new_empty((x.shape[0], rows, *x.shape[2:]), dtype=self._dtype) for x in self._kv)
        return dk, dv

    def _message(self, hop: Hop, owner: int) -> Tensor:
        """Returns the buffer in use at `hop` as a vector, as long as the gradient of the KV of `owner`."""
        return self._travelling[hop.index % 2].message(self._plan.layout.length(owner))

    def visiting(self, hop: Hop) -> tuple[Tensor, Tensor]:
        """Returns dK and dV of the KV at `hop`: uninitialised if `hop.starts`, else the sum over earlier ranks."""
        if hop.index == 0 and self._own is not None:
            return self._own
        return self._travelling[hop.index % 2].pair(self._plan.layout.length(hop.owner))

    def scratch_grads(self, hop: Hop) -> tuple[Tensor, Tensor]:
        """Returns storage for this rank's share of dK and dV at `hop`, free before the other ranks' sum arrives.

        If `hop.starts` there is no such sum, and the storage is `visiting`.
        """
        return self.visiting(hop) if hop.starts else self._empty(self._plan.layout.length(hop.owner))

    def start_after(self, done: Hop) -> object:
        """Starts the gradient messages of hop `done`, which is computed; returns the handle of those within the ring.

        Sends its gradient to the next rank or to the owner, and receives the next hop's gradient or this rank's own.
        """
        plan, messages, h = self._plan, [], done.index
        if done.send_kv:
            messages.append(Message(plan.next_rank, self._message(done, done.owner), GRADIENT, sends=True, hop=h))
        if done.receive_kv:
            following = plan.hops[h + 1]
            # The sender's gradient of hop `done` lies in the buffer that every rank uses at `done`.
            buffer, mirror = (self._message(at, following.owner) for at in (following, done))
            messages.append(Message(plan.previous_rank, buffer, GRADIENT, sends=False, hop=h, mirror=mirror))
        far = done.revolution > 0  # the KV's owner is in another group, and so is the sender of this rank's gradient
        channel, owner_messages = (_FAR_GRADIENT, []) if far else (_GRADIENT_HOME, messages)
        if done.send_grad_home:
            owner_messages.append(Message(done.owner, self._message(done, done.owner), channel, sends=True, hop=h))
        arriving = None
        if done.grad_comes_home is not None:
            rows = self._kv[0].shape[1]
            home = _PairBuffer(self._kv, rows, self._dtype)
            arriving = home.pair(rows)
            buffer, mirror = home.message(rows), self._message(done, plan.rank)
            owner_messages.append(Message(done.grad_comes_home, buffer, channel, sends=False, hop=h, mirror=mirror))
        if far and owner_messages:
            self._far.start(done.revolution, owner_messages, arriving)
        if far and done.send_grad_home:  # the rotation would reuse the buffer before this slow message is done
            self._travelling[done.index % 2] = _PairBuffer(self._kv, max(plan.layout.lengths), self._dtype)
        elif arriving is not None and not far:
            self._own = arriving
        return self._transport.start(messages)

    def finish(self, at: Hop | None, moving: object) -> None:
        """Waits for the messages `moving` of `start_after`.

        At the last hop of an inner pass, also waits for the gradients that earlier inner passes return to this rank,
        and adds them to its own. After the last hop of all, waits for all of them.

        Args:
            at: the current hop; None after the last one.
            moving: the handle that `start_after` returned.
        """
        self._transport.finish(moving)
        if at is None or (self._plan.inner is not None and self._plan.ends_revolution(at)):
            for arrived in self._far.finish(None if at is None else at.revolution):
                assert self._own is not None
                for total, share in zip(self._own, arrived, strict=True):
                    total += share

    def own(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the finished dK and dV of this rank's own KV in `dtype`.

        They have separate storages, because results of a custom operator may not alias each other.
        """
        assert self._own is not None
        dk, dv = (gradient.to(dtype) for gradient in self._own)
        return dk, dv.clone() if dv.untyped_storage().data_ptr() == dk.untyped_storage().data_ptr() else dv


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Computes the attention of this rank's queries over the keys of all ranks.

    Args:
        q: (batch, seqlen_local, nheads, headdim).
        k: (batch, seqlen_local, nheads_kv, headdim).
        v: (batch, seqlen_local, nheads_kv, headdim_v).
        plan: the hops of this rank.
        kernel_run: kernels and score settings.
        transport: carries messages between the ranks of the plan.

    Returns:
        out (batch, seqlen_local, nheads, headdim_v) in the dtype of q, and lse (batch, nheads, seqlen_local), natural
        logarithm, in `lse_dtype`.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers", algorithm 1.
    """
    batch, seqlen, nheads, _ = q.shape
    out, lse = empty_results(q, v)
    computed = [hop.index for hop in plan.hops if hop.meets]
    if not computed:
        out.zero_()
        lse.fill_(-torch.inf)
    state = None  # the kernel of a single hop writes out and lse at once
    if len(computed) > 1:
        dtype = kernel_run.kernels.state_dtype(q.dtype)
        state = AttentionState.allocate(batch, seqlen, nheads, v.shape[3], device=q.device, dtype=dtype)
    kv = _KVRing(k, v, plan, transport)
    for hop in plan.hops:
        moving_kv = kv.start(hop)
        if hop.meets:
            kernel_run.kernels.forward(
                q,
                *kv.visiting(hop),
                kernel_run.problem(plan, hop),
                state=state,
                out=out,
                lse=lse,
                first=hop.index == computed[0],
                last=hop.index == computed[-1],
            )
        yield
        kv.finish(hop, moving_kv)
    return out, lse


def backward_from_delta(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    plan: Plan,
    kernel_run: KernelRun,
    transport: Transport,
    wide_kv: bool = False,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """Computes the gradients of `forward`: dq, dk and dv in the shapes of q, k and v.

    delta = rowsum(dout * out) - dlse, and `lse` covers the keys of the whole ring. Both are contiguous, and the rows of
    `dout` are dense. dk and dv are in the dtype of k. With `wide_kv` they are in the state's dtype, because the caller
    still adds the shares of ranks that have the same KV head.

    dq stays on this rank. Over several ranks it adds up in the state's dtype, and after the last hop it is rounded to
    the dtype of q. At each hop a kernel runs while the gradient of the hop's KV arrives. With separate kernels the dQ
    kernel runs then, and the dK/dV kernel adds to the received gradient afterwards. With one kernel for all three
    gradients (`KernelRun.single_pass`), its dk and dv are added to the received gradient afterwards.
    """
    kernels = kernel_run.kernels
    wide = kernels.state_dtype(q.dtype)
    hops = len(plan.hops)
    single_pass = kernel_run.single_pass(q, v, plan, hops=hops)
    dtype = q.dtype if plan.world_size == 1 else wide  # with one rank every kernel rounds its result once
    dq_sum, dq = kernel_run.new_dq(q, hops=hops) if single_pass else None, None
    kv = _KVRing(k, v, plan, transport)
    gradients = _GradientRing(k, v, wide if wide_kv else dtype, plan, transport)
    moving_gradients = None
    for hop in plan.hops:
        if hop.index > 0:
            moving_gradients = gradients.start_after(plan.hops[hop.index - 1])
        moving_kv = kv.start(hop)
        inputs, problem = (dout, q, *kv.visiting(hop), lse, delta), kernel_run.problem(plan, hop)
        shares: tuple[Tensor, ...] = ()
        if hop.meets and not single_pass:
            accumulate = dq is not None
            if dq is None:
                dq = q.new_empty(q.shape, dtype=dtype)
            kernels.backward_dq(*inputs, dq, problem, accumulate=accumulate)
        elif hop.meets:
            shares = gradients.scratch_grads(hop)
            kernels.backward_dkdv(*inputs, *shares, problem, accumulate=False, dq=dq_sum)
        if hop.index > 0:
            yield
            gradients.finish(hop, moving_gradients)
        if hop.meets and not single_pass:
            kernels.backward_dkdv(*inputs, *gradients.visiting(hop), problem, accumulate=not hop.starts)
        elif hop.meets and not hop.starts:
            for total, share in zip(gradients.visiting(hop), shares, strict=True):
                total += share
        elif hop.starts and hop.present and not hop.meets:
            for gradient in gradients.visiting(hop):
                gradient.zero_()
        yield
        kv.finish(hop, moving_kv)
    moving_gradients = gradients.start_after(plan.hops[-1])
    if dq_sum is not None:
        dq = dq_sum.finish()
    elif dq is not None:
        dq = dq.to(q.dtype)
    else:
        dq = q.new_zeros(q.shape)
    yield
    gradients.finish(None, moving_gradients)
    return dq, *gradients.own(wide if wide_kv else k.dtype)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates uninitialised storage for out and lse, the results of `forward`."""
    batch, seqlen, nheads, _ = q.shape
    lse = q.new_empty((batch, nheads, seqlen), dtype=lse_dtype(q.dtype))
    return q.new_empty((batch, seqlen, nheads, v.shape[3])), lse


def sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """Returns dsinks = sum over this rank's rows of exp(sink - lse) * -delta, (nheads,); empty without sinks.

    The shares of other ranks are not added. A sink is a key without a value, so the gradient of its score is its weight
    times -delta. Fully masked rows have no sink.
    """
    if sinks is None:
        return lse.new_empty(0)
    weights = torch.exp(sinks[:, None].double() - lse.double()).masked_fill(lse == -torch.inf, 0.0)
    return (weights * -delta).masked_fill(lse == -torch.inf, 0.0).sum((0, 2)).to(lse.dtype)
