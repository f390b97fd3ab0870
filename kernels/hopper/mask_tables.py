"""Mask tables of the Hopper kernels: for each row of storage, an interval of rows of storage that it sees.

Under every interval mask a query sees consecutive keys, and a key is seen by consecutive queries, because neither bound
ever falls. If chunks lie in storage in the order of their positions, the rows of storage are consecutive too, under any
layout. So the kernels know neither chunks nor positions, and their tiles may cross the border of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.kernels.mask_tables import TileBounds, batch_stride, row_intervals
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask

_uploading = Lock()


@dataclass(frozen=True, eq=False)
class Intervals:
    """Tables of one launch. Its programs own tiles of one side's rows and process tiles of the other side.

    Args:
        below: whether some row does not see the beginning of a tile that its owned tile processes.
        above: whether some row does not see the end of such a tile.
        visits: tiles of the other side that an owned tile processes, on average.
        skew: the largest number of processed tiles over the average, in the sequence with the most: 1 without a mask,
            about 2 under the causal mask.
        covers: whether every row of the owned side sees some row of the other side.
        ordered: whether there is the table `turns`.
        host: the tables on the host, in the order of the properties below; emptied when they are uploaded.
        device: where kernels read them. They are uploaded at the first use, as a tiling may be discarded unused.
    """

    below: bool
    above: bool
    visits: float
    skew: float
    covers: bool
    ordered: bool
    host: list[np.ndarray]
    device: torch.device
    on_device: list[Tensor] = field(default_factory=list)

    @property
    def _tables(self) -> list[Tensor]:
        if not self.on_device:
            with _uploading:  # two threads may make the same first call
                if not self.on_device:
                    self.on_device.extend(uploaded(self.host, self.device))
                    self.host.clear()
        return self.on_device

    @property
    def bounds(self) -> Tensor:
        """First row of the other side that a row sees, and one past the last: int32 (batch or 1, rows, 2)."""
        return self._tables[0]

    @property
    def tiles(self) -> Tensor:
        """Begin, full_begin, full_end and end of each owned tile, in tiles of the other side.

        int32 (batch or 1, ntiles, 4). Some row of the owned tile sees some of [begin, end). Every row sees all of
        [full_begin, full_end). In the rest some rows see only a part.
        """
        return self._tables[1]

    @property
    def order(self) -> Tensor:
        """Tiles with the most processed tiles first, so that no long one begins late: int32 (ntiles,).

        With `ordered` it is the order of storage.
        """
        return self._tables[2]

    @property
    def turns(self) -> Tensor | None:
        """Table of `_turns`, int32; None unless `ordered`."""
        return self._tables[3] if self.ordered else None

    @property
    def bounds_stride(self) -> int:
        """Elements from the bounds of a sequence to those of the next, 0 if all sequences share them."""
        return batch_stride(self.bounds)

    @property
    def tiles_stride(self) -> int:
        """Stride of `tiles`, likewise."""
        return batch_stride(self.tiles)

    @property
    def turns_stride(self) -> int:
        """Stride of `turns`, likewise; 0 without it."""
        return 0 if self.turns is None else batch_stride(self.turns)

    @property
    def masked(self) -> bool:
        """True if any processed tile needs a mask."""
        return self.below or self.above

    @property
    def shifted(self) -> bool:
        """True if owned tiles process about equally many tiles, but different ones: mostly windows below half."""
        return self.below and self.above and self.skew < 4 / 3


def are_ascending(chunks: Sequence[Chunk]) -> bool:
    """Returns whether positions rise through storage; the tables require this."""
    return all(before.stop <= after.start for before, after in pairwise(chunks))


@device_tables(maxsize=256)  # a ring has three tables a hop
def intervals(
    mask: Mask,
    q_chunks: Sequence[Chunk],
    k_chunks: Sequence[Chunk],
    own_block: int,
    block: int,
    device: torch.device,
    by_keys: bool,
    ordered: bool = False,
) -> Intervals:
    """Returns the tables for owned tiles of `own_block` rows that process tiles of `block` rows.

    `by_keys` makes tiles of keys the owned ones, rather than tiles of queries. `ordered` keeps owned tiles in storage
    order and adds the table `turns`.
    """
    first, stop = _seen(mask, q_chunks, k_chunks)
    if by_keys:
        nkeys = sum(chunk.length for chunk in k_chunks)
        first, stop = _counts_up_to(stop, nkeys), _counts_up_to(first, nkeys)
    first_rows = np.arange(0, first.shape[1], own_block)
    live = stop > first
    covers = bool(live.all())
    # True for each tile that has a fully masked row.
    fully_masked = np.False_ if covers else ~np.logical_and.reduceat(live, first_rows, axis=1)
    seen = TileBounds.of(first, stop, live, first_rows)
    if by_keys and first.shape[1] % own_block > 0:
        seen.all_hi[:, -1] = 0  # no query sees keys past the end, because dq is a sum over all rows of a tile
    np.minimum(seen.some_lo, seen.some_hi, out=seen.some_lo)  # spans of fully masked tiles lie at 0
    tiles = seen.spans(block)
    begin, end = tiles[..., 0], tiles[..., 3]
    visits = end - begin
    visited = visits > 0
    below = bool((visited & ((seen.all_lo > begin * block) | fully_masked)).any())
    above = bool((visited & ((seen.all_hi < end * block) | fully_masked)).any())
    above |= by_keys and first.shape[1] % own_block > 0
    fullest = totals = visits[0]
    if len(visits) > 1:
        fullest, totals = visits[visits.sum(1).argmax()], visits.sum(0)
    order = (-totals).argsort(kind="stable")
    bounds = np.empty((*first.shape, 2), np.int32)
    bounds[..., 0], bounds[..., 1] = first, stop
    tables = [bounds, tiles, order]
    if ordered:
        nrows = sum(chunk.length for chunk in (q_chunks if by_keys else k_chunks))
        tables[2:] = np.arange(len(order)), _turns(begin, end, -(-nrows // block))
    return Intervals(
        below=below,
        above=above,
        visits=visits.sum().item() / visits.size,
        skew=fullest.max().item() * fullest.size / most if (most := fullest.sum().item()) else 1.0,
        covers=covers,
        ordered=ordered,
        host=tables,
        device=device,
    )


@lru_cache(maxsize=16)  # the forward and the backward of a hop share them
def _seen(mask: Mask, q_chunks: Sequence[Chunk], k_chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first row of keys that each query sees, and one past the last: int32 (batch or 1, seqlen_q) each.

    Neither bound ever falls. A query sees nothing if its second bound is not larger than its first.
    """
    rows = row_intervals(mask, q_chunks)
    return _rows_before(rows.lo, k_chunks), _rows_before(rows.hi, k_chunks)


