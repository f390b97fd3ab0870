"""Device side of `Programs`: a program's tile, the tiles that it processes, and the mask inside them."""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import triton
import triton.language as tl
from ringflash.kernels.contract import TileProblem
from ringflash.kernels.triton.config import TileConfig
from ringflash.kernels.triton.schedule import Programs, make_programs
from ringflash.kernels.triton.tiles import CAUSAL, LISTED, TABLE


class Schedule(NamedTuple):
    """`Programs` as kernel arguments."""

    places: Any
    spans: Any
    spans_batch: Any
    tiles: Any


class Visible(NamedTuple):
    """`RowBounds` as kernel arguments."""

    lo: Any
    hi: Any
    batch: Any
    hull: Any
    hull_batch: Any
    bit_rows: Any
    words: Any
    nwords: Any
    cell_size: Any


class Span(NamedTuple):
    """One entry of `Programs.spans`: the steps of a loop over tiles of one chunk, then four numbers of the chunk.

    Steps [full_begin, full_end) need no mask, the others in [begin, end) do. No row of the chunk from `visible_end` on
    is used. `row` is the chunk's first row in storage, `start` its first global position and `length` its rows.
    """

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    visible_end: Any
    row: Any
    start: Any
    length: Any


def launch_tables(
    problem: TileProblem, config: TileConfig, device: torch.device, *, by_keys: bool
) -> tuple[Programs, Schedule, Visible]:
    """Returns the tables of a launch; its programs own tiles of keys when `by_keys`, else tiles of queries."""
    programs = make_programs(
        problem.mask, problem.q_chunks, problem.k_chunks, config.block_m, config.block_n, device, by_keys
    )
    bounds = programs.bounds
    return (
        programs,
        Schedule(programs.places, programs.spans, programs.batch_stride, programs.tiles),
        Visible(
            bounds.lo,
            bounds.hi,
            bounds.batch_stride,
            bounds.hull,
            2 if bounds.batch_stride else 0,
            bounds.bit_rows,
            bounds.words,
            bounds.words.shape[-1],
            bounds.size,
        ),
    )


@triton.jit
def load_tile_info(schedule, tile):
    """Loads an owned tile's first row in storage, the rows from there to its chunk's end, and its global position."""
    entry = schedule.places + tile * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 3)


@triton.jit
def span_of(schedule, batch, tile, chunk, nchunks):
    """Loads the span of an owned tile in one chunk of the other side."""
    entry = schedule.spans + batch * schedule.spans_batch + (tile * nchunks + chunk) * 8
    return Span(
        tl.load(entry),
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
        tl.load(entry + 5),
        tl.load(entry + 6),
        tl.load(entry + 7),
    )


@triton.jit
def tile_at(i, span, schedule, MASK: tl.constexpr):
    """Returns the tile at step `i` of a span's loop: its first row in its chunk, and whether it needs a mask."""
    n = tl.load(schedule.tiles + i) if MASK == LISTED else i
    return n, (i < span.full_begin) | (i >= span.full_end)


@triton.jit
def bounds_of(visible, batch, row, rows, inside, MASK: tl.constexpr):
    """Loads (lo, hi, bit row) of each row of a tile; without a table these are numbers that nothing reads."""
    lo = rows
    hi = rows
    bit_row = rows
    if MASK >= TABLE:
        number = batch * visible.batch + row + rows
        lo = tl.load(visible.lo + number, mask=inside, other=0)
        hi = tl.load(visible.hi + number, mask=inside, other=0)
    if MASK == LISTED:
        bit_row = tl.load(visible.bit_rows + row + rows, mask=inside, other=0)
    return lo, hi, bit_row


@triton.jit
def keys_read(visible, batch, keys, inside, MASK: tl.constexpr):
    """Returns which keys of a tile may be read: keys `inside` that, with a table, lie in the hull of all seen keys."""
    if MASK >= TABLE:
        entry = visible.hull + batch * visible.hull_batch
        inside &= (keys >= tl.load(entry)) & (keys < tl.load(entry + 1))
    return inside


@triton.jit
def apply_mask(
    x,
    value,
    read,
    queries,
    keys,
    first_key,
    lo,
    hi,
    bit_row,
    visible,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
):
    """Returns a tile `x`, with `value` where the query does not see the key or the key may not be `read`.

    Queries and BLOCK_N keys are global positions; the position of the first key is `first_key` >= 0. Queries, keys,
    `read`, lo, hi and bit_row broadcast to the tile's shape.

    Each row loads all words that BLOCK_N keys may touch, and picks the bits out in registers. A load of one element for
    each score would have a layout of its own. The scores would then pass through shared memory in each step to match
    that layout, masked or not.
    """
    if MASK == CAUSAL:
        read &= keys <= queries
    elif MASK >= TABLE:
        read &= (keys >= lo) & (keys < hi)
    x = tl.where(read, x, value)
    if MASK == LISTED:
        cell = keys // visible.cell_size
        first_word = first_key // visible.cell_size // 32
        for i in tl.static_range((BLOCK_N + 30) // 32 + 1):
            at = first_word + i
            word = tl.load(visible.words + bit_row * visible.nwords + at, mask=at < visible.nwords, other=0)
            x = tl.where((cell // 32 != at) | ((word >> (cell % 32)) & 1 != 0), x, value)
    return x
