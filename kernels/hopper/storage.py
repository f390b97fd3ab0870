"""Which tensors the tensor memory accelerator takes as they lie in memory."""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = 16  # bytes, of the accelerator's addresses and strides


def is_viewable(x: Tensor) -> bool:
    """Whether `tile_view` takes (batch, seqlen, nheads, headdim) as it lies in memory."""
    steps = [stride * x.itemsize for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1]
    aligned = all(step > 0 and step % ALIGNMENT == 0 for step in steps) and x.data_ptr() % ALIGNMENT == 0
    return aligned and x.stride(3) == 1 and x.numel() > 0
