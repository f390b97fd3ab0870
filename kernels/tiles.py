"""What the portable kernels share: the tile of a program, its place in the sequence, and loads of rows.

A chunk table is int32 (nchunks, 2): the global position of the chunk's first row, and its length. Chunks lie one after
another in storage. A tile never crosses a chunk's border, so its rows are consecutive positions.
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash.layout import Chunk

# Arguments that take any value from call to call: a kernel is not compiled anew for their multiples of 16.
SIZES = ["nq_chunks", "nk_chunks", "ntiles", "seqlen_q", "nheads", "nheads_kv", "group"]


@lru_cache(maxsize=1024)
def chunk_table(chunks: Sequence[Chunk], device: torch.device) -> Tensor:
    """The chunk table of `chunks` on `device`."""
    return torch.tensor([(chunk.start, chunk.length) for chunk in chunks], dtype=torch.int32, device="cpu").to(device)


def count_tiles(chunks: Sequence[Chunk], block: int) -> int:
    """Tiles of `block` rows that cover `chunks`."""
    return sum(-(-chunk.length // block) for chunk in chunks)


def with_unit_stride(x: Tensor) -> Tensor:
    """`x`, copied only if its last dimension is not consecutive in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def wide(x):
    """An integer, Python's or the GPU's, in int64: row * stride passes 2^31 in long sequences."""
    return tl.full([], 0, tl.int64) + x


@triton.jit
def find_tile(chunks, nchunks, tile, BLOCK: tl.constexpr):
    """Where tile number `tile` lies: (row of storage, rows left in its chunk, global position) of its first row."""
    row = 0
    left = 0
    position = 0
    chunk_row = 0
    for c in range(nchunks):
        start = tl.load(chunks + 2 * c)
        length = tl.load(chunks + 2 * c + 1)
        tiles = tl.cdiv(length, BLOCK)
        here = (tile >= 0) & (tile < tiles)
        row = tl.where(here, chunk_row + tile * BLOCK, row)
        left = tl.where(here, length - tile * BLOCK, left)
        position = tl.where(here, start + tile * BLOCK, position)
        tile -= tiles
        chunk_row += length
    return row, left, position


@triton.jit
def keys_seen(lo, hi, rows, inside, position, last_row, k_start, length, MASK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which keys of a chunk the rows of a tile see: (begin, full_begin, full_end, end), counted in the chunk.

    Some row sees each key of [begin, end), every row those of [full_begin, full_end); all but `end` are multiples of
    BLOCK_N.
    """
    begin = 0
    full_begin = 0
    full_end = length
    end = length
    if MASK == 1:
        full_end = tl.minimum(tl.maximum(position + 1 - k_start, 0), length)
        end = tl.minimum(tl.maximum(last_row + 1 - k_start, 0), length)
    if MASK == 2:
        some = inside & (hi > lo)
        least = tl.min(tl.where(some, lo, 2147483647), 0)
        most = tl.max(tl.where(some, hi, 0), 0)
        begin = tl.minimum(tl.maximum(least - k_start, 0), length) // BLOCK_N * BLOCK_N
        end = tl.maximum(tl.minimum(tl.maximum(most - k_start, 0), length), begin)
        full_begin = tl.maximum(tl.max(tl.where(inside, lo, 0), 0) - k_start, 0)
        full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_N) * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        full_begin = tl.maximum(full_begin, begin)
        full_end = tl.minimum(tl.maximum(tl.min(tl.where(inside, hi, 2147483647), 0) - k_start, 0), length)
    full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def tanh(x):
    """tanh to a few ulp from exp2 alone: a series near 0, where 1 - e would cancel."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def sees(columns, position, k_start, end, lo, hi, MASK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which of the keys at `columns` of a chunk each row of a tile sees: (BLOCK_M, columns)."""
    visible = (columns < end)[None, :]
    keys = (k_start + columns)[None, :]
    if MASK == 1:
        visible &= keys <= (position + tl.arange(0, BLOCK_M))[:, None]
    if MASK == 2:
        visible &= (keys >= lo[:, None]) & (keys < hi[:, None])
    return visible


@triton.jit
def masked_tile(i, begin, full_begin, full_end, BLOCK: tl.constexpr):
    """Where the i-th tile that needs its mask begins: those before the full ones, then those after."""
    before = (full_begin - begin) // BLOCK
    return tl.where(i < before, begin + i * BLOCK, full_end + (i - before) * BLOCK)


@triton.jit
def masked_tiles(begin, full_begin, full_end, end, BLOCK: tl.constexpr):
    """How many tiles need their mask."""
    return (full_begin - begin) // BLOCK + tl.cdiv(tl.maximum(end - full_end, 0), BLOCK)


@triton.jit
def row_pointers(base, row, stride_row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to (BLOCK, BLOCK_D) elements from `row` on; only the tile's own offsets fit int32."""
    rows = tl.arange(0, BLOCK)[:, None] * stride_row
    return base + wide(row) * stride_row + rows + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(pointers, left, HEADDIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BOUND: tl.constexpr):
    """A (BLOCK, BLOCK_D) tile; zeros past `left` rows when BOUND, and past HEADDIM."""
    rows = tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    if BOUND:
        if HEADDIM == BLOCK_D:
            x = tl.load(pointers, mask=rows < left, other=0.0)
        else:
            x = tl.load(pointers, mask=(rows < left) & (dims < HEADDIM), other=0.0)
    elif HEADDIM == BLOCK_D:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=dims < HEADDIM, other=0.0)
    return x


@triton.jit
def store_rows(pointers, x, left, HEADDIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes a (BLOCK, BLOCK_D) tile, rounded to the target's dtype, without the rows past `left`."""
    rows = tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=(rows < left) & (dims < HEADDIM))
