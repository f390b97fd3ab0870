"""Backward of few KV heads: the query heads that share a KV head are cut in parts, whose dk and dv are added up.

A program of the backward owns a tile of keys of one KV head, and streams the queries of all heads that share it.
Under a causal mask the first tile of keys takes about twice the average time. If the GPU has as many programs as there
are tiles, the kernel takes as long as that tile. A program then takes only a part of the query heads, so that there are
more and shorter tiles. Each part has a dk and a dv of its own, in float32. They are added in a fixed order, so that
results repeat bit for bit.
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED
from ringflash.state import contiguous

MOST_PARTS = 4
# The longest tile's time over the average time of a program, up to which another cut would cost more than it saves.
BALANCED = 1.25
MOST_TILES = 2  # tiles for each program: with more of them the parts of dk and dv would take much memory
ROWS = 64  # rows of a program that adds parts


@triton.jit
def _add(parts, total, row, inside, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
    """Adds the parts of some rows, which are adjacent in memory."""
    columns = tl.arange(0, BLOCK_D)
    inside = inside[:, None] & (columns < HEADDIM)[None, :]
    x = tl.zeros([row.shape[0], BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        pointers = parts + (row * PARTS + part)[:, None] * HEADDIM + columns[None, :]
        x += tl.load(pointers, mask=inside, other=0.0)
    tl.store(total + row[:, None] * HEADDIM + columns[None, :], x.to(total.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    dk_parts,
    dv_parts,
    dk,
    dv,
    rows,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the parts of BLOCK rows of dk and dv; a row is one key of one KV head."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _add(dk_parts, dk, row, row < rows, HEADDIM, BLOCK_D, PARTS)
    _add(dv_parts, dv, row, row < rows, HEADDIM, BLOCK_D, PARTS)


_sums = Launches()


def head_parts(group: int, ntiles: int, skew: float, programs: int) -> int:
    """Returns in how many parts the query heads of a group are cut.

    Args:
        group: query heads that share a KV head.
        ntiles: tiles of keys of all KV heads and sequences.
        skew: the largest number of tiles of queries that a tile of keys processes, over the average.
        programs: programs that the GPU runs at a time.
    """
    longest, parts = skew * programs / max(ntiles, 1), 1
    if ntiles > MOST_TILES * programs:
        return parts
    while longest > BALANCED * parts and parts < MOST_PARTS and group % (2 * parts) == 0:
        parts *= 2
    return parts


def new_parts(dk: Tensor, dv: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Allocates dk and dv (batch, seqlen_k, nheads_kv * parts, headdim) of the parts, in float32.

    The parts of a KV head are adjacent. With one part the results are `dk` and `dv` themselves.
    """
    if parts == 1:
        return dk, dv
    batch, seqlen, nheads_kv, headdim = dk.shape
    shape = batch, seqlen, nheads_kv * parts, headdim
    of_dk, of_dv = (x.new_empty_strided(*contiguous(shape), dtype=torch.float32) for x in (dk, dv))
    return of_dk, of_dv


def add_parts(of_dk: Tensor, of_dv: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes the sums of two or four parts from `new_parts` to `dk` and `dv`, which are contiguous."""
    parts, headdim = of_dk.shape[2] // dk.shape[2], dk.shape[3]
    tensors = of_dk, of_dv, dk, dv
    key = parts, *layout(*tensors)
    if not _sums.repeat(key, tensors):
        rows = dk.numel() // headdim
        arguments = (*tensors, rows, headdim, triton.next_power_of_2(headdim), parts, ROWS)
        _sums.first(key, _sum_kernel, (triton.cdiv(rows, ROWS),), arguments, FUSED, tensors)
