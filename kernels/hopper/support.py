"""Requirements of the Hopper kernels: the version of Triton, and a tensor's strides and address.

The versions were checked with 3.6.0, 3.7.1, 3.8.0 and 3.9.0; see `versions.py`.

This file imports no Gluon, so that it also loads under other versions of Triton.
"""

from __future__ import annotations

from torch import Tensor

SUPPORTED = ((3, 6), (3, 7), (3, 8), (3, 9))  # Gluon is experimental: each release is tried before it is added
ALIGNMENT = 16  # bytes; addresses and strides for the tensor memory accelerator (TMA) are multiples of this


def release_of(version: str) -> tuple[int, int]:
    """Returns the major and minor number of a version such as "3.9.0" or "3.8.0+git1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def refusal(version: str) -> str | None:
    """Returns why the kernels do not run under this version of Triton, or None if they run."""
    if release_of(version) in SUPPORTED:
        return None
    names = [f"{major}.{minor}" for major, minor in SUPPORTED]
    return f"they run under triton {', '.join(names[:-1])} and {names[-1]}, not {version}"


def is_viewable(x: Tensor) -> bool:
    """Returns whether `tile_view` accepts `x` (batch, seqlen, nheads, headdim) as it lies in memory."""
    itemsize = x.itemsize
    for stride, size in zip(x.stride(), x.shape[:3], strict=False):
        if size > 1 and (stride <= 0 or stride * itemsize % ALIGNMENT):
            return False
    return x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0 and x.numel() > 0
