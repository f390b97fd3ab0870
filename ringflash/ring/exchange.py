"""Who gives keys and values to whom where hops are grouped: each rank its own, directly to all that see any of them.

A rank keeps its own rows first and behind them those that it gets from other owners, by rank, in one memory. Gradients
take the same places on their way back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ringflash.layouts.cuts import joined
from ringflash.layouts.layout import Chunk, Layout
from ringflash.masks.pair_counts import PairCounts

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one rank's KV that another sees.

    Args:
        rank: the other end: who owns what is received, who reads what is sent.
        first: row of the owner's at which they begin.
        rows: how many.
        place: where they begin in the reader's memory.
    """

    rank: int
    first: int
    rows: int
    place: int


@dataclass(frozen=True)
class Exchange:
    """One rank's part of it.

    Args:
        received: of other ranks' KV, from the first to the last row that this rank may see, in rank order.
        sent: of this rank's KV, likewise.
        sees_own: whether this rank sees any of its own KV.
        held: chunks of the KV that this rank computes with, in the order of its memory.
        own_rows: rows of this rank's KV.
        rows: in this rank's memory.
        most_rows: in that of any rank.
    """

    received: tuple[Part, ...]
    sent: tuple[Part, ...]
    sees_own: bool
    held: tuple[Chunk, ...]
    own_rows: int
    rows: int
    most_rows: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.received, self.sent, self.held))  # tables are looked up by it at each call

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Of all KV that this rank computes with, in the order of their positions, neighbours joined."""
        ranges = joined([(chunk.start, chunk.stop) for chunk in self.held])
        return tuple(Chunk(start, stop - start) for start, stop in ranges)

    @property
    def rows_sent(self) -> int:
        """KV rows that leave, once for each rank that sees them."""
        return sum(part.rows for part in self.sent)

    @property
    def rows_received(self) -> int:
        """KV rows that arrive, and as many of gradients that leave in the backward."""
        return self.rows - self.own_rows


def received_by(layout: Layout, area: PairCounts, seen: Sequence[int], reader: int) -> tuple[Part, ...]:
    """What `reader` gets of other ranks' KV, in rank order.

    Args:
        layout: where all rows are.
        area: what the mask shows of the whole sequence.
        seen: pairs that the reader's queries see with each rank's keys.
        reader: the rank.
    """
    ranges = area.reach([(chunk.start, chunk.stop) for chunk in layout.chunks[reader]])
    owners = [owner for owner, pairs in enumerate(seen) if pairs and owner != reader]
    rows = [_rows_within(layout.chunks[owner], ranges) for owner in owners]
    places = accumulate((stop - first for first, stop in rows), initial=layout.length(reader))
    return tuple(
        Part(owner, first, stop - first, place)
        for owner, (first, stop), place in zip(owners, rows, places, strict=False)
    )


def exchange_of(layout: Layout, received: Sequence[tuple[Part, ...]], rank: int, sees_own: bool) -> Exchange:
    """What `rank` exchanges, where each rank has `received` its parts; and whether it sees any of its own KV."""
    lengths = layout.lengths
    rows = [own + sum(part.rows for part in parts) for own, parts in zip(lengths, received, strict=True)]
    sent = [replace(part, rank=reader) for reader, parts in enumerate(received) for part in parts if part.rank == rank]
    return Exchange(
        received=received[rank],
        sent=tuple(sent),
        sees_own=sees_own,
        held=_held(layout, rank, received[rank], sees_own),
        own_rows=lengths[rank],
        rows=rows[rank],
        most_rows=max(rows),
    )


def _rows_within(chunks: Sequence[Chunk], ranges: Sequence[Range]) -> Range:
    """From the first to the last row of some chunks that lies in any of the ranges, which rise: [first, stop)."""
    starts, stops = zip(*ranges, strict=True)
    edges: list[int] = []
    row = 0
    for chunk in chunks:
        nearest, behind = bisect_right(stops, chunk.start), bisect_left(starts, chunk.stop)
        if nearest < behind:
            edges.append(row + max(starts[nearest] - chunk.start, 0))
            edges.append(row + min(stops[behind - 1] - chunk.start, chunk.length))
        row += chunk.length
    return edges[0], edges[-1]


def _held(layout: Layout, rank: int, received: Sequence[Part], sees_own: bool) -> tuple[Chunk, ...]:
    """See `Exchange`."""
    held = list(layout.chunks[rank]) if sees_own else []
    for part in received:
        row = 0
        for chunk in layout.chunks[part.rank]:
            first, stop = max(part.first - row, 0), min(part.first + part.rows - row, chunk.length)
            if first < stop:
                held.append(Chunk(chunk.start + first, stop - first))
            row += chunk.length
    return tuple(held)
