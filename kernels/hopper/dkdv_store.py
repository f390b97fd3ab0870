"""Store of dK and dV of a tile of keys: from registers to shared memory, and from there to global memory by TMA.

If the query heads of a KV head are cut in parts, each part stores a float32 dK and dV. Another kernel adds them up.

After a matmul, a thread holds two adjacent numbers of a row at a time, which are slow to write to global memory
directly. When a tile of keys ends, the free buffers of dS have room for two parts of each consumer warpgroup. With
`BY_GRADIENT` the buffers of dq are used instead. A part is 128 bytes of each of the 64 rows.

Shapes: dk, dv (batch, seqlen_k, nheads_kv, headdim), as TMA descriptors with tiles of (64, 128 bytes).
"""

# Gluon's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalMemberAccess=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ringflash.kernels.hopper.columns import scale_all, total_width, width_of
from ringflash.kernels.hopper.pipeline import slot_of
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED
from ringflash.kernels.versions import copy_from_shared, reduce_add, reinterpret
from ringflash.state import contiguous

PART_BYTES = 128  # bytes of a row in a part
SUM_ROWS = 64  # rows of a program that adds up dk and dv of parts of the query heads


class Gradients(NamedTuple):
    """TMA descriptors of dk and dv, rows of a sequence, and the scales of the scores: for base 2, and softmax_scale.

    `lost` is negative if any lse or delta is not finite.
    """

    dk: Any
    dv: Any
    seqlen: Any
    scale: Any
    softmax_scale: Any
    lost: Any


