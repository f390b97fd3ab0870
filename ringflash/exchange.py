"""Who gives keys and values to whom where hops are grouped: each rank its own, directly to all that see any of them.

A rank keeps its own rows first and behind them those that it gets from other owners, by rank, in one memory. Gradients
take the same places on their way back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ringflash.cuts import joined
from ringflash.layout import Chunk, Layout
from ringflash.masks.area import Area

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
        most_received: rows that any rank receives, at the most.
    """

    received: tuple[Part, ...]
    sent: tuple[Part, ...]
    sees_own: bool
    held: tuple[Chunk, ...]
    own_rows: int
    rows: int
    most_rows: int
    most_received: int

    @property
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


def exchanges_of(layout: Layout, area: Area, pairs: Sequence[Sequence[int]]) -> tuple[Exchange, ...]:
    """What each rank exchanges.

    Args:
        layout: where all rows are.
        area: what the mask shows of the whole sequence.
        pairs: what each rank's queries see of each rank's keys.
    """
    ranks, lengths = range(layout.world_size), layout.lengths
    received: list[tuple[Part, ...]] = []
    for reader in ranks:
        seen = area.reach([(chunk.start, chunk.stop) for chunk in layout.chunks[reader]])
        owners = [owner for owner in ranks if pairs[reader][owner] and owner != reader]
        rows = [_rows_within(layout.chunks[owner], seen) for owner in owners]
        places = accumulate((stop - first for first, stop in rows), initial=lengths[reader])
        received.append(
            tuple(
                Part(owner, first, stop - first, place)
                for owner, (first, stop), place in zip(owners, rows, places, strict=False)
            )
        )
    sent: list[list[Part]] = [[] for _ in ranks]
    for reader, parts in enumerate(received):
        for part in parts:
            sent[part.rank].append(Part(reader, part.first, part.rows, part.place))
    arriving = [sum(part.rows for part in parts) for parts in received]
    most_rows = max(own + more for own, more in zip(lengths, arriving, strict=True))
    return tuple(
        Exchange(
            received=received[rank],
            sent=tuple(sent[rank]),
            sees_own=pairs[rank][rank] > 0,
            held=_held(layout, rank, received[rank], pairs[rank][rank] > 0),
            own_rows=lengths[rank],
            rows=lengths[rank] + arriving[rank],
            most_rows=most_rows,
            most_received=max(arriving),
        )
        for rank in ranks
    )


def _rows_within(chunks: Sequence[Chunk], ranges: Sequence[Range]) -> Range:
    """From the first to the last row of some chunks that lies in any of the ranges, which rise: [first, stop)."""
    starts = [start for start, _ in ranges]
    first, stop, row = -1, 0, 0
    for chunk in chunks:
        after = bisect_right(starts, chunk.start)
        before = bisect_right(starts, chunk.stop - 1)  # ranges from here on begin behind the chunk
        nearest = max(after - 1, 0)
        inside = [r for r in ranges[nearest:before] if r[1] > chunk.start]
        if inside:
            begin = max(inside[0][0], chunk.start) - chunk.start
            first = row + begin if first < 0 else first
            stop = row + min(inside[-1][1], chunk.stop) - chunk.start
        row += chunk.length
    return max(first, 0), stop


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
