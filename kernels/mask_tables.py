"""Tables that describe a mask to kernels: no table, the causal rule, bounds of each row, or lists of tiles.

Kernels compute FULL and CAUSAL from positions. Any other mask is two int32 vectors, lo and hi (batch or 1, seqlen_q),
in global positions. A LISTED mask also has a bitmap, and lists of the pairs of tiles to process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ringflash.errors import ArgumentError
from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.layouts.layout import Chunk, positions
from ringflash.masks import Causal, Full, Mask

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


@device_tables(maxsize=128)
def row_bounds(mask: Mask, q_chunks: Sequence[Chunk], device: torch.device) -> RowBounds:
    """Returns the bounds of the rows that `q_chunks` store."""
    unread = torch.zeros(1, dtype=torch.int32, device=device)
    if not has_short_spans(mask):
        return RowBounds(FULL if isinstance(mask, Full) else CAUSAL, unread, unread, 0, unread, unread, unread, 1)
    rows = positions(q_chunks, "cpu")
    lo, hi = torch.broadcast_tensors(*mask.bounds(rows, LAST_KEY))
    live = hi > lo
    hull = torch.stack([lo.where(live, LAST_KEY).amin(1), hi.where(live, 0).amax(1)], 1)
    lo, hi, hull = (uploaded(x.to(torch.int32).contiguous(), device) for x in (lo, hi, hull))
    batch_stride = 0 if lo.shape[0] == 1 else lo.shape[1]
    bitmap = mask.bitmap()
    if bitmap is None:
        return RowBounds(TABLE, lo, hi, batch_stride, hull, unread, unread, 1)
    bit_rows = uploaded(bitmap.rows(rows).to(torch.int32), device)
    return RowBounds(LISTED, lo, hi, batch_stride, hull, bit_rows, _words(mask, device), bitmap.size)


@lru_cache(maxsize=32)
def rows_seeing(mask: Mask, q_chunks: Sequence[Chunk]) -> Tensor:
    """Returns whether each row that `q_chunks` store sees any key: bool (batch or 1, seqlen_q), on the CPU."""
    rows = positions(q_chunks, "cpu")
    lo, hi = torch.broadcast_tensors(*mask.bounds(rows, LAST_KEY))
    bitmap = mask.bitmap()
    if bitmap is None:
        return hi > lo
    first, end = (x[bitmap.rows(rows)] for x in bitmap.hull)
    seeing = (first < end) & (((lo <= first) & (first < hi)) | ((lo < end) & (end <= hi)))
    unknown = ((lo.maximum(first) < hi.minimum(end)) & ~seeing).any(0).nonzero().squeeze(1)
    if len(unknown):  # the interval holds neither the first nor the last key that the bitmap shows
        seeing[:, unknown] = bitmap.sees_any(rows[unknown], lo[:, unknown], hi[:, unknown])
    return seeing


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
    return uploaded(torch.from_numpy(whole).view(torch.int32), device)


@dataclass(frozen=True, eq=False)
class Visits:
    """Lists of the tiles that each tile processes, one list for each chunk of the other side.

    Args:
        ranges: int32 (batch or 1, ntiles, nchunks, 3), contiguous, on the CPU: three indices into `tiles`. Tiles that
            need no mask begin at the first index. Tiles that need one begin at the second and end at the third.
        batch_stride: elements from one sequence's ranges to the next's, 0 when all sequences have the same ranges.
        tiles: int32 (n,), n > 0: the first row of a listed tile, counted from its chunk's first. Within a range, tiles
            with and tiles without a mask are each in ascending order.
    """

    ranges: Tensor
    batch_stride: int
    tiles: Tensor


@dataclass(frozen=True)
class Tiles:
    """Tiles that cover some chunks, in storage order; no tile crosses a chunk's border."""

    block: int
    chunk: Tensor  # index of each tile's chunk
    offset: Tensor  # each tile's first row, counted from the chunk's first
    start: Tensor  # global position of each tile's first row
    stop: Tensor  # one past the global position of each tile's last row

    @staticmethod
    def of(chunks: Sequence[Chunk], block: int) -> Tiles:
        lengths = torch.tensor([chunk.length for chunk in chunks], device="cpu")
        starts = torch.tensor([chunk.start for chunk in chunks], device="cpu")
        counts = -(-lengths // block)
        chunk = torch.arange(len(chunks), device="cpu").repeat_interleave(counts)
        offset = (torch.arange(len(chunk), device="cpu") - (counts.cumsum(0) - counts)[chunk]) * block
        start = starts[chunk] + offset
        return Tiles(block, chunk, offset, start, torch.minimum(start + block, (starts + lengths)[chunk]))

    @property
    def short(self) -> Tensor:
        return self.stop - self.start < self.block


@dataclass(frozen=True)
class TileBounds:
    """Bounds of the keys that the rows of each tile of queries see, (batch or 1, tiles) each.

    Some row sees a key only in [some_lo, some_hi); every row's interval covers [all_lo, all_hi). Rows that see no key
    count for all_lo and all_hi alone.
    """

    some_lo: Tensor
    some_hi: Tensor
    all_lo: Tensor
    all_hi: Tensor

    @staticmethod
    def of(mask: Mask, chunks: Sequence[Chunk], block: int) -> TileBounds:
        """Returns the bounds of the tiles of `block` rows that cover `chunks`."""
        columns: list[tuple[Tensor, ...]] = []
        for chunk in chunks:
            lo, hi = torch.broadcast_tensors(*mask.bounds(positions([chunk], "cpu"), LAST_KEY))
            live = rows_seeing(mask, (chunk,))

            def tiled(x: Tensor, filling: int, chunk: Chunk = chunk) -> Tensor:
                return pad(x, (0, -chunk.length % block), value=filling).unflatten(1, (-1, block))

            columns.append(
                (
                    tiled(lo.where(live, LAST_KEY), LAST_KEY).amin(2),
                    tiled(hi.where(live, 0), 0).amax(2),
                    tiled(lo, 0).amax(2),
                    tiled(hi, LAST_KEY).amin(2),
                )
            )
        return TileBounds(*(torch.cat(parts, 1) for parts in zip(*columns, strict=True)))


@device_tables(maxsize=128)
def visits(
    mask: Mask,
    q_chunks: Sequence[Chunk],
    k_chunks: Sequence[Chunk],
    block_m: int,
    block_n: int,
    device: torch.device,
    by_keys: bool,
) -> Visits:
    """Lists for each tile of `block_m` queries the tiles of `block_n` keys to process, or the reverse with `by_keys`.

    A pair of tiles is left out if the hull of its rows' intervals holds none of its keys. The same holds if the bitmap
    shows none of its keys. A tile of queries that all see nothing has no pairs. A listed tile that is short always
    counts as one that needs a mask, so tiles without a mask need no bounds checks.
    """
    bitmap = mask.bitmap()
    assert bitmap is not None
    queries, keys = Tiles.of(q_chunks, block_m), Tiles.of(k_chunks, block_n)
    rows = TileBounds.of(mask, q_chunks, block_m)
    first_bits, last_bits = bitmap.rows(queries.start), bitmap.rows(queries.stop - 1)
    batch, nq_tiles = rows.some_lo.shape
    nk_tiles = len(keys.start)
    pairs: list[Tensor] = []  # (pairs, 4): sequence, tile of queries, tile of keys, whether it needs a mask
    cells_a_tile = len(bitmap.cells) * (block_n // bitmap.size + 2)
    step = max(AT_ONCE // max(cells_a_tile, batch * nq_tiles), 1)
    for begin in range(0, nk_tiles, step):
        starts, stops = keys.start[begin : begin + step], keys.stop[begin : begin + step]
        some, every = bitmap.over(first_bits, last_bits, starts, stops)
        some = some & (rows.some_lo[..., None] < stops) & (rows.some_hi[..., None] > starts)
        every = every & (rows.all_lo[..., None] <= starts) & (rows.all_hi[..., None] >= stops)
        every &= ~(queries.short[:, None] if by_keys else keys.short[begin : begin + step])
        found = some.nonzero()
        partial = ~every[tuple(found.unbind(1))]
        pairs.append(torch.cat([found + torch.tensor([0, 0, begin], device="cpu"), partial[:, None]], 1))
    sequence, query, key, partial = torch.cat(pairs).unbind(1)
    own, other, tiles = (key, query, queries) if by_keys else (query, key, keys)
    nown, nchunks = (nk_tiles, len(q_chunks)) if by_keys else (nq_tiles, len(k_chunks))
    group = ((sequence * nown + own) * nchunks + tiles.chunk[other]) * 2 + partial
    counts = torch.bincount(group, minlength=batch * nown * nchunks * 2)
    ends = counts.cumsum(0).view(-1, 2)
    ranges = torch.cat([(ends[:, :1] - counts.view(-1, 2)[:, :1]), ends], 1).view(batch, nown, nchunks, 3)
    order = (group * len(tiles.start) + other).argsort()
    visited = tiles.offset[other[order]] if len(order) else torch.zeros(1, dtype=torch.int64, device="cpu")
    ranges = ranges.to(torch.int32)
    visited = uploaded(visited.to(torch.int32).contiguous(), device)
    return Visits(ranges, 0 if batch == 1 else ranges.stride(0), visited)
