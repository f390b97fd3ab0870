"""Tensors as the tensor memory accelerator takes them: four dimensions, of which a tile is some rows of one head.

What lies past the end of a sequence is read as zeros and not written, whatever follows it in memory, and so is what
lies past headdim in a tile that is wider.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class _View(TensorDescriptor):
    """What `is_viewable` has looked at: Triton's own checks take longer than the rest of a launch has to do."""

    def __post_init__(self) -> None:
        """Checks nothing."""


def tile_view(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`x` (batch, seqlen, nheads, headdim) in tiles of (rows, columns)."""
    shape, (of_batch, of_row, of_head, _) = [*x.shape], x.stride()
    batch, seqlen, nheads, headdim = shape
    anything = headdim * 16  # a dimension of one has a stride that nobody follows, but that is checked
    strides = [
        of_batch if batch > 1 else anything,
        of_row if seqlen > 1 else anything,
        of_head if nheads > 1 else anything,
        1,
    ]
    return _View(x, shape, strides, [1, rows, 1, columns], layout(rows, columns, x.dtype))


def vector_view(x: Tensor, rows: int) -> TensorDescriptor:
    """A contiguous tensor of a number a row, as one vector, in tiles of `rows`."""
    return _View(x, [x.numel()], [1], [rows], vector_layout(x.itemsize * 8))


def rows_view(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous tensor as a matrix with so many columns, in tiles of so many rows, that lie as in memory."""
    shape = [x.numel() // columns, columns]
    return _View(x, shape, [columns, 1], [rows, columns], rows_layout(x.itemsize * 8))


class _Layout(gl.NVMMASharedLayout):
    """A layout that is put into words once: Triton asks for them at every launch, to know the kernel."""

    def __init__(self, layout: gl.NVMMASharedLayout) -> None:
        vars(self).update(vars(layout), words=repr(layout))

    def __repr__(self) -> str:
        return vars(self)["words"]


@cache
def vector_layout(bits: int) -> gl.NVMMASharedLayout:
    """How a vector of numbers of so many bits lies in shared memory."""
    return _Layout(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=1))


@cache
def rows_layout(bits: int) -> gl.NVMMASharedLayout:
    """How rows of numbers of so many bits lie in shared memory: one after the other."""
    return _Layout(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=2))


@cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory: swizzled for the tensor cores."""
    default = gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], _TYPES[dtype])
    return _Layout(default)  # pyright: ignore[reportArgumentType]