def _rows_before(x: np.ndarray, chunks: Sequence[Chunk]) -> np.ndarray:
    """Returns how many rows of `chunks` have positions below each of `x`: int32 (batch, n); x likewise, never falling.

    Between two chunks' starts this is the distance from the first, or the chunk's length if that is less.
    """
    if len(chunks) == 1:
        return np.minimum(np.maximum(x - np.int32(chunks[0].start), 0), np.int32(chunks[0].length))
    starts, lengths = np.array([(chunk.start, chunk.length) for chunk in chunks], np.int32).T
    stored = lengths.cumsum(dtype=np.int32)
    shifts, most = np.append(0, stored - lengths - starts), np.append(0, stored)
    counts = np.diff([row.searchsorted(starts) for row in x], prepend=0, append=x.shape[1]).ravel()
    shifts, most = (np.tile(t.astype(np.int32), len(x)).repeat(counts).reshape(x.shape) for t in (shifts, most))
    return np.minimum(x + shifts, most)


def _counts_up_to(x: np.ndarray, n: int) -> np.ndarray:
    """Returns how many of the numbers 0 <= x <= n (batch, rows) are at most j, for each j < n: int32 (batch, n)."""
    counts = torch.stack([torch.bincount(row, minlength=n + 1)[:n] for row in torch.from_numpy(x)])
    return counts.cumsum(1, dtype=torch.int32).numpy()


def _turns(begin: np.ndarray, end: np.ndarray, nothers: int) -> np.ndarray:
    """Returns the table of the order in which owned tiles add to each tile of the other side in [begin, end).

    Neither bound ever falls from one owned tile to the next, apart from owned tiles that process nothing. So the owned
    tiles that add to a given tile are consecutive among the tiles that process any.

    Args:
        begin: int64 (batch or 1, ntiles), the first tile that each owned tile processes.
        end: the same shape, one past the last tile.
        nothers: tiles of the other side.

    Returns:
        int64 (batch or 1, ntiles + 2 nothers): for each owned tile, its rank, which is the number of earlier owned
        tiles that process any tile. Then for each tile of the other side, two numbers: the rank of the first owned tile
        that processes it, and how many owned tiles do.
    """
    visiting = end > begin
    opened, closed = (
        np.stack([np.bincount(row[some], minlength=nothers + 1) for row, some in zip(edge, visiting, strict=True)])
        for edge in (begin, end)
    )
    opened, closed = (x.cumsum(1)[:, :nothers] for x in (opened, closed))
    others = np.stack([closed, opened - closed], -1).reshape(len(begin), -1)
    return np.concatenate([visiting.cumsum(1) - visiting, others], 1)
