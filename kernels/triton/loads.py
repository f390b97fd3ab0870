"""Loads of the tiles that a program streams: by pointers, or by the tensor memory accelerator of sm_90.

The accelerator takes a two-dimensional view of the tensor and the first row and column of a tile. It needs whole tiles,
rows of equal pitch and addresses in multiples of 16 bytes, and costs the program no instructions.
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

import triton
import triton.language as tl
from ringflash.kernels.triton.config import TileConfig
from ringflash.kernels.triton.schedule import Programs
from ringflash.kernels.triton.tiles import (
    Strided,
    capability,
    head_of,
    load_where,
    operand,
    row_pointers,
    strided,
    wide,
)
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import
from triton.tools.tensor_descriptor import TensorDescriptor


class View(NamedTuple):
    """Strides of sequences and heads in the two-dimensional view, in its rows and columns."""

    batch_rows: Any
    head_rows: Any
    head_columns: Any


class Streamed(NamedTuple):
    """A tensor (batch, seqlen, nheads, headdim) from which a kernel streams tiles."""

    x: Strided
    view: View


class Stream(NamedTuple):
    """One chunk of one head of a `Streamed` tensor."""

    base: Any
    stride: Any
    row: Any
    column: Any


def streamed(
    tensors: tuple[Tensor, Tensor], block: int, config: TileConfig, programs: Programs
) -> tuple[bool, list[Streamed], list[TensorDescriptor | None]]:
    """Prepares two tensors, the first with headdim and the second with headdim_v, for streaming.

    Returns:
        True if the accelerator loads both, their kernel arguments, and their descriptors for the accelerator or None.
    """
    widths = (config.block_d, config.block_dv)
    views = [_view(x) for x in tensors]
    accelerated = (
        programs.even
        and not config.by_pointers
        and capability() >= 90
        and not knobs.runtime.interpret
        and all(x.shape[3] == width and x.itemsize == 2 for x, width in zip(tensors, widths, strict=True))
        and None not in views
    )
    if not accelerated:
        return False, [Streamed(operand(x), View(0, 0, 0)) for x in tensors], [None, None]
    arguments, descriptors = [], []
    for x, width, view in zip(tensors, widths, views, strict=True):
        assert view is not None
        batch, seqlen, nheads, headdim = x.shape
        rows = (batch - 1) * view.batch_rows + (nheads - 1) * view.head_rows + seqlen
        shape = [rows, (nheads - 1) * view.head_columns + headdim]
        arguments.append(Streamed(strided(x), view))
        descriptors.append(TensorDescriptor(x, shape, [x.stride(1), 1], [block, width]))
    return True, arguments, descriptors


def _view(x: Tensor) -> View | None:
    batch, _, nheads, _ = x.shape
    of_batch, of_row, of_head, of_dim = x.stride()
    if of_dim != 1 or of_row == 0 or of_row * x.itemsize % 16 or x.data_ptr() % 16:
        return None
    if batch == 1:
        of_batch = 0
    if nheads == 1:
        of_head = 0
    if of_batch % of_row or (of_head % of_row and of_head * x.itemsize % 16):
        return None
    if of_head % of_row == 0:
        return View(of_batch // of_row, of_head // of_row, 0)
    return View(of_batch // of_row, 0, of_head)


@triton.jit
def stream_at(streamed, batch, head, row):
    """Returns the chunk of a head that begins at `row` of storage."""
    base = head_of(streamed.x, batch, head) + wide(row) * streamed.x.row
    view = streamed.view
    first = (batch * view.batch_rows + head * view.head_rows).to(tl.int32) + row
    return Stream(base, streamed.x.row, first, (head * view.head_columns).to(tl.int32))


@triton.jit
def load_tile(
    stream,
    descriptor,
    n,
    inside,
    HEADDIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    kind,
):
    """Loads the tile that begins at row `n` of the chunk; rows that are not `inside` are zeros."""
    if kind.ACCELERATED:
        x = descriptor.load([stream.row + n, stream.column])
    else:
        x = load_where(row_pointers(stream.base, n, stream.stride, BLOCK, BLOCK_D), inside, HEADDIM, BLOCK_D, kind.EVEN)
    return x
