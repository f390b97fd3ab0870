"""Direct messages of a grouped hop: each rank sends its own keys and values to every rank that sees any of them.

A rank stores its own rows first and, behind them, the rows received from other owners in rank order, in one buffer.
Gradients use the same places of that order on their way back.
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
    """Consecutive rows of one rank's KV that another rank sees.

    Args:
        rank: the peer: the owner of received rows, or the reader of sent rows.
        first: index of the first row in the owner's shard.
        rows: number of rows.
        place: index of the first row in the reader's buffer.
    """

    rank: int
    first: int
    rows: int
    place: int


@dataclass(frozen=True)
class Exchange:
    """Messages of one rank in a grouped hop, and the layout of its buffer.

    Args:
        received: parts of other ranks' KV, each from the first to the last row that this rank may see, in rank order.
        sent: parts of this rank's KV that other ranks may see, in the order of these ranks.
        sees_own: whether this rank sees any of its own KV.
        held: chunks of the KV that this rank computes with, in the order of its buffer.
        own_rows: rows of this rank's KV.
        rows: rows in this rank's buffer.
        most_rows: rows in the largest buffer of any rank.
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
        return hash((self.received, self.sent, self.held))  # cached: every call looks tables up with it

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Returns the chunks of all KV that this rank computes with, by position, with adjoining chunks joined."""
        ranges = joined([(chunk.start, chunk.stop) for chunk in self.held])
        return tuple(Chunk(start, stop - start) for start, stop in ranges)

    @property
    def rows_sent(self) -> int:
        """Returns the KV rows that this rank sends; a row counts once for each rank that receives it."""
        return sum(part.rows for part in self.sent)

    @property
    def rows_received(self) -> int:
        """Returns the KV rows that this rank receives; it sends the same number of gradient rows in the backward."""
        return self.rows - self.own_rows


def received_by(layout: Layout, area: PairCounts, seen: Sequence[int], reader: int) -> tuple[Part, ...]:
    """Returns the parts of other ranks' KV that `reader` receives, in rank order.

    Args:
        layout: the cut of the sequence over ranks.
        area: visible pairs of the mask over the whole sequence.
        seen: visible pairs of the reader's queries with each rank's keys.
        reader: the rank that receives.
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
    """Returns the exchange of `rank`, given the parts that each rank has `received`.

    `sees_own` says whether `rank` sees any of its own KV.
    """
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
    """Returns the rows [first, stop) of `chunks` from the first to the last one that lies in a range; ranges rise."""
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
    """Returns the chunks of the KV that `rank` computes with, in the order of its buffer."""
    held = list(layout.chunks[rank]) if sees_own else []
    for part in received:
        row = 0
        for chunk in layout.chunks[part.rank]:
            first, stop = max(part.first - row, 0), min(part.first + part.rows - row, chunk.length)
            if first < stop:
                held.append(Chunk(chunk.start + first, stop - first))
            row += chunk.length
    return tuple(held)
