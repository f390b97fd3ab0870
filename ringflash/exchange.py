"""Who gives keys and values to whom where hops are grouped: each rank its own, directly to all that see any of them.

A rank keeps its own rows first and behind them those of other owners, by rank, in one memory. Gradients take the same
places on their way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ringflash.cuts import joined
from ringflash.layout import Chunk, Layout


@dataclass(frozen=True)
class Exchange:
    """One rank's part of it.

    Args:
        owners: other ranks whose KV this one sees, and receives, in rank order.
        starts: where the rows of each begin in this rank's memory.
        readers: other ranks that see this one's KV, and receive it, in rank order.
        places: where this rank's rows begin in the memory of each.
        sees_own: whether this rank sees any of its own KV.
        chunks: of all KV that this rank sees, in the order of their positions, neighbours joined.
        rows: in this rank's memory.
        most_rows: in that of any rank.
    """

    owners: tuple[int, ...]
    starts: tuple[int, ...]
    readers: tuple[int, ...]
    places: tuple[int, ...]
    sees_own: bool
    chunks: tuple[Chunk, ...]
    rows: int
    most_rows: int

    @property
    def rows_sent(self) -> int:
        """KV rows that leave, of the first in memory: as many as are this rank's own."""
        return len(self.readers) * self.own_rows

    @property
    def own_rows(self) -> int:
        """Rows of this rank's KV."""
        return self.starts[0] if self.starts else self.rows

    @property
    def rows_received(self) -> int:
        """KV rows that arrive, and as many of gradients that leave in the backward."""
        return self.rows - self.own_rows


def exchange_of(layout: Layout, pairs: Sequence[Sequence[int]], rank: int) -> Exchange:
    """What `rank` exchanges, where `pairs` counts what each rank's queries see of each rank's keys."""
    ranks = range(layout.world_size)
    lengths = layout.lengths
    owners = [[owner for owner in ranks if pairs[reader][owner] and owner != reader] for reader in ranks]
    starts = [list(accumulate((lengths[owner] for owner in owners[r]), initial=lengths[r])) for r in ranks]
    readers = [reader for reader in ranks if rank in owners[reader]]
    sees_own = pairs[rank][rank] > 0
    seen = [*([rank] if sees_own else []), *owners[rank]]
    chunks = joined([(chunk.start, chunk.stop) for owner in seen for chunk in layout.chunks[owner]])
    return Exchange(
        owners=tuple(owners[rank]),
        starts=tuple(starts[rank][:-1]),
        readers=tuple(readers),
        places=tuple(starts[reader][owners[reader].index(rank)] for reader in readers),
        sees_own=sees_own,
        chunks=tuple(Chunk(start, stop - start) for start, stop in chunks),
        rows=starts[rank][-1],
        most_rows=max(of[-1] for of in starts),
    )
