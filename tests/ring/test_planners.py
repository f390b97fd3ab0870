"""Planners as pure data: plans of all ranks are walked step by step, with sets of rows in place of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

import ringflash as rf
from ringflash.layouts.layout import LAYOUTS, Chunk, positions
from ringflash.masks import Full, Mask
from ringflash.ring.plan import Batch, Kind, Plan, Transfer
from tests.helpers.strategies import block_sparse

SEQLEN = 37
MASKS = [
    Full(),
    rf.Causal(),
    rf.Causal() & rf.SlidingWindow(5),
    rf.SlidingWindow(2, 9),
    rf.Causal() & rf.Documents([0, 3, 20, 29, 37]),
    rf.KeyPadding([0, 0]),
    block_sparse(SEQLEN, 7, seed=1, density=0.3),
    block_sparse(SEQLEN, 4, seed=5, density=0.1),
]


class Row(NamedTuple):
    """A row of KV, or its gradient as a sum over the ranks `shares`."""

    owner: int
    row: int
    shares: frozenset[int] = frozenset()


class Message(NamedTuple):
    """One end of a message; both ends are equal."""

    step: int
    hop: int
    due_step: int
    rows: int
    place: tuple[int, ...]


Slots = dict[int, dict[int, Row]]  # rows by slot and by their number in the slot


def schedules(world: int, layout: str, mask: Mask) -> Iterator[tuple[list[Plan], int]]:
    """Yields the plans of all ranks and the number of groups: of a ring, of grouped hops and of all double rings."""
    inner_rings = [inner for inner in range(1, world + 1) if world % inner == 0]
    for hops, inner in (("ring", None), ("grouped", None), *(("ring", inner) for inner in inner_rings)):
        context = rf.ContextParallel.local(world, layout, inner_ring=inner, hops=hops)
        yield [context.plan(mask, SEQLEN, rank) for rank in range(world)], 1 if inner is None else world // inner


everywhere = pytest.mark.parametrize(
    ("world", "layout"), [(world, layout) for world in range(1, 10) for layout in LAYOUTS]
)


@everywhere
def test_every_rank_meets_the_keys_that_it_sees_once(world: int, layout: str) -> None:
    for mask in MASKS:
        for plans, _ in schedules(world, layout, mask):
            assert len({len(plan.steps) for plan in plans}) == 1
            for plan in plans:
                seen = [owner for owner, pairs in enumerate(plan.pairs[plan.rank]) if pairs]
                assert sorted(owner for hop in plan.hops if hop.meets for owner in hop.owners) == seen
                assert sum(hop.pairs for hop in plan.hops) == sum(plan.pairs[plan.rank])
                assert [hop.index for hop in plan.hops] == [*range(len(plan.hops))]
                assert plan.steps[-1].hop is None
                assert plan.steps[-1].kv == plan.steps[0].gradients == ()


@everywhere
def test_sends_and_receives_match_in_order(world: int, layout: str) -> None:
    for mask in MASKS:
        for plans, groups in schedules(world, layout, mask):
            ends: dict[tuple[int, int, Kind], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
            for plan in plans:
                for index, batch, transfer in transfers(plan):
                    route = (plan.rank, transfer.peer) if transfer.sends else (transfer.peer, plan.rank)
                    # In a single ring peers must know where a message lies in the sender's memory.
                    place = (transfer.slot, transfer.rows.start) if transfer.sends else (transfer.mirror or ())
                    message = Message(index, batch.hop, batch.due_step, len(transfer.rows), place * (groups == 1))
                    ends[*route, transfer.kind][0 if transfer.sends else 1].append(message)
            assert all(sent == received for sent, received in ends.values())
            for (source, target, _), (sent, _) in ends.items():
                assert source != target
                under_way = 0
                for message in sent:  # one message of a kind at a time
                    assert under_way <= message.step <= message.due_step
                    under_way = message.due_step


@everywhere
def test_batches_take_one_link_and_end_within_the_plan(world: int, layout: str) -> None:
    for mask in MASKS:
        for plans, groups in schedules(world, layout, mask):
            for plan in plans:
                last = len(plan.steps) - 1
                for index, batch, transfer in transfers(plan):
                    assert transfer.is_far == (transfer.peer // (world // groups) != plan.rank // (world // groups))
                    assert len({each.is_far for each in batch.transfers}) == 1
                    is_kv = transfer.kind in (Kind.KV, Kind.FAR_KV)
                    assert index + is_kv <= batch.due_step <= last - is_kv
                    if not transfer.is_far:
                        assert batch.due_step == index + is_kv
                    else:  # KV is due when the next inner pass begins, and gradients are due when it ends
                        passes = [hop.index for hop in plan.hops[batch.hop + 1 :] if hop.starts]
                        begin, end, *_ = *passes, last, last + 1
                        assert batch.due_step == (begin if is_kv else end - 1)
                    assert len(transfer.rows) > 0
                    if transfer.kind in (Kind.RETURN, Kind.FAR_RETURN) and transfer.sends:
                        assert plan.hops[batch.hop].meets  # KV goes no further than it is seen


@everywhere
def test_keys_are_where_a_hop_reads_them_and_gradients_return_to_their_owners(world: int, layout: str) -> None:
    for mask in MASKS:
        dense = mask.dense(torch.arange(SEQLEN), torch.arange(SEQLEN)).expand(mask.batch, SEQLEN, SEQLEN).any(0)
        for plans, _ in schedules(world, layout, mask):
            positions = [positions_of(plan, plan.rank) for plan in plans]
            for plan, gradients in zip(plans, Walk(plans).gradients(), strict=True):
                assert len(gradients) == len(positions[plan.rank])
                for row, position in enumerate(positions[plan.rank]):
                    seeing = {rank for rank in range(world) if dense[positions[rank], position].any()}
                    meeting = {rank for rank in range(world) if plan.pairs[rank][plan.rank]}
                    assert seeing <= gradients[row].shares <= meeting
                    if not plan.grouped:
                        assert gradients[row].shares == meeting


def positions_of(plan: Plan, rank: int) -> list[int]:
    """Returns the global positions of the rows of `rank`."""
    return [position for chunk in plan.layout.chunks[rank] for position in range(chunk.start, chunk.stop)]


def transfers(plan: Plan) -> Iterator[tuple[int, Batch, Transfer]]:
    """Yields the transfers of a backward with their batches and the steps at which they start."""
    for index, step in enumerate(plan.steps):
        for batch in (*step.gradients, *step.kv):
            for transfer in batch.transfers:
                yield index, batch, transfer


def meets(mask: Mask, chunks_q: Sequence[Chunk], chunks_k: Sequence[Chunk]) -> bool:
    """Returns whether any row of `chunks_q` sees any key of `chunks_k`."""
    return bool(mask.dense(positions(chunks_q), positions(chunks_k)).any())


def transfer_at(plan: Plan, hop: int, kind: Kind, *, sends: bool) -> Transfer | None:
    """Returns what this rank sends or receives of a kind: of KV during a hop, of gradients after it."""
    is_kv = kind in (Kind.KV, Kind.FAR_KV)
    batches = plan.steps[hop].kv if is_kv else plan.steps[hop + 1].gradients
    found = [each for batch in batches for each in batch.transfers if (each.kind, each.sends) == (kind, sends)]
    assert len(found) <= 1
    return found[0] if found else None


class Walk:
    """A backward of all ranks in lockstep. Messages arrive as late as they are due, and slots in use are not written.

    The forward is the same without gradients.
    """

    def __init__(self, plans: list[Plan]) -> None:
        self._plans = plans
        self._kv: list[Slots] = [{} for _ in plans]
        self._sums: list[Slots] = [{} for _ in plans]
        self._own: list[dict[int, Row]] = [{} for _ in plans]
        self._sent: dict[tuple[int, int, Kind], list[list[Row]]] = defaultdict(list)
        self._freed: set[tuple[int, int]] = set()
        self._moving: list[list[tuple[Batch, Transfer]]] = [[] for _ in plans]

    def gradients(self) -> list[dict[int, Row]]:
        """Returns for each rank the sum of gradients of each of its rows."""
        for plan in self._plans:
            if plan.own_slot is not None:
                own = range(plan.layout.length(plan.rank))
                self._kv[plan.rank][plan.own_slot] = {row: Row(plan.rank, row) for row in own}
        for index in range(len(self._plans[0].steps)):
            for plan in self._plans:
                self._finish(plan, index, of_kv=True)
            for of_kv in (False, True):
                for sends in (True, False):  # a message is what its sender has at this step
                    for plan in self._plans:
                        self._start(plan, index, of_kv=of_kv, sends=sends)
            for plan in self._plans:
                hop = plan.steps[index].hop
                if hop is not None and hop.meets and hop.kv_slot is not None:
                    self._check_keys(plan, index)
            for plan in self._plans:
                self._finish(plan, index, of_kv=False)
                self._add_gradients(plan, index)
        assert not any(self._moving)
        assert not any(self._sent.values())
        return self._own

    def _slots(self, plan: Plan, kind: Kind) -> Slots:
        return (self._kv if kind in (Kind.KV, Kind.FAR_KV) else self._sums)[plan.rank]

    def _under_way(self, plan: Plan, slot: int, rows: range, *, of_kv: bool, sends: bool) -> bool:
        """Returns whether a message that is under way is sent from rows of a slot, or received into them."""
        return any(
            (transfer.kind in (Kind.KV, Kind.FAR_KV)) == of_kv
            and (transfer.slot, transfer.sends) == (slot, sends)
            and not set(transfer.rows).isdisjoint(rows)
            for _, transfer in self._moving[plan.rank]
        )

    def _check_free(self, plan: Plan, slot: int, rows: range, *, of_kv: bool) -> None:
        assert (plan.rank, slot) not in self._freed or of_kv
        assert not any(self._under_way(plan, slot, rows, of_kv=of_kv, sends=sends) for sends in (True, False))

    def _start(self, plan: Plan, index: int, *, of_kv: bool, sends: bool) -> None:
        step = plan.steps[index]
        for batch in step.kv if of_kv else step.gradients:
            for transfer in batch.transfers:
                if transfer.sends != sends:
                    continue
                if sends:
                    assert not self._under_way(plan, transfer.slot, transfer.rows, of_kv=of_kv, sends=False)
                    content = self._slots(plan, transfer.kind)[transfer.slot]
                    self._sent[plan.rank, transfer.peer, transfer.kind].append([content[row] for row in transfer.rows])
                else:
                    self._check_free(plan, transfer.slot, transfer.rows, of_kv=of_kv)
                    slot = self._slots(plan, transfer.kind).setdefault(transfer.slot, {})
                    for row in transfer.rows:
                        slot.pop(row, None)
                self._moving[plan.rank].append((batch, transfer))

    def _finish(self, plan: Plan, index: int, *, of_kv: bool) -> None:
        due = [
            (batch, transfer)
            for batch, transfer in self._moving[plan.rank]
            if batch.due_step == index and (transfer.kind in (Kind.KV, Kind.FAR_KV)) == of_kv
        ]
        for each in due:
            self._moving[plan.rank].remove(each)
            _, transfer = each
            if transfer.is_last_use:
                assert not of_kv
                self._freed.add((plan.rank, transfer.slot))
            if transfer.sends:
                continue
            arrived = self._sent[transfer.peer, plan.rank, transfer.kind].pop(0)
            slot = self._slots(plan, transfer.kind)[transfer.slot]
            slot.update(zip(transfer.rows, arrived, strict=True))
            if transfer.own_row is not None:
                self._add_returned(plan, dict(enumerate(arrived, transfer.own_row)))

    def _add_returned(self, plan: Plan, rows: dict[int, Row]) -> None:
        home = self._own[plan.rank]
        for row, arrived in rows.items():
            before = home.get(row, Row(plan.rank, row))
            assert (arrived.owner, arrived.row) == (plan.rank, row)
            assert before.shares.isdisjoint(arrived.shares)
            home[row] = before._replace(shares=before.shares | arrived.shares)

    def _check_keys(self, plan: Plan, index: int) -> None:
        """Checks that a hop finds the rows of its owners, and that none of them is still arriving."""
        hop = plan.steps[index].hop
        assert hop is not None
        assert hop.kv_slot is not None
        assert not self._under_way(plan, hop.kv_slot, hop.rows, of_kv=True, sends=False)
        found = [self._kv[plan.rank][hop.kv_slot][row] for row in hop.rows]
        positions = [positions_of(plan, row.owner)[row.row] for row in found]
        chunks = hop.held or hop.chunks
        assert positions == [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        assert {row.owner for row in found} == set(hop.owners)

    def _add_gradients(self, plan: Plan, index: int) -> None:
        """Adds this rank's share to the gradients of a hop."""
        hop = plan.steps[index].hop
        if hop is None or not (hop.rows or plan.grouped):
            return
        share = frozenset({plan.rank} if hop.meets else ())
        if plan.grouped:
            assert hop.gradient_slot == hop.kv_slot == 0
            rows = {row: self._kv[plan.rank][0][row] for row in hop.rows}
        else:
            rows = {row: Row(hop.owners[0], row) for row in hop.rows}
        if hop.gradient_slot is None:
            self._add_returned(plan, {n: row._replace(shares=share) for n, row in rows.items()})
            return
        slot = self._sums[plan.rank].setdefault(hop.gradient_slot, {})
        if hop.starts or hop.meets:
            self._check_free(plan, hop.gradient_slot, hop.rows, of_kv=False)
        for number, row in rows.items():
            before = frozenset[int]() if hop.starts else slot[number].shares
            assert plan.rank not in before
            slot[number] = row._replace(shares=before | share)
        if plan.grouped:  # other ranks' shares are added to the own rows
            own = range(plan.layout.length(plan.rank))
            self._add_returned(plan, {row: slot.get(row, Row(plan.rank, row)) for row in own})
