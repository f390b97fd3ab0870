"""TMA descriptors of tensors, with four dimensions (batch, seqlen, nheads, headdim) and tiles of rows of one head.

TMA reads zeros past the end of a sequence and writes nothing there, whatever follows it in memory. The same holds past
headdim if a tile is wider.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class _View(TensorDescriptor):
    """A descriptor of a tensor that passed `is_viewable`; Triton's own checks take longer than the rest of a launch."""

    def __post_init__(self) -> None:
        """Checks nothing."""


def tile_view(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a descriptor of `x` (batch, seqlen, nheads, headdim) with tiles of (rows, columns)."""
    shape, (of_batch, of_row, of_head, _) = [*x.shape], x.stride()
    batch, seqlen, nheads, headdim = shape
    anything = headdim * 16  # the stride of a dimension of size 1 is never used, but Triton checks it
    strides = [
        of_batch if batch > 1 else anything,
        of_row if seqlen > 1 else anything,
        of_head if nheads > 1 else anything,
        1,
    ]
    return _View(x, shape, strides, [1, rows, 1, columns], layout(rows, columns, x.dtype))


def vector_view(x: Tensor, rows: int) -> TensorDescriptor:
    """Returns a descriptor of a contiguous tensor as one vector, with tiles of `rows` numbers."""
    return _View(x, [x.numel()], [1], [rows], vector_layout(x.itemsize * 8))


def rows_view(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a descriptor of a contiguous tensor as a matrix of `columns` columns, with unswizzled tiles of `rows`."""
    shape = [x.numel() // columns, columns]
    return _View(x, shape, [columns, 1], [rows, columns], rows_layout(x.itemsize * 8))


class _Layout(gl.NVMMASharedLayout):
    """A shared-memory layout with a cached repr, which Triton asks for at every launch to look up the kernel."""

    def __init__(self, layout: gl.NVMMASharedLayout) -> None:
        vars(self).update(vars(layout), words=repr(layout))

    def __repr__(self) -> str:
        return vars(self)["words"]


@cache
def vector_layout(bits: int) -> gl.NVMMASharedLayout:
    """Returns the shared-memory layout of a vector of numbers of `bits` bits."""
    return _Layout(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=1))


@cache
def rows_layout(bits: int) -> gl.NVMMASharedLayout:
    """Returns the unswizzled shared-memory layout of a matrix of numbers of `bits` bits, row after row."""
    return _Layout(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=2))


@cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Returns the shared-memory layout of a tile, swizzled for the tensor cores."""
    default = gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], _TYPES[dtype])
    return _Layout(default)  # pyright: ignore[reportArgumentType]
