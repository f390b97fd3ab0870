"""Requirements of the tensor memory accelerator (TMA) on the strides and the address of a tensor."""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = 16  # bytes; TMA addresses and strides are multiples of this


def is_viewable(x: Tensor) -> bool:
    """Returns whether `tile_view` accepts `x` (batch, seqlen, nheads, headdim) as it lies in memory."""
    itemsize = x.itemsize
    for stride, size in zip(x.stride(), x.shape[:3], strict=False):
        if size > 1 and (stride <= 0 or stride * itemsize % ALIGNMENT):
            return False
    return x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0 and x.numel() > 0
