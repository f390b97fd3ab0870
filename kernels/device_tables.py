"""Tables in device memory that kernels read: uploaded once, and kept as long as a launch may read them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.state import contiguous

ALIGNMENT = 256  # bytes, as of an allocation: kernels load whole vectors from the beginning of a table
CHUNK = 2**20  # bytes of device memory that are allocated at once for tables

P = ParamSpec("P")
T = TypeVar("T")


def device_tables(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Like `functools.lru_cache`, but keeps the entries that a CUDA graph's capture looks up, for its replays."""

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        recent = lru_cache(maxsize)(make)
        captured = lru_cache(maxsize=None)(recent)

        @wraps(make)
        def look_up(*args: P.args, **kwargs: P.kwargs) -> T:
            return captured(*args, **kwargs) if is_capturing() else recent(*args, **kwargs)  # pyright: ignore

        return look_up

    return decorate


@cache
def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ringflash-tables")


def outside_pools(make: Callable[[], T], device: torch.device) -> T:
    """Returns what `make` allocates on `device`, in memory that no pool of a CUDA graph owns.

    torch.compile with CUDA graphs takes the memory of a thread from a pool, and reuses it after the call. Memory that
    outlives the call must therefore be allocated by another thread.
    """
    return _helper().submit(make).result() if device.type == "cuda" else make()


def uploaded(tables: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype = torch.int32) -> list[Tensor]:
    """Copies integers to `device` as `dtype`, int32 or int64, in one transfer; every stream may read the copies then.

    The upload runs on a stream of its own, and so waits for no other work on the GPU. Each copy is contiguous and
    begins at a multiple of `ALIGNMENT` bytes.

    Raises:
        ArgumentError: while a CUDA graph is captured, because its replays would read the arrays again.
    """
    if device.type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(table, _DTYPES[dtype])).to(device) for table in tables]
    if is_capturing():
        expected = "a mask and shape whose tables are on the GPU before the capture of a CUDA graph"
        raise ArgumentError("mask", expected=expected, got="new ones", remedy="Make the same call before the capture.")
    staging, places = _packed(tables, dtype)
    chunk, begin = _room(staging.nbytes, device)
    memory, first, aside = chunk.typed(dtype), begin // dtype.itemsize, _stream(device)
    with _copying, aside:  # the stream itself; torch.cuda.stream takes the host as long as the copy
        memory[first : first + len(staging)].copy_(staging, non_blocking=True)
    aside.synchronize()  # other streams than the current one will read it
    return [chunk.table(memory, table.shape, first + place) for table, place in zip(tables, places, strict=True)]


def unfilled(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Returns contiguous tables of `dtype`, int32 or int64, that the caller's kernels fill; each is aligned as uploads.

    In the capture of a CUDA graph the tables are in its pool.
    """
    if device.type != "cuda" or is_capturing():
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    places, end = _places(map(math.prod, shapes), dtype)
    chunk, begin = _room(end * dtype.itemsize, device)
    memory, first = chunk.typed(dtype), begin // dtype.itemsize
    return [chunk.table(memory, shape, first + place) for shape, place in zip(shapes, places, strict=True)]


class _Chunk:
    """Device memory of many tables; it retires when all of them have left the caches."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        def allocate() -> Tensor:
            # On the stream of the uploads: the memory of another stream may belong to work that is still queued there.
            with torch.cuda.stream(_stream(device)):
                return torch.empty(nbytes, dtype=torch.uint8, device=device)

        self.memory = outside_pools(allocate, device)
        self.used = 0
        self._typed: dict[torch.dtype, Tensor] = {}
        weakref.finalize(self, _retire, self.memory).atexit = False

    def typed(self, dtype: torch.dtype) -> Tensor:
        """Returns the memory as a vector of `dtype`."""
        typed = self._typed.get(dtype)
        return self._typed.setdefault(dtype, self.memory.view(dtype)) if typed is None else typed

    def table(self, typed: Tensor, shape: tuple[int, ...], begin: int) -> Tensor:
        """Returns the numbers of `typed` from `begin` on as a contiguous table."""
        table = typed.as_strided(*contiguous(shape), begin)
        table.of_chunk = self  # pyright: ignore[reportAttributeAccessIssue] - it lives as long as the table
        return table


_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}
_allocating = Lock()
_copying = Lock()  # a stream object keeps the streams to return to of all threads in one place
_current: dict[torch.device, _Chunk] = {}


def _room(nbytes: int, device: torch.device) -> tuple[_Chunk, int]:
    """Returns device memory for tables of `nbytes` bytes: a chunk, and where its free memory begins.

    Tables share chunks, because an allocation outside of pools, and the retirement of a table, take the host long.
    Memory of a chunk is used once.
    """
    with _allocating:
        chunk = _current.get(device)
        if chunk is None or chunk.used + nbytes > chunk.memory.nbytes:
            chunk = _Chunk(max(nbytes, CHUNK), device)
            if nbytes < CHUNK:
                _current[device] = chunk
        begin = chunk.used
        chunk.used += nbytes
        return chunk, begin


def _places(sizes: Iterable[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Returns where aligned tables of `sizes` numbers begin, one after the other, and where the last one ends."""
    multiple = ALIGNMENT // dtype.itemsize
    places, end = list[int](), 0
    for size in sizes:
        places.append(end)
        end += -(-size // multiple) * multiple
    return places, end


def _packed(tables: Sequence[np.ndarray], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Returns one vector of `dtype` with the contents of all tables, and the place of each."""
    places, end = _places((table.size for table in tables), dtype)
    staging = np.empty(end, _DTYPES[dtype])  # numpy, as its views take the host less time
    for table, place in zip(tables, places, strict=True):
        staging[place : place + table.size] = table.reshape(-1)
    return torch.from_numpy(staging), places


@cache
def readers(device: torch.device) -> set[int]:
    """Returns the handles of the streams of `device` on which kernels were launched; each launch adds its stream."""
    return set()


def add_reader(device: torch.device) -> None:
    """Adds the current stream to the `readers` of `device`: operators of torch are about to read a table there."""
    if device.type == "cuda":
        readers(device).add(torch.cuda.current_stream(device).cuda_stream)


def _retire(memory: Tensor) -> None:
    """Keeps memory of tables that left the caches until kernels that read them have finished, on every stream."""
    device = memory.device
    retired = _retired(device)
    retired.append(_Retired(memory))
    if is_capturing():  # the events would become part of the graph
        return
    if not _retiring.acquire(blocking=False):  # another thread or, in garbage collection, this one does it already
        return
    try:
        for last in tuple(retired):
            if last.read is None:
                last.read = [_recorded(stream) for stream in _streams(device)]
        while retired and retired[0].read is not None and all(event.query() for event in retired[0].read):
            retired.popleft()
    finally:
        _retiring.release()


_retiring = Lock()


def _streams(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Yields the current stream, and each other stream on which kernels were launched."""
    current = torch.cuda.current_stream(device)
    yield current
    for handle in readers(device) - {current.cuda_stream}:
        yield torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    try:
        event.record(stream)
    except RuntimeError:  # the program has destroyed a stream of its own
        readers(stream.device).discard(stream.cuda_stream)
        torch.cuda.synchronize(stream.device)
    return event


@dataclass
class _Retired:
    memory: Tensor
    read: list[torch.cuda.Event] | None = None  # recorded at retirement; None while a capture prevents that


@cache
def _retired(device: torch.device) -> deque[_Retired]:
    return deque()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def is_capturing() -> bool:
    """Returns whether the current stream records a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
