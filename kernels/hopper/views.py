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


def tile_view(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`x` (batch, seqlen, nheads, headdim) in tiles of (rows, columns)."""
    # a dimension of one has a stride that nobody follows, but that is checked
    strides = [stride if size > 1 else x.shape[3] * 16 for stride, size in zip(x.stride()[:3], x.shape, strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, 1, columns], layout(rows, columns, x.dtype))


def vector_view(x: Tensor, rows: int) -> TensorDescriptor:
    """A contiguous tensor of a number a row, as one vector, in tiles of `rows`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=x.itemsize * 8, rank=1)
    return TensorDescriptor(x, [x.numel()], [1], [rows], layout)


@cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory: swizzled for the tensor cores."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], _TYPES[dtype])  # pyright: ignore[reportReturnType]
