"""A few numbers that every rank tells all others before a call: over gloo, or in memory that processes share.

Over gloo they take a message between each two ranks, and its way through the system's network. Processes of one host
write and read them in a file that is mapped into memory instead: agreement is then a matter of microseconds.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.transport.faults import Faults

WIDTH = 24  # every rank sends the same number of words, whatever it has to say
KEPT = 256  # messages that are remembered

Rows = list[tuple[int, ...]]  # each rank's words, in rank order


class Words(Protocol):
    """What ranks exchange words over. All ranks post in the same order."""

    def post(self, words: Sequence[int]) -> Callable[[], Rows]:
        """Tells the others up to `WIDTH` words; what it returns waits for those of all ranks.

        No more than two exchanges are under way at a time.
        """
        ...


class GlooWords:
    """Words that travel over a gloo group."""

    def __init__(self, group: dist.ProcessGroup, faults: Faults) -> None:
        self._group, self._faults, self._world_size = group, faults, dist.get_world_size(group)
        self._messages: dict[tuple[int, ...], Tensor] = {}

    def post(self, words: Sequence[int]) -> Callable[[], Rows]:
        """See `Words`."""
        key = tuple(words)
        mine = self._messages.get(key)
        if mine is None:
            if len(self._messages) == KEPT:
                self._messages.clear()
            mine = self._messages[key] = torch.tensor(_padded(key), dtype=torch.int64, device="cpu")
        return partial(_rows, self.post_tensor(mine))

    def post_tensor(self, mine: Tensor) -> Callable[[], Tensor]:
        """Tells the others a tensor of the CPU, as long on every rank; returned likewise, (ranks, ...)."""
        everyone = mine.new_empty(self._world_size, *mine.shape)
        # The group's own call: that of torch.distributed looks at its arguments for as long as this takes.
        work = self._group.allgather([list(everyone.unbind(0))], [mine])

        def wait() -> Tensor:
            self._faults.wait_for(work)
            return everyone

        return wait


class SharedWords:
    """Words in memory that the processes of all ranks share.

    A rank's words have a place for each of the last exchanges. It is written once all ranks have read what was there: a
    rank posts when it has heard all others in the exchange before the last, who had by then read the one before that.

    Args:
        memory: of `nbytes`, the same for all ranks, zeros at first.
        rank: this one.
        world_size: ranks.
        faults: what a wait for a rank that does not come becomes.
    """

    _PLACES = 4  # of each rank
    _NUMBER = struct.Struct("<q")  # of an exchange, from 1 on
    _WORDS = struct.Struct(f"<q{WIDTH}q")  # after that number
    _CHECK = struct.Struct("<Q")  # of both: what another process writes may arrive in any order
    _BYTES = _WORDS.size + _CHECK.size

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, faults: Faults) -> None:
        self._memory, self._rank, self._world_size, self._faults = memory, rank, world_size, faults
        self._posted = 0

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Of the memory."""
        return world_size * cls._PLACES * cls._BYTES

    def post(self, words: Sequence[int]) -> Callable[[], Rows]:
        """See `Words`."""
        self._posted += 1
        row = self._WORDS.pack(self._posted, *_padded(words))
        start = self._start(self._rank, self._posted)
        self._memory[start : start + self._BYTES] = row + self._CHECK.pack(zlib.crc32(row))
        return partial(self._gathered, self._posted)

    def _gathered(self, number: int) -> Rows:
        rows: dict[int, tuple[int, ...]] = {}

        def attempt(seconds: float) -> bool:
            began = time.monotonic()
            while True:
                for rank in range(self._world_size):
                    if rank not in rows and (words := self._words(rank, number)) is not None:
                        rows[rank] = words
                if len(rows) == self._world_size:
                    return True
                waited = time.monotonic() - began
                if waited >= seconds:
                    return False
                time.sleep(0.0 if waited < 1e-4 else min(waited / 10, 1e-3))  # at first it only lets others run

        self._faults.wait(attempt, hop=None)
        return [rows[rank] for rank in range(self._world_size)]

    def _words(self, rank: int, number: int) -> tuple[int, ...] | None:
        """Those of `rank` in exchange `number`, if they are there, whole."""
        start = self._start(rank, number)
        if self._NUMBER.unpack_from(self._memory, start)[0] != number:
            return None
        row = self._memory[start : start + self._WORDS.size]
        if self._CHECK.unpack_from(self._memory, start + self._WORDS.size)[0] != zlib.crc32(row):
            return None
        return self._WORDS.unpack(row)[1:]

    def _start(self, rank: int, number: int) -> int:
        return (rank * self._PLACES + number % self._PLACES) * self._BYTES


def shared(tell: Callable[[str], list[str]], rank: int, world_size: int, faults: Faults) -> SharedWords | None:
    """Memory that all ranks share, if they can; a collective, in which each can `tell` all others a text."""
    path, memory = "", None
    if rank == 0:
        path = _file(SharedWords.nbytes(world_size))
    path = tell(path)[0]
    if path:
        memory = _mapped(Path(path))
        everyone = all(tell("" if memory is None else "there"))
        if rank == 0:
            Path(path).unlink(missing_ok=True)  # what is mapped stays
        if not everyone:
            memory = None
    return None if memory is None else SharedWords(memory, rank, world_size, faults)


def _file(nbytes: int) -> str:
    """A new file of zeros in memory; empty where there is no room."""
    try:
        handle, path = tempfile.mkstemp(prefix="ringflash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(nbytes))
    except OSError:
        return ""
    return path


def _mapped(path: Path) -> mmap.mmap | None:
    """The file in this process's memory; None on another host than that it lies on."""
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None


def _rows(wait: Callable[[], Tensor]) -> Rows:
    return [tuple(row) for row in wait().tolist()]


def _padded(words: Sequence[int]) -> tuple[int, ...]:
    assert len(words) <= WIDTH
    return *words, *(0,) * (WIDTH - len(words))
