"""The plan of one rank as data: steps, each with at most one tile computation and the transfers that start there.

The KV of every rank moves one rank up at each hop: at hop h, rank r holds the KV of rank (r - h) mod P, the owner. KV
stops at the last rank that sees any of it; the hops up to there are its reach. In the backward the gradient follows
its KV one hop behind, and returns to the owner from the last stop.

Two planners emit plans: `ring_plan` for rings and double rings, `gathered_plan` for grouped hops. `schedule` runs any
plan. Plans hold no tensors, and are pure functions of layout, mask and rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from torch import Tensor

from ringflash.layouts.layout import Chunk, Layout
from ringflash.masks import Mask
from ringflash.masks.pair_counts import area_of
from ringflash.ring.plan_report import PlanReport
from ringflash.transport.base import FAR


class Kind(IntEnum):
    """Contents of a transfer; the number is the channel of its messages."""

    KV = 0
    GRADIENT = 1  # dK and dV: a sum that is not finished follows its KV, and a share of a grouped hop goes to the owner
    RETURN = 2  # dK and dV, on the way from the last stop of their KV to the owner
    FAR_KV = FAR
    FAR_RETURN = FAR + 1


class Transfer(NamedTuple):
    """One end of a message.

    Args:
        kind: what is carried. Slots of KV and slots of gradients are numbered apart.
        peer: the rank at the other end.
        sends: True at the sender, False at the receiver.
        slot: the buffer that is sent or filled.
        rows: rows of the buffer.
        mirror: for a receiver, (slot, first row) of its own counterpart of what `peer` sends.
        own_row: for gradients that return to their owner, the first row of the owner's KV that they belong to; None for
            other transfers.
        is_last_use: whether the executor frees the slot after this transfer; only of gradients.
    """

    kind: Kind
    peer: int
    sends: bool
    slot: int
    rows: range
    mirror: tuple[int, int] | None = None
    own_row: int | None = None
    is_last_use: bool = False

    @property
    def is_far(self) -> bool:
        """Returns whether the message takes a slow link."""
        return self.kind >= FAR


class Batch(NamedTuple):
    """Transfers that start together over the same link. A batch without transfers still notices a broken ring.

    Args:
        transfers: the messages of this rank.
        hop: the hop of the messages, for errors.
        due_step: index of the step that waits for them. Over a slow link it may be many steps later.
    """

    transfers: tuple[Transfer, ...]
    hop: int
    due_step: int


@dataclass(frozen=True)
class Hop:
    """The KV that a rank holds at one step, and the tile computation with it.

    Args:
        index: hop number, 0 for the rank's own KV.
        owners: ranks that own the KV: one in a ring; in a grouped plan those whose keys this rank sees, in rank order.
        chunks: chunks of the KV.
        rows: rows of the KV in its slot; empty if this rank does not receive it.
        pairs: visible (query, key) pairs of this rank's queries and the KV, summed over the mask's batch.
        kv_slot: the buffer of the KV; None stands for the caller's own tensors.
        gradient_slot: the buffer of dK and dV; None stands for memory that this rank keeps.
        starts: whether dK and dV start here, because this is the KV's first stop of all or in this group of ranks.
        revolution: number of the full pass around the inner ring (the inner pass) in a double ring; 0 in a ring.
        held: in a grouped plan, the chunks in the order of the buffer's rows.
    """

    index: int
    owners: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    rows: range
    pairs: int
    kv_slot: int | None = None
    gradient_slot: int | None = None
    starts: bool = True
    revolution: int = 0
    held: tuple[Chunk, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.index, self.owners, self.rows, self.held))  # cached: calls look tables up with it

    @property
    def meets(self) -> bool:
        """Returns whether any query of this rank sees any of the KV; False means that there is nothing to compute."""
        return self.pairs > 0

    @property
    def passes_on(self) -> bool:
        """Returns whether this rank holds the KV only to pass it on to later ranks."""
        return bool(self.rows) and not self.meets and self.index > 0


class Step(NamedTuple):
    """One step of a rank: a tile computation with KV that is here, and transfers that travel meanwhile.

    Args:
        hop: the KV to compute with; None for a step of transfers only.
        kv: transfers of KV that start before the computation, in the forward and in the backward. They are due before
            a later step.
        gradients: transfers of dK and dV that start in the backward, before those of KV. The step at which they are due
            waits for them after its dQ kernel, and before it adds to dK and dV.
    """

    hop: Hop | None
    kv: tuple[Batch, ...] = ()
    gradients: tuple[Batch, ...] = ()


@dataclass(frozen=True)
class Plan(PlanReport):
    """The steps of one rank under a layout and a mask.

    Args:
        layout: the cut of the sequence.
        mask: which keys a query sees.
        rank: the rank that follows this plan.
        q_chunks: chunks of this rank's queries.
        pairs: for each rank, visible pairs of its queries with each rank's keys.
        steps: the steps in order; every rank has the same number. The last one has only transfers of gradients, so the
            forward leaves it out.
        kv_slots: buffers of KV, which all ranks allocate alike.
        gradient_slots: likewise of gradients. Slots with higher numbers are a rank's own: such a buffer exists from its
            first use to the end of the transfer that sends it, or that fills it with gradients of this rank's own KV.
        slot_rows: rows of a buffer.
        own_slot: the slot to which the rank's own KV is copied before the first step, or None.
        grouped: whether all hops are grouped into one.
    """

    layout: Layout
    mask: Mask
    rank: int
    q_chunks: tuple[Chunk, ...]
    pairs: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    kv_slots: int = 0
    gradient_slots: int = 0
    slot_rows: int = 0
    own_slot: int | None = None
    grouped: bool = False

    @property
    def world_size(self) -> int:
        """Returns the number of ranks in the ring."""
        return self.layout.world_size

    @cached_property
    def identity(self) -> object:
        """A value that no other plan has, quick to compare; it keeps no plan alive."""
        return object()

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Returns the hops in order; every rank has the same number."""
        return tuple(step.hop for step in self.steps if step.hop is not None)


@lru_cache(maxsize=64)
def pair_table(layout: Layout, mask: Mask) -> Tensor:
    """Returns for each rank the visible pairs of its queries with each rank's keys: int64 (ranks, ranks)."""
    cut = [[(chunk.start, chunk.stop) for chunk in chunks] for chunks in layout.chunks]
    return area_of(mask, layout.seqlen).between(cut)


@lru_cache(maxsize=1024)
def visible_pairs(layout: Layout, mask: Mask) -> tuple[tuple[int, ...], ...]:
    """Returns the rows of `pair_table` as Python integers."""
    return tuple(map(tuple, pair_table(layout, mask).tolist()))
