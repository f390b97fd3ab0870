"""Copies between the host and a GPU that the host does not wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pinned(x: Any, device: torch.device) -> Any:
    """Returns `x` in pinned memory if it is a tensor of the host and `device` is a GPU, else `x` itself.

    torch copies from other memory of the host only after the GPU has done all work before the copy. torch reuses pinned
    memory, and does not write to it before the copy has ended.
    """
    if device.type == "cuda" and isinstance(x, Tensor) and x.device.type == "cpu" and not x.is_pinned():
        return x.pin_memory()
    return x


class HostCopy:
    """Copy of a GPU's tensor in pinned memory, which ends while the host goes on.

    Args:
        x: tensor to copy; its later changes do not reach the copy.
    """

    def __init__(self, x: Tensor) -> None:
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self._host.copy_(x, non_blocking=True)
        self._ended = None
        if x.is_cuda:
            self._ended = torch.cuda.Event()
            self._ended.record(torch.cuda.current_stream(x.device))

    def read(self) -> list[Any]:
        """Returns the values as nested lists. The host waits until the copy has ended, but not for later work."""
        if self._ended is not None:
            self._ended.synchronize()
        return self._host.tolist()
