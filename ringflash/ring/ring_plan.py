"""The planner of rings and double rings: KV goes from rank to rank, and a gradient follows one hop behind its KV.

In a double ring a group is `inner` consecutive ranks. KV first makes a full pass around the inner ring of its own
group, one rank a hop, while the next KV crosses slow links: during an inner pass the rank where the pass began also
sends the KV to the rank at the same place in the next group. There the next inner pass begins. A message over a slow
link therefore has a whole inner pass to arrive. A ring is a double ring of one group.

In the backward every inner pass starts a new gradient. The gradient returns from the last stop of its inner pass to the
owner; the message crosses slow links in the course of the next inner pass.

KV stops at the last rank that sees any of it: an inner pass ends after that rank.
Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Gu et al. 2024, "LoongTrain",
"Double-Ring-Attention".
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, count

import torch

from ringflash.layouts.layout import Layout
from ringflash.masks import Mask
from ringflash.ring.plan import Batch, Hop, Kind, Plan, Step, Transfer, pair_table, visible_pairs


@lru_cache(maxsize=1024)
def make_plan(layout: Layout, mask: Mask, rank: int, inner: int | None = None) -> Plan:
    """Returns the plan of `rank` in a ring of all ranks, or in a double ring with groups of `inner` ranks."""
    world = layout.world_size
    planner = _Planner(layout, mask, rank, inner or world)
    steps: list[Step] = []
    gradients: tuple[Batch, ...] = ()
    for index in range(len(planner.turns)):
        hop = planner.hop(index)
        near_rows = planner.near_rows(hop)
        steps.append(Step(hop, planner.kv(hop, near_rows), gradients))
        gradients = planner.gradients(hop, near_rows)
    steps.append(Step(None, (), gradients))
    sends_own = any(transfer.sends for batch in steps[0].kv for transfer in batch.transfers)
    return Plan(
        layout,
        mask,
        rank,
        layout.chunks[rank],
        visible_pairs(layout, mask),
        tuple(steps),
        kv_slots=0 if world == 1 else 2 if planner.groups == 1 else 4,
        gradient_slots=0 if world == 1 else 2,
        slot_rows=max(layout.lengths),
        own_slot=planner.kv_slot(0) if sends_own else None,
    )


@lru_cache(maxsize=64)
def _last_turns(layout: Layout, mask: Mask, inner: int) -> tuple[tuple[int, ...], ...]:
    """Returns for each inner pass and owner the last turn at which a rank of the group sees the owner's KV.

    If no rank of a group sees any, it is 0 for the owner's group and -1 for others, which may still relay the KV.
    """
    meets = pair_table(layout, mask) > 0
    owner, turn = (torch.arange(n, device="cpu") for n in (len(meets), inner))
    passes = torch.arange(len(meets) // inner, device="cpu")[:, None, None]
    stops = (owner // inner + passes) % len(passes) * inner + (owner + turn[:, None]) % inner
    last = (meets[stops, owner] * (turn[:, None] + 1)).amax(1) - 1
    last[0].clamp_(min=0)
    return tuple(map(tuple, last.tolist()))


class _Planner:
    """Emits the hops of one rank in order, and after each hop its transfers.

    At turn t of inner pass p a rank holds KV of the group that is p groups before its own; within that group the owner
    has the place that is t places before the rank's own.
    """

    def __init__(self, layout: Layout, mask: Mask, rank: int, inner: int) -> None:
        self._layout, self._rank, self._inner = layout, rank, inner
        self._pairs, self._last = visible_pairs(layout, mask)[rank], _last_turns(layout, mask, inner)
        self.groups = layout.world_size // inner
        # The last inner pass of each owner's KV.
        self._reach = [max(p for p, last in enumerate(of) if last >= 0) for of in zip(*self._last, strict=True)]
        passes = [max(0, *last) + 1 for last in self._last[: max(self._reach) + 1]]
        self.turns = [(number, turn) for number, turns in enumerate(passes) for turn in range(turns)]
        self._ends = [*accumulate(passes)]  # for each inner pass, the index of the step after it
        self._next_and_previous = self._at(0, 1), self._at(0, -1)
        self._rotation = [0, 1]  # gradients of hop h are in the slot at h % 2
        self._unused = count(2)  # numbers of further slots of gradients

    def _at(self, passes: int, turn: int) -> int:
        """Returns the rank `passes` groups after this one, and `turn` places further within its group."""
        inner = self._inner
        return (self._rank // inner + passes) % self.groups * inner + (self._rank + turn) % inner

    def kv_slot(self, index: int) -> int:
        """Returns the buffer of the KV at hop `index`; two alternate.

        A double ring uses two more buffers, because the KV that opens an inner pass is still being sent to the next
        group while it is used.
        """
        number, turn = self.turns[index]
        return 2 + number % 2 if self.groups > 1 and turn == 0 else index % 2

    def hop(self, index: int) -> Hop:
        """Returns hop `index`."""
        number, turn = self.turns[index]
        owner = self._at(-number, -turn)
        last = self._last[number][owner]
        present = number <= self._reach[owner] and turn <= max(last, 0)
        stays = index == 0 and last == 0  # the gradient of this rank's KV never leaves: no later hop may overwrite it
        return Hop(
            index,
            (owner,),
            self._layout.chunks[owner],
            range(self._layout.length(owner) if present else 0),
            self._pairs[owner],
            kv_slot=self.kv_slot(index) if index else None,  # the own KV is used as the caller gave it
            gradient_slot=None if stays else self._rotation[index % 2],
            starts=turn == 0,
            revolution=number,
        )

    def near_rows(self, hop: Hop) -> tuple[int, int]:
        """Returns the rows of KV that go to the next rank of the group, and that come from the previous rank."""
        number, turn = self.turns[hop.index]
        last, following = self._last[number], self._at(-number, -turn - 1)
        sent = len(hop.rows) if turn < last[hop.owners[0]] else 0
        return sent, self._layout.length(following) if turn < last[following] else 0

    def _near(self, kind: Kind, slot: int, target: int, near_rows: tuple[int, int]) -> tuple[Transfer, ...]:
        """Returns the transfers within the group: to the next rank from `slot`, from the previous rank to `target`."""
        sent, received = near_rows
        return _neighbours(kind, *self._next_and_previous, slot, sent, target, received)

    def kv(self, hop: Hop, near_rows: tuple[int, int]) -> tuple[Batch, ...]:
        """Returns the transfers of KV that start at `hop`: one rank on, and in a double ring also one group on."""
        (number, turn), slot, index = self.turns[hop.index], self.kv_slot(hop.index), hop.index
        target = self.kv_slot(index + 1) if index + 1 < len(self.turns) else 0
        near = Batch(self._near(Kind.KV, slot, target, near_rows), index, index + 1)
        if turn > 0:
            return (near,)
        far: list[Transfer] = []
        if number < self._reach[hop.owners[0]]:
            far.append(Transfer(Kind.FAR_KV, self._at(1, 0), True, slot, hop.rows))
        opener = self._at(-number - 1, 0)
        if number < self._reach[opener]:
            rows, target = range(self._layout.length(opener)), self.kv_slot(self._ends[number])
            far.append(Transfer(Kind.FAR_KV, self._at(-1, 0), False, target, rows))
        # A message over a slow link is due when the next inner pass begins.
        return (near, Batch(tuple(far), index, self._ends[number])) if far else (near,)

    def gradients(self, hop: Hop, near_rows: tuple[int, int]) -> tuple[Batch, ...]:
        """Returns the transfers of gradients that start after `hop`: they follow the KV, or return to its owner."""
        (number, turn), index = self.turns[hop.index], hop.index
        slot, target = self._rotation[index % 2], self._rotation[(index + 1) % 2]
        near = self._near(Kind.GRADIENT, slot, target, near_rows)
        far = number > 0  # the owner is in another group
        kind, returning = Kind.FAR_RETURN if far else Kind.RETURN, list[Transfer]()
        if turn == self._last[number][hop.owners[0]] and hop.owners[0] != self._rank:
            returning.append(Transfer(kind, hop.owners[0], True, slot, hop.rows, is_last_use=far))
            if far:  # the rotation would reuse the buffer before this slow message is done
                self._rotation[index % 2] = next(self._unused)
        is_last = turn == self._last[number][self._rank]
        if is_last and (last_stop := self._at(number, turn)) != self._rank:
            rows, target = range(self._layout.length(self._rank)), next(self._unused)
            returning.append(Transfer(kind, last_stop, False, target, rows, (slot, 0), own_row=0, is_last_use=True))
        if not far or not returning:
            return (Batch((*near, *returning), index, index + 1),)
        # A message over a slow link is due at the last hop of the next inner pass, or after the last hop of all.
        due = self._ends[number + 1] - 1 if number + 1 < len(self._ends) else self._ends[number]
        return Batch(tuple(returning), index, due), Batch(near, index, index + 1)


@lru_cache(maxsize=4096)
def _neighbours(
    kind: Kind, following: int, previous: int, slot: int, sent: int, target: int, received: int
) -> tuple[Transfer, ...]:
    """Returns the transfers of `sent` rows to the rank `following`, and of `received` rows from the rank `previous`.

    They are cached because most hops have equal ones. 0 rows are no transfer.
    """
    transfers: list[Transfer] = []
    if sent:
        transfers.append(Transfer(kind, following, True, slot, range(sent)))
    if received:  # what the previous rank sends lies in the buffer that every rank uses at this hop
        transfers.append(Transfer(kind, previous, False, target, range(received), mirror=(slot, 0)))
    return tuple(transfers)