@gluon.jit
def parts_of_ds(ds, gradient, STAGES: gl.constexpr, BLOCK_M: gl.constexpr):
    """Returns the memory of the dS ring, in which each stage has two halves of 64 keys, as parts of a gradient."""
    ROWS: gl.constexpr = gradient.block_shape[1]
    NEEDED: gl.constexpr = 3 if BLOCK_M == 2 * ROWS else 4
    gl.static_assert(NEEDED <= STAGES, "too few buffers for two free parts")
    SHAPE: gl.constexpr = [2 * STAGES * BLOCK_M // ROWS] + gradient.block_shape  # noqa: RUF005 - Gluon unpacks no lists
    return reinterpret(ds, gradient.dtype, SHAPE, gradient.layout)


@gluon.jit
def parts_of_pieces(pieces, gradient):
    """Returns the buffers of pieces of dq, one for each consumer, as two parts each of a gradient."""
    SHAPE: gl.constexpr = [4] + gradient.block_shape  # noqa: RUF005 - Gluon unpacks no lists
    return reinterpret(pieces, gradient.dtype, SHAPE, gradient.layout)


@gluon.jit
def _free_part(C: gl.constexpr, WHICH: gl.constexpr, parts, use, STAGES: gl.constexpr, BLOCK_M: gl.constexpr):
    """Returns free part `WHICH` (0 or 1) of warpgroup `C`. Both warpgroups must have written the dS before `use`.

    Both parts lie in `C`'s half of the stage of `use`. If a half is only as large as a part, part 1 lies in `C`'s half
    of the next stage.
    """
    ROWS: gl.constexpr = parts.shape[2]
    two = (slot_of(use, STAGES) * 2 + C) * 2 + WHICH
    one = slot_of(use + WHICH, STAGES) * 2 + C
    return parts.index(two if BLOCK_M == 2 * ROWS else one)


@gluon.jit
def _columns(x, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns `COLUMNS` columns of the tensor `x` from `FIRST` on, or `x` if it has no more."""
    if x.shape[1] > COLUMNS:
        ROWS: gl.constexpr = x.shape[0]
        HALF: gl.constexpr = x.shape[1] // 2
        low, high = gl.split(x.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
        x = _columns(low if FIRST < HALF else high, FIRST % HALF, COLUMNS)
    return x


@gluon.jit
def _put(buffer, dk, dv, PART: gl.constexpr, PARTS: gl.constexpr, WIDTHS: gl.constexpr):
    """Writes part `PART` to shared memory: parts below `PARTS` belong to dv, the others to dk.

    The last part may be wider than what is left of the gradient. Its other columns are not written, and TMA does not
    store them, because they lie past headdim.
    """
    ROWS: gl.constexpr = buffer.shape[1]
    COLUMNS: gl.constexpr = buffer.shape[3]
    FIRST: gl.constexpr = PART % PARTS * COLUMNS
    WIDTH: gl.constexpr = width_of(WIDTHS, 0)
    gradient = dv if PART < PARTS else dk
    x = _columns(gradient[FIRST // WIDTH], FIRST % WIDTH, COLUMNS)
    buffer = buffer.reshape([ROWS, COLUMNS])
    if x.shape[1] < COLUMNS:
        buffer = buffer.slice(0, x.shape[1], 1)
    buffer.store(x.to(buffer.dtype))


@gluon.jit
def _send(buffer, gradients, place, row, PART: gl.constexpr, PARTS: gl.constexpr, ACCUMULATE: gl.constexpr):
    """Starts the TMA store of part `PART`, or with `ACCUMULATE` its addition, to the rows from `row` on."""
    target = gradients.dv if PART < PARTS else gradients.dk
    at = [place.batch, row, place.head, PART % PARTS * target.block_shape[3]]
    if ACCUMULATE:
        reduce_add(target, at, buffer)
    else:
        copy_from_shared(target, at, buffer)


@gluon.jit
def pass_gradients(C: gl.constexpr, dk, dv, place, use, gradients, parts, kind):
    """Stores warpgroup `C`'s 64 rows of dk * softmax_scale and dv, or with `BY_GRADIENT` of one of them.

    Two parts are stored at a time.

    `use` is the next use of the dS ring, not yet written. The last two stores may still read their buffers on return.
    The warpgroup therefore calls `tma.store_wait` before it writes that dS, or with `BY_GRADIENT` the next dq, and
    before it ends.
    """
    PARTS: gl.constexpr = -(-total_width(kind.WIDTHS) // gradients.dk.block_shape[3])
    dk = scale_all(dk, gradients.softmax_scale, kind.WIDTHS)
    if kind.BY_GRADIENT:
        row = place.tile * kind.ROWS
        first, second = parts.index(2 * C), parts.index(2 * C + 1)
    else:
        row = (place.tile * 2 + C) * kind.ROWS
        first = _free_part(C, 0, parts, use, kind.DS_STAGES, kind.BLOCK_M)
        second = _free_part(C, 1, parts, use, kind.DS_STAGES, kind.BLOCK_M)
    BEGIN: gl.constexpr = C * PARTS if kind.BY_GRADIENT else 0
    COUNT: gl.constexpr = PARTS if kind.BY_GRADIENT else 2 * PARTS
    for i in gl.static_range(BEGIN, BEGIN + COUNT, 2):
        if i > BEGIN:
            tma.store_wait(0)
        _put(first, dk, dv, i, PARTS, kind.WIDTHS)
        _put(second, dk, dv, i + 1, PARTS, kind.WIDTHS)
        fence_async_shared()
        _send(first, gradients, place, row, i, PARTS, kind.ACCUMULATE)
        _send(second, gradients, place, row, i + 1, PARTS, kind.ACCUMULATE)


@triton.jit
def _add_rows(parts, total, row, inside, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
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
    of_dk,
    of_dv,
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
    _add_rows(of_dk, dk, row, row < rows, HEADDIM, BLOCK_D, PARTS)
    _add_rows(of_dv, dv, row, row < rows, HEADDIM, BLOCK_D, PARTS)


_sums = Launches()


def new_head_parts(dk: Tensor, dv: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Allocates dk and dv (batch, seqlen_k, nheads_kv * parts, headdim) of the parts, in float32.

    Each part of the query heads (`config.head_parts`) has a dk and a dv of its own, and the parts of a KV head are
    adjacent. With one part the results are `dk` and `dv` themselves.
    """
    if parts == 1:
        return dk, dv
    batch, seqlen, nheads_kv, headdim = dk.shape
    shape = batch, seqlen, nheads_kv * parts, headdim
    of_dk, of_dv = (x.new_empty_strided(*contiguous(shape), dtype=torch.float32) for x in (dk, dv))
    return of_dk, of_dv


def add_head_parts(of_dk: Tensor, of_dv: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Writes the sums of two or four parts from `new_head_parts` to `dk` and `dv`, which are contiguous.

    The order of the addition is fixed, so that results repeat bit for bit.
    """
    parts, headdim = of_dk.shape[2] // dk.shape[2], dk.shape[3]
    tensors = of_dk, of_dv, dk, dv
    key = parts, *layout(*tensors)
    if not _sums.repeat(key, tensors):
        rows = dk.numel() // headdim
        arguments = (*tensors, rows, headdim, triton.next_power_of_2(headdim), parts, SUM_ROWS)
        _sums.first(key, _sum_kernel, (triton.cdiv(rows, SUM_ROWS),), arguments, FUSED, tensors)
