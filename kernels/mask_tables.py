"""Tables that describe a mask to kernels: no table, the causal rule, bounds of each row, or lists of tiles.

Kernels compute FULL and CAUSAL from positions. Any other mask is two int32 vectors, lo and hi (batch or 1, seqlen_q),
in global positions. A LISTED mask also has a bitmap, and lists of the pairs of tiles to process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, reduce

import numpy as np
import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.device_tables import device_tables, outside_pools, uploaded
from ringflash.layouts.layout import Chunk, positions
from ringflash.masks import Causal, Full, Mask
from ringflash.masks.base import TensorMask

FULL, CAUSAL, TABLE, LISTED = 0, 1, 2, 3
LAST_KEY = 2**31 - 1  # positions are int32 in the kernels
AT_ONCE = 2**25  # entries of the largest tensor that `visits` creates


def has_short_spans(mask: Mask) -> bool:
    """Returns False if every row sees all keys (Full) or all keys up to its own (Causal), else True."""
    return not isinstance(mask, Full | Causal)


@dataclass(frozen=True, eq=False)
class RowBounds:
    """Bounds of the keys that each row sees, as kernels read them.

    A row sees the keys in [lo, hi). When LISTED, the bitmap hides some of these.

    Args:
        kind: FULL, CAUSAL, TABLE or LISTED.
        lo: int32 (batch or 1, seqlen_q), contiguous: the first key that a row sees. Not read with FULL and CAUSAL.
        hi: likewise, one past the last key that a row sees.
        batch_stride: elements from one sequence's bounds to the next's, 0 when all sequences have the same bounds.
        hull: int32 (batch or 1, 2), the first key that any row sees and one past the last. Storage outside may hold
            anything.
        bit_rows: int32 (seqlen_q,), each row's row of `words`. Read only when LISTED, like `words` and `size`.
        words: int32 (R, W), contiguous: with c = j // size, key j is shown iff c // 32 < W and bit c % 32 of
            words[bit_row, c // 32] is set.
        size: number of keys that one bit stands for.
    """

    kind: int
    lo: Tensor
    hi: Tensor
    batch_stride: int
    hull: Tensor
    bit_rows: Tensor
    words: Tensor
    size: int


@dataclass(frozen=True, eq=False)
class TileBounds:
    """Bounds of the keys that the rows of each tile see: int64 (batch or 1, tiles, ...) each.

    Some row sees a key only in [some_lo, some_hi); every row's interval covers [all_lo, all_hi). Rows that see no key
    count for all_lo and all_hi alone.
    """

    some_lo: np.ndarray
    some_hi: np.ndarray
    all_lo: np.ndarray
    all_hi: np.ndarray

    @staticmethod
    def of(lo: np.ndarray, hi: np.ndarray, seeing: np.ndarray, first_rows: np.ndarray) -> TileBounds:
        """Returns the minima and maxima over tiles of rows' bounds (batch or 1, rows); tiles begin at `first_rows`."""
        some_lo, some_hi = (lo, hi) if seeing.all() else (np.where(seeing, lo, LAST_KEY), np.where(seeing, hi, 0))
        reductions = (np.minimum, some_lo), (np.maximum, some_hi), (np.maximum, lo), (np.minimum, hi)
        return TileBounds(*(f.reduceat(x, first_rows, axis=1).astype(np.int64) for f, x in reductions))

    def spans(self, block: int) -> np.ndarray:
        """Returns begin, full_begin, full_end, end of each tile, in tiles of `block` keys: int64 (..., 4).

        Some row sees some of [begin, end). Every row sees all of [full_begin, full_end).
        """
        spans = np.empty((*self.some_lo.shape, 4), np.int64)  # filled in place: with few tiles, calls count
        begin, full_begin, full_end, end = (spans[..., i] for i in range(4))
        np.floor_divide(self.some_lo, block, out=begin)
        np.maximum(-(-self.some_hi // block), begin, out=end)
        np.minimum(np.maximum(-(-self.all_lo // block), begin), end, out=full_begin)
        np.minimum(np.maximum(self.all_hi // block, full_begin), end, out=full_end)
        return spans


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """Intervals of the keys that the rows of some chunks see, on the host: the source of every backend's tables.

    Args:
        mask: the mask.
        chunks: the chunks that store the rows.
        lo: int32 (batch or 1, rows), contiguous: the first key of each row's interval, a global position.
        hi: likewise, one past its last key.
    """

    mask: Mask
    chunks: Sequence[Chunk]
    lo: np.ndarray
    hi: np.ndarray

    @cached_property
    def live(self) -> np.ndarray:
        """Returns whether each row's interval holds a key: bool (batch or 1, rows)."""
        return self.hi > self.lo

    @cached_property
    def seeing(self) -> np.ndarray:
        """Returns whether each row sees any key: bool (batch or 1, rows)."""
        bitmap = self.mask.bitmap()
        if bitmap is None:
            return self.live
        rows = positions(self.chunks, "cpu")
        lo, hi = (torch.from_numpy(x).long() for x in (self.lo, self.hi))
        first, end = (x[bitmap.rows(rows)] for x in bitmap.hull)
        seeing = (first < end) & (((lo <= first) & (first < hi)) | ((lo < end) & (end <= hi)))
        unknown = ((lo.maximum(first) < hi.minimum(end)) & ~seeing).any(0).nonzero().squeeze(1)
        if len(unknown):  # the interval holds neither the first nor the last key that the bitmap shows
            seeing[:, unknown] = bitmap.sees_any(rows[unknown], lo[:, unknown], hi[:, unknown])
        return seeing.numpy()

    @cached_property
    def ends_at_diagonal(self) -> bool:
        """Returns whether the last key that each row sees is its own; rows before the first key must see nothing."""
        stop = np.concatenate([np.arange(c.start + 1, c.stop + 1, dtype=np.int32) for c in self.chunks]).clip(min=0)
        return bool((self.hi == stop).all() and (self.lo <= (stop - 1).clip(min=0)).all())

    def tiles(self, tiles: Tiles) -> TileBounds:
        """Returns the bounds of tiles that cover the chunks."""
        return TileBounds.of(self.lo, self.hi, self.seeing, tiles.row)

    def hull(self) -> np.ndarray:
        """Returns the first key that any row's interval holds and one past the last: int64 (batch or 1, 2)."""
        whole = TileBounds.of(self.lo, self.hi, self.live, np.zeros(1, np.int64))
        return np.concatenate([whole.some_lo, whole.some_hi], 1)


@lru_cache(maxsize=16)
def row_intervals(mask: Mask, chunks: Sequence[Chunk]) -> RowIntervals:
    """Returns the intervals of the rows that `chunks` store."""
    los, his = zip(*[_bounds_of(part, chunks) for part in mask.parts or (mask,)], strict=True)
    lo, hi = reduce(np.maximum, los), reduce(np.minimum, his)
    if lo.shape != hi.shape:
        lo, hi = map(np.ascontiguousarray, np.broadcast_arrays(lo, hi))
    return RowIntervals(mask, chunks, lo, hi)


def _bounds_of(part: Mask, chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of the rows that `chunks` store under one mask of an intersection: int32."""
    return _made_bounds(part, chunks) if isinstance(part, TensorMask) else _known_bounds(part, chunks)


def _made_bounds(mask: Mask, chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    lo, hi = (np.ascontiguousarray(x.numpy(), np.int32) for x in mask.bounds(_positions(chunks), LAST_KEY))
    return lo, hi


# Documents change at each step, but the causal mask beside them does not.
_known_bounds = lru_cache(maxsize=4)(_made_bounds)


@lru_cache(maxsize=16)  # masks of one shape, such as the documents of each step, share them
def _positions(chunks: Sequence[Chunk]) -> Tensor:
    return positions(chunks, "cpu")


def batch_stride(table: Tensor) -> int:
    """Returns the elements from one sequence's entries of a contiguous table to the next's, 0 if all share them."""
    return 0 if table.shape[0] == 1 else table.stride(0)


@cache
def _unread(device: torch.device) -> Tensor:
    """Returns a tensor for pointers that a kernel never reads."""
    return outside_pools(lambda: torch.zeros(1, dtype=torch.int32, device=device), device)


@device_tables(maxsize=128)
def row_bounds(mask: Mask, q_chunks: Sequence[Chunk], device: torch.device) -> RowBounds:
    """Returns the bounds of the rows that `q_chunks` store."""
    unread = _unread(device)
    if not has_short_spans(mask):
        return RowBounds(FULL if isinstance(mask, Full) else CAUSAL, unread, unread, 0, unread, unread, unread, 1)
    rows = row_intervals(mask, q_chunks)
    lo, hi, hull = uploaded((rows.lo, rows.hi, rows.hull()), device)
    bitmap = mask.bitmap()
    if bitmap is None:
        return RowBounds(TABLE, lo, hi, batch_stride(lo), hull, unread, unread, 1)
    bit_rows = uploaded([bitmap.rows(positions(q_chunks, "cpu")).numpy()], device)[0]
    return RowBounds(LISTED, lo, hi, batch_stride(lo), hull, bit_rows, _words(mask, device), bitmap.size)


@device_tables(maxsize=32)
def _words(mask: Mask, device: torch.device) -> Tensor:
    """Packs the cells of a mask's bitmap, 32 in an int32; all chunks of queries share the result."""
    bitmap = mask.bitmap()
    assert bitmap is not None
    if bitmap.cells.numel() >= 2**31:  # the host needs a byte for each cell, and sums of cells
        remedy = "Use larger blocks of a common size, or a tree nearer to the sequence's beginning."
        got = f"{bitmap.cells.shape[0]} x {bitmap.cells.shape[1]} cells"
        raise ArgumentError("mask", expected="a bitmap of less than 2^31 cells", got=got, remedy=remedy)
    packed = np.packbits(bitmap.cells.numpy(), axis=1, bitorder="little")
    whole = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    return uploaded([whole.view(np.int32)], device)[0]


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles that cover some chunks, in storage order; no tile crosses a chunk's border. Arrays are int64 (tiles,)."""

    block: int
    chunk: np.ndarray  # index of each tile's chunk
    offset: np.ndarray  # each tile's first row, counted from the chunk's first
    row: np.ndarray  # each tile's first row in storage
    start: np.ndarray  # global position of each tile's first row
    stop: np.ndarray  # one past the global position of each tile's last row

    @staticmethod
    def of(chunks: Sequence[Chunk], block: int) -> Tiles:
        """Returns the tiles of `block` rows that cover `chunks`."""
        starts, lengths = np.array([(chunk.start, chunk.length) for chunk in chunks]).T
        counts = -(-lengths // block)
        chunk = np.repeat(np.arange(len(chunks)), counts)
        offset = (np.arange(len(chunk)) - (counts.cumsum() - counts)[chunk]) * block
        start = starts[chunk] + offset
        row = (lengths.cumsum() - lengths)[chunk] + offset
        return Tiles(block, chunk, offset, row, start, np.minimum(start + block, (starts + lengths)[chunk]))

    @property
    def short(self) -> np.ndarray:
        """Returns whether each tile has fewer rows than `block`."""
        return self.stop - self.start < self.block


@device_tables(maxsize=128)
def visits(
    mask: Mask,
    q_chunks: Sequence[Chunk],
    k_chunks: Sequence[Chunk],
    block_m: int,
    block_n: int,
    device: torch.device,
    by_keys: bool,
) -> tuple[np.ndarray, Tensor]:
    """Lists for each tile of `block_m` queries the tiles of `block_n` keys to process, or the reverse with `by_keys`.

    A pair of tiles is left out if the hull of its rows' intervals holds none of its keys. The same holds if the bitmap
    shows none of its keys. A tile of queries that all see nothing has no pairs. A listed tile that is short always
    counts as one that needs a mask, so tiles without a mask need no bounds checks.

    Returns:
        ranges: int64 (batch or 1, ntiles, nchunks, 3), on the host: three indices into `tiles` for each chunk of the
            other side. Tiles that need no mask begin at the first index. Tiles that need one begin at the second and
            end at the third.
        tiles: int32 (n,), n > 0: the first row of a listed tile, counted from its chunk's first. Within a range, tiles
            with and tiles without a mask are each in ascending order.
    """
    bitmap = mask.bitmap()
    assert bitmap is not None
    queries, keys = Tiles.of(q_chunks, block_m), Tiles.of(k_chunks, block_n)
    rows = row_intervals(mask, q_chunks).tiles(queries)
    first_bits, last_bits = (bitmap.rows(torch.from_numpy(x)) for x in (queries.start, queries.stop - 1))
    batch, nq_tiles = rows.some_lo.shape
    nk_tiles = len(keys.start)
    pairs: list[np.ndarray] = []  # (4, pairs): sequence, tile of queries, tile of keys, whether it needs a mask
    cells_a_tile = len(bitmap.cells) * (block_n // bitmap.size + 2)
    step = max(AT_ONCE // max(cells_a_tile, batch * nq_tiles), 1)
    for begin in range(0, nk_tiles, step):
        starts, stops = keys.start[begin : begin + step], keys.stop[begin : begin + step]
        some, every = bitmap.over(first_bits, last_bits, torch.from_numpy(starts), torch.from_numpy(stops))
        some = some.numpy() & (rows.some_lo[..., None] < stops) & (rows.some_hi[..., None] > starts)
        every = every.numpy() & (rows.all_lo[..., None] <= starts) & (rows.all_hi[..., None] >= stops)
        every &= ~(queries.short[:, None] if by_keys else keys.short[begin : begin + step])
        found = some.nonzero()
        pairs.append(np.stack([found[0], found[1], found[2] + begin, ~every[found]]))
    sequence, query, key, partial = np.concatenate(pairs, 1)
    own, other, tiles = (key, query, queries) if by_keys else (query, key, keys)
    nown, nchunks = (nk_tiles, len(q_chunks)) if by_keys else (nq_tiles, len(k_chunks))
    group = ((sequence * nown + own) * nchunks + tiles.chunk[other]) * 2 + partial
    counts = np.bincount(group, minlength=batch * nown * nchunks * 2).reshape(-1, 2)
    ends = counts.cumsum().reshape(-1, 2)
    ranges = np.concatenate([ends[:, :1] - counts[:, :1], ends], 1).reshape(batch, nown, nchunks, 3)
    order = (group * len(tiles.start) + other).argsort()
    visited = tiles.offset[other[order]] if len(order) else np.zeros(1)
    return ranges, uploaded([visited], device)[0]
