"""Tables in device memory that kernels read: uploaded once, and kept as long as a launch may read them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ringflash.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")


def device_tables(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Like `functools.lru_cache`, but keeps the entries that a CUDA graph's capture looks up, for its replays."""

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        recent = lru_cache(maxsize)(make)
        captured = lru_cache(maxsize=None)(recent)

        @wraps(make)
        def look_up(*args: P.args, **kwargs: P.kwargs) -> T:
            return captured(*args, **kwargs) if _capturing() else recent(*args, **kwargs)  # pyright: ignore

        return look_up

    return decorate


def uploaded(table: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to `device`; on return every stream may read the copy.

    The upload runs on a stream of its own, and so waits for no other work on the GPU.

    Raises:
        ArgumentError: while a CUDA graph is captured, because its replays would read the CPU tensor again.
    """
    if device.type != "cuda":
        return table.to(device)
    if _capturing():
        expected = "a mask and shape whose tables are on the GPU before the capture of a CUDA graph"
        raise ArgumentError("mask", expected=expected, got="new ones", remedy="Make the same call before the capture.")
    aside = _stream(device)
    with torch.cuda.stream(aside):
        there = table.pin_memory().to(device, non_blocking=True)
    aside.synchronize()  # other streams than the current one will read it
    weakref.finalize(there, _retire, there.detach()).atexit = False
    return there


def _retire(table: Tensor) -> None:
    """Keeps the memory of a table that left the cache until the kernels that read it have finished."""
    retired = _retired(table.device)
    retired.append(_Retired(table))
    if _capturing():  # the event would become part of the graph
        return
    for last in retired:
        if last.read is None:
            last.read = torch.cuda.Event()
            last.read.record(torch.cuda.current_stream(table.device))
    while retired and retired[0].read is not None and retired[0].read.query():
        retired.popleft()


@dataclass
class _Retired:
    table: Tensor
    read: torch.cuda.Event | None = None  # recorded at retirement; None while a capture prevents that


@cache
def _retired(device: torch.device) -> deque[_Retired]:
    return deque()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
