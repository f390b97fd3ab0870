"""Tables of a launch: the tile that each program owns, and the tiles of the other side that the program processes.

Everything is computed on the host and cached, so that a program starts with one round of loads. With `by_keys` programs
own tiles of keys and stream queries, else they own tiles of queries and stream keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.kernels.mask_tables import (
    CAUSAL,
    LAST_KEY,
    LISTED,
    TABLE,
    RowBounds,
    TileBounds,
    Tiles,
    row_bounds,
    rows_seeing,
    visits,
)
from ringflash.layouts.layout import Chunk, positions
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
    bounds = row_bounds(mask, q_chunks, device)
    own, others = (k_chunks, q_chunks) if by_keys else (q_chunks, k_chunks)
    block = block_n if by_keys else block_m
    owned = Tiles.of(own, block)
    lengths, starts = (torch.tensor([(c.length, c.start) for c in others], device="cpu")).unbind(1)
    if by_keys:
        ends = lengths.expand(1, 1, -1)
        even = all(c.length % block_m == 0 for c in q_chunks) and all(c.length % block_n == 0 for c in k_chunks)
        even = even and _met_see(mask, q_chunks, block_m)
    else:  # storage past the last key that any row sees may hold anything
        lo, hi = torch.broadcast_tensors(*mask.bounds(positions(q_chunks, "cpu"), LAST_KEY))
        ends = torch.minimum((hi.where(hi > lo, 0).amax(1)[:, None] - starts).clamp(min=0), lengths)[:, None]
        even = bool((ends % block_n == 0).all())
    kind, tiles = bounds.kind, bounds.lo  # `tiles` is read only when LISTED
    if kind == LISTED:
        lists = visits(mask, q_chunks, k_chunks, block_m, block_n, device, by_keys)
        full, partial, end = lists.ranges.unbind(-1)
        spans, tiles = torch.stack([full, full, partial, end], -1), lists.tiles
    else:
        if by_keys:
            spans, needs_table = _query_spans(mask, q_chunks, owned, block_m)
        else:
            spans, needs_table = _key_spans(mask, q_chunks, k_chunks, block_m, block_n)
        if kind == TABLE and not needs_table and _see_to_themselves(mask, q_chunks):
            kind = CAUSAL
    about = torch.stack([lengths.cumsum(0) - lengths, starts, lengths], 1).expand(*spans.shape[:-1], 3)
    spans = torch.cat([spans, ends.expand(spans.shape[:-1])[..., None], about], -1)
    own_lengths = torch.tensor([chunk.length for chunk in own], device="cpu")
    row = (own_lengths.cumsum(0) - own_lengths)[owned.chunk] + owned.offset
    work = (spans[..., 3] - spans[..., 0]).sum((0, 2))
    order = work.argsort(descending=True, stable=True)
    places = torch.stack([row, own_lengths[owned.chunk] - owned.offset, owned.stop - owned.start, owned.start], 1)
    places, spans = (uploaded(x.to(torch.int32).contiguous(), device) for x in (places[order], spans[:, order]))
    batch_stride = 0 if spans.shape[0] == 1 else spans.stride(0)
    return Programs(bounds, kind, even, len(row), len(others), places, spans, batch_stride, tiles)


def _met_see(mask: Mask, q_chunks: Sequence[Chunk], block_m: int) -> bool:
    """Returns whether every row of a processed tile sees a key; a listed tile without such rows is never processed."""
    seeing = rows_seeing(mask, q_chunks)
    if mask.bitmap() is None:
        return bool(seeing.all())
    tiled = seeing.unflatten(1, (-1, block_m))
    return bool((tiled.all(2) == tiled.any(2)).all())


def _see_to_themselves(mask: Mask, q_chunks: Sequence[Chunk]) -> bool:
    """Returns whether the last key that each row sees is its own; rows before the first key must see nothing."""
    rows = positions(q_chunks, "cpu")
    lo, hi = mask.bounds(rows, LAST_KEY)
    return bool((hi == (rows + 1).clamp(min=0)).all() and (lo <= rows.clamp(min=0)).all())


def _key_spans(
    mask: Mask, q_chunks: Sequence[Chunk], k_chunks: Sequence[Chunk], block_m: int, block_n: int
) -> tuple[Tensor, bool]:
    """Returns spans of the keys that the rows of each tile of queries see: int64 (batch or 1, tiles, nk_chunks, 4).

    The second result is True if some row's interval begins after the first key that its tile streams: the causal rule
    would show that row earlier keys too.
    """
    seen = TileBounds.of(mask, q_chunks, block_m)
    columns, needs_table = [], False
    for chunk in k_chunks:
        some_lo, some_hi, all_lo, all_hi = (
            (x - chunk.start).clamp(0, chunk.length) for x in (seen.some_lo, seen.some_hi, seen.all_lo, seen.all_hi)
        )
        begin = some_lo // block_n * block_n
        end = torch.maximum(some_hi, begin)
        needs_table |= bool(((all_lo > begin) & (begin < end)).any())
        full_begin = (-(-all_lo // block_n) * block_n).clamp(begin, -(-end // block_n) * block_n)
        full_end = torch.maximum(all_hi // block_n * block_n, full_begin)
        columns.append(torch.stack([begin, full_begin, full_end, end], -1))
    return torch.stack(columns, 2), needs_table


def _query_spans(mask: Mask, q_chunks: Sequence[Chunk], keys: Tiles, block_m: int) -> tuple[Tensor, bool]:
    """Returns spans of the queries that see each tile of keys: int64 (batch or 1, tiles, nq_chunks, 4).

    The queries are consecutive because neither bound of a row ever falls. The rows past a chunk's end in its last tile
    count as seeing all keys: their lse makes their probabilities 0.

    The second result is True if the causal rule does not suffice, in two cases. The interval of a processed query may
    begin after the first key of its tile: the causal rule would show that key. Or a tile may have keys past all seen
    keys: their storage may hold anything and must not be read.
    """
    columns, needs_table = [], False
    for chunk in q_chunks:
        lo, hi = torch.broadcast_tensors(*mask.bounds(positions([chunk], "cpu"), LAST_KEY))
        lo, hi = lo.contiguous(), hi.contiguous()
        starts, stops = (x.expand(lo.shape[0], -1).contiguous() for x in (keys.start, keys.stop))
        end = torch.searchsorted(lo, stops)  # lo < stop
        begin = torch.minimum(torch.searchsorted(hi, starts, right=True), end)  # hi > start
        full_begin = torch.searchsorted(hi, stops).clamp(begin, end)  # hi >= stop
        full_end = torch.searchsorted(lo, starts, right=True).clamp(begin, end)  # lo <= start
        after = (full_end < end) | ((end % block_m > 0) & (end < chunk.length)) | (stops > hi[:, -1:])
        needs_table |= bool((after & (begin < end)).any())
        first = begin // block_m * block_m
        begin, end = first, end.where(begin < end, first)  # an empty span stays empty
        full_begin = (-(-full_begin // block_m) * block_m).clamp(begin, -(-end // block_m) * block_m)
        full_end = torch.where(full_end == chunk.length, full_end, full_end // block_m * block_m)
        columns.append(torch.stack([begin, full_begin, torch.maximum(full_end, full_begin), end], -1))
    return torch.stack(columns, 2), needs_table
