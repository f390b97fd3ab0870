"""Which tensors the tensor memory accelerator takes as they lie in memory."""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = 16  # bytes, of the accelerator's addresses and strides


def is_viewable(x: Tensor) -> bool:
    """Whether `tile_view` takes (batch, seqlen, nheads, headdim) as it lies in memory."""
    itemsize = x.itemsize
    for stride, size in zip(x.stride(), x.shape[:3], strict=False):
        if size > 1 and (stride <= 0 or stride * itemsize % ALIGNMENT):
            return False
    return x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0 and x.numel() > 0
