"""Tables of a launch: the tile that each program owns, and the tiles of the other side that the program processes.

Everything is computed on the host and cached, so that a program starts with one round of loads. With `by_keys` programs
own tiles of keys and stream queries, else they own tiles of queries and stream keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.kernels.mask_tables import (
    CAUSAL,
    LISTED,
    TABLE,
    RowBounds,
    RowIntervals,
    TileBounds,
    Tiles,
    batch_stride,
    row_bounds,
    row_intervals,
    visits,
)
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask


@dataclass(frozen=True, eq=False)
class Programs:
    """The tables of one launch.

    Args:
        bounds: bounds of the keys that the rows see.
        kind: mask that tiles in need of one apply: `bounds.kind`, or CAUSAL if the table agrees with the causal rule in
            every processed tile, as under documents that begin at tile borders. It may differ from hop to hop.
        even: whether loads of streamed tiles need no bounds: these tiles are whole, and no streamed query is fully
            masked. With `by_keys` owned tiles are whole too.
        ntiles: owned tiles for each sequence and head. Tiles with the most work come first, so that none begins late.
        nchunks: chunks of the other side.
        places: int32 (ntiles, 4): an owned tile's first row in storage, the rows from there to its chunk's end, the
            rows in the tile, and its global position.
        spans: int32 (batch or 1, ntiles, nchunks, 8), the span first: begin, full_begin, full_end and end, counted from
            the chunk's first row. In [begin, end) some queries see some keys, and in [full_begin, full_end) all queries
            see all keys. begin and full_begin are multiples of the tile; full_end is one too, or the chunk's length.
            When LISTED, the span counts entries of `tiles` instead: [full_begin, full_end) need no mask, [full_end,
            end) do. After the span: the row of the chunk from which on no row is used, the chunk's first row in
            storage, its global position and its length.
        batch_stride: elements from one sequence's spans to the next's, 0 when all sequences have the same spans.
        tiles: int32, the listed tiles.
    """

    bounds: RowBounds
    kind: int
    even: bool
    ntiles: int
    nchunks: int
    places: Tensor
    spans: Tensor
    batch_stride: int
    tiles: Tensor


@device_tables(maxsize=256)
def make_programs(
    mask: Mask,
    q_chunks: Sequence[Chunk],
    k_chunks: Sequence[Chunk],
    block_m: int,
    block_n: int,
    device: torch.device,
    by_keys: bool,
) -> Programs:
    """Returns the tables for tiles of `block_m` queries and `block_n` keys."""
    bounds, rows = row_bounds(mask, q_chunks, device), row_intervals(mask, q_chunks)
    own, others = (k_chunks, q_chunks) if by_keys else (q_chunks, k_chunks)
    owned = Tiles.of(own, block_n if by_keys else block_m)
    starts, lengths = np.array([(chunk.start, chunk.length) for chunk in others]).T
    if by_keys:
        ends = lengths[None, None]
        even = all(c.length % block_m == 0 for c in q_chunks) and all(c.length % block_n == 0 for c in k_chunks)
        even = even and _met_see(rows, block_m)
    else:  # storage past the last key that any row sees may hold anything
        ends = (rows.hull()[:, 1:] - starts).clip(0, lengths)[:, None]
        even = bool((ends % block_n == 0).all())
    kind, tiles = bounds.kind, bounds.lo  # `tiles` is read only when LISTED
    if kind == LISTED:
        ranges, tiles = visits(mask, q_chunks, k_chunks, block_m, block_n, device, by_keys)
        spans = ranges[..., [0, 0, 1, 2]]
    else:
        if by_keys:
            spans, needs_table = _query_spans(rows, owned, block_m)
        else:
            spans, needs_table = _key_spans(rows.tiles(owned), starts, lengths, block_n)
        if kind == TABLE and not needs_table and rows.ends_at_diagonal:
            kind = CAUSAL
    about = np.stack([lengths.cumsum() - lengths, starts, lengths], 1)
    parts = spans, np.broadcast_to(ends, spans.shape[:-1])[..., None], np.broadcast_to(about, (*spans.shape[:-1], 3))
    spans = np.concatenate(parts, -1)
    work = (spans[..., 3] - spans[..., 0]).sum((0, 2))
    order = (-work).argsort(kind="stable")
    rest = np.array([chunk.length for chunk in own])[owned.chunk] - owned.offset
    places = np.stack([owned.row, rest, owned.stop - owned.start, owned.start], 1)
    places, spans = uploaded((places[order], spans[:, order]), device)
    return Programs(bounds, kind, even, len(order), len(others), places, spans, batch_stride(spans), tiles)


def _met_see(rows: RowIntervals, block_m: int) -> bool:
    """Returns whether every row of a processed tile sees a key; a listed tile without such rows is never processed."""
    if rows.mask.bitmap() is None:
        return bool(rows.seeing.all())
    tiled = rows.seeing.reshape(len(rows.seeing), -1, block_m)
    return bool((tiled.all(2) == tiled.any(2)).all())


def _key_spans(seen: TileBounds, starts: np.ndarray, lengths: np.ndarray, block_n: int) -> tuple[np.ndarray, bool]:
    """Returns spans of the keys that the rows of each tile of queries see: int64 (batch or 1, tiles, nk_chunks, 4).

    The second result is True if some row's interval begins after the first key that its tile streams: the causal rule
    would show that row earlier keys too.
    """
    bounds = (seen.some_lo, seen.some_hi, seen.all_lo, seen.all_hi)
    met = TileBounds(*((x[..., None] - starts).clip(0, lengths) for x in bounds))
    spans = met.spans(block_n) * block_n
    begin = spans[..., 0]
    spans[..., 3] = end = np.maximum(met.some_hi, begin)
    return spans, bool(((met.all_lo > begin) & (begin < end)).any())


def _query_spans(rows: RowIntervals, keys: Tiles, block_m: int) -> tuple[np.ndarray, bool]:
    """Returns spans of the queries that see each tile of keys: int64 (batch or 1, tiles, nq_chunks, 4).

    The queries are consecutive because neither bound of a row ever falls. The rows past a chunk's end in its last tile
    count as seeing all keys: their lse makes their probabilities 0.

    The second result is True if the causal rule does not suffice, in two cases. The interval of a processed query may
    begin after the first key of its tile: the causal rule would show that key. Or a tile may have keys past all seen
    keys: their storage may hold anything and must not be read.
    """
    lengths = np.array([chunk.length for chunk in rows.chunks])
    borders = lengths.cumsum()[:-1]
    starts, stops = keys.start.astype(np.int32), keys.stop.astype(np.int32)  # the dtype of the bounds

    def search(bound: np.ndarray, values: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
        found = [[part.searchsorted(values, side) for part in np.split(row, borders)] for row in bound]
        return np.array(found).swapaxes(1, 2)

    end = search(rows.lo, stops, "left")  # lo < stop
    begin = np.minimum(search(rows.hi, starts, "right"), end)  # hi > start
    full_begin = search(rows.hi, stops, "left").clip(begin, end)  # hi >= stop
    full_end = search(rows.lo, starts, "right").clip(begin, end)  # lo <= start
    last = rows.hi[:, np.append(borders, rows.hi.shape[1]) - 1]
    after = (full_end < end) | ((end % block_m > 0) & (end < lengths)) | (keys.stop[:, None] > last[:, None])
    needs_table = bool((after & (begin < end)).any())
    end = np.where(begin < end, end, begin // block_m * block_m)  # an empty span stays empty
    spans = TileBounds(begin, end, full_begin, full_end).spans(block_m) * block_m
    spans[..., 2] = np.where(full_end == lengths, np.maximum(lengths, spans[..., 1]), spans[..., 2])
    spans[..., 3] = end
    return spans, needs_table
