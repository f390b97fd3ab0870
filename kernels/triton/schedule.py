"""What the programs of a launch are told: which tile each owns, and which tiles of the other side that one meets.

Everything is worked out on the host and kept, so that a program starts with one round of loads. With `by_keys` programs
own tiles of keys and meet queries, else the other way round.
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
        bounds: what the rows see.
        kind: what tiles that need a mask need of it: `bounds.kind`, or CAUSAL where its table says nothing else in any
            tile that is met, as under documents that begin where tiles do. It may differ from hop to hop.
        even: every tile is whole, and of queries that are met none sees nothing: loads need no bounds.
        ntiles: tiles owned, for each sequence and head. Those with most to do come first, so that none begins late.
        nchunks: chunks of the other side.
        places: int32 (ntiles, 4): an owned tile's first row in storage, the rows from there to its chunk's end, their
            number in the tile, and its global position.
        spans: int32 (batch or 1, ntiles, nchunks, 8). The span first: begin, full_begin, full_end, end, counted from
            the chunk's first row. Some meet some in [begin, end), all meet all in [full_begin, full_end), and all but
            `end` are multiples of the tile. When LISTED the span counts entries of `tiles` instead: [full_begin,
            full_end) need no mask, [full_end, end) do. Then the row of the chunk from which on nobody is met, the
            chunk's first row in storage, its global position and its length.
        batch_stride: elements from one sequence's spans to the next's, 0 when they are all alike.
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
    """The tables for tiles of `block_m` queries and `block_n` keys."""
    bounds = row_bounds(mask, q_chunks, device)
    own, others = (k_chunks, q_chunks) if by_keys else (q_chunks, k_chunks)
    block = block_n if by_keys else block_m
    owned = Tiles.of(own, block)
    lengths, starts = (torch.tensor([(c.length, c.start) for c in others], device="cpu")).unbind(1)
    if by_keys:
        ends = lengths.expand(1, 1, -1)
        even = all(c.length % block_m == 0 for c in q_chunks) and all(c.length % block_n == 0 for c in k_chunks)
        even = even and _met_see(mask, q_chunks, block_m)
    else:  # past the last key that any row sees storage may hold anything
        lo, hi = torch.broadcast_tensors(*mask.bounds(positions(q_chunks, "cpu"), LAST_KEY))
        ends = torch.minimum((hi.where(hi > lo, 0).amax(1)[:, None] - starts).clamp(min=0), lengths)[:, None]
        even = bool((ends % block_n == 0).all())
    kind, tiles = bounds.kind, bounds.lo  # the latter not read
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
    """Whether every row of a tile that may be met sees a key; a listed tile of which none does is never met."""
    seeing = rows_seeing(mask, q_chunks)
    if mask.bitmap() is None:
        return bool(seeing.all())
    tiled = seeing.unflatten(1, (-1, block_m))
    return bool((tiled.all(2) == tiled.any(2)).all())


def _see_to_themselves(mask: Mask, q_chunks: Sequence[Chunk]) -> bool:
    """Whether the keys that each row sees end with its own; rows before the first key see nothing."""
    rows = positions(q_chunks, "cpu")
    lo, hi = mask.bounds(rows, LAST_KEY)
    return bool((hi == (rows + 1).clamp(min=0)).all() and (lo <= rows.clamp(min=0)).all())


def _key_spans(
    mask: Mask, q_chunks: Sequence[Chunk], k_chunks: Sequence[Chunk], block_m: int, block_n: int
) -> tuple[Tensor, bool]:
    """The keys that the rows of each tile of queries see: int64 (batch or 1, tiles, nk_chunks, 4).

    The second result says whether a row begins to see after the first key that its tile meets: the causal rule would
    show it the keys before.
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
    """The queries that see each tile of keys: int64 (batch or 1, tiles, nq_chunks, 4).

    They are consecutive because neither bound of a row ever falls. The rows past a chunk's end in its last tile count
    as seeing all: their lse makes their probabilities 0.

    The second result says whether a tile of keys meets queries that begin to see after its first key, to which the
    causal rule would show it, or has keys after all that are seen, which may hold anything and are not to be read.
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
        begin, end = first, end.where(begin < end, first)  # what met nobody still does not
        full_begin = (-(-full_begin // block_m) * block_m).clamp(begin, -(-end // block_m) * block_m)
        full_end = torch.where(full_end == chunk.length, full_end, full_end // block_m * block_m)
        columns.append(torch.stack([begin, full_begin, torch.maximum(full_end, full_begin), end], -1))
    return torch.stack(columns, 2), needs_table
