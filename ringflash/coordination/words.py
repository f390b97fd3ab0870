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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.coordination.failures import Faults
from ringflash.coordination.mailbox import Board

WIDTH = 24  # every rank sends the same number of words, whatever it has to say
KEPT = 256  # messages that are remembered

_SHARED = Path("/dev/shm")  # files in memory: elsewhere a file may lie on another machine, which sees it late

Rows = list[tuple[int, ...]]  # each rank's words, in rank order


class Words(Protocol):
    """What ranks exchange words over. All ranks post in the same order."""

    def post(self, words: Sequence[int]) -> Callable[[], Rows]:
        """Tells the others up to `WIDTH` words; what it returns waits for those of all ranks, and is called once."""
        ...


class GlooWords:
    """Words that travel over a gloo group."""

    def __init__(self, group: dist.ProcessGroup, faults: Faults) -> None:
        self._group, self._faults, self._world_size = group, faults, dist.get_world_size(group)
        self._messages: dict[tuple[int, ...], Tensor] = {}
        faults.on_close(self._close)

    def _close(self) -> None:
        del self._group

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

    A rank's words have a place for each of the last four exchanges. Before it posts in one, it has read all up to the
    last but one: all have posted there, and have read what lies two before that, where the new words are put.

    Args:
        memory: of `nbytes`, the same for all ranks, zeros at first.
        rank: this one.
        world_size: ranks.
        faults: what a wait for a rank that does not come becomes.
    """

    _PLACES = 4  # of each rank
    _ROW = struct.Struct(f"<q{WIDTH}q")  # the number of an exchange, from 1 on, and words
    _CHECK = struct.Struct("<Q")  # of both: what another process writes may arrive in any order
    _BYTES = _ROW.size + _CHECK.size

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, faults: Faults) -> None:
        self._memory, self._rank, self._world_size, self._faults = memory, rank, world_size, faults
        self._posted = self._read = 0
        self._unasked: dict[int, Rows] = {}  # read, but not yet asked for, by number
        faults.on_close(memory.close)

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Of the memory."""
        return world_size * cls._PLACES * cls._BYTES

    def post(self, words: Sequence[int]) -> Callable[[], Rows]:
        """See `Words`."""
        self._read_until(self._posted - 1)
        self._posted += 1
        row = self._ROW.pack(self._posted, *_padded(words))
        start = self._start(self._rank, self._posted)
        self._memory[start : start + self._BYTES] = row + self._CHECK.pack(zlib.crc32(row))
        return partial(self._take, self._posted)

    def _take(self, number: int) -> Rows:
        """All ranks' words in an exchange, once."""
        self._read_until(number)
        return self._unasked.pop(number)

    def _read_until(self, last: int) -> None:
        """Waits for the exchanges up to `last`, and keeps their words."""
        while self._read < last:
            self._unasked[self._read + 1] = self._wait_for(self._read + 1)
            self._read += 1

    def _wait_for(self, number: int) -> Rows:
        rows: dict[int, tuple[int, ...]] = {}

        def attempt(seconds: float) -> bool:
            began = time.monotonic()
            while True:
                for rank in range(self._world_size):
                    if rank not in rows and (row := self._row_of(rank, number)) is not None:
                        rows[rank] = row
                if len(rows) == self._world_size:
                    return True
                waited = time.monotonic() - began
                if waited >= seconds:
                    return False
                time.sleep(0.0 if waited < 1e-4 else min(waited / 10, 1e-3))  # at first it only lets others run

        self._faults.wait(attempt, hop=None)
        return [rows[rank] for rank in range(self._world_size)]

    def _row_of(self, rank: int, number: int) -> tuple[int, ...] | None:
        """The words of `rank` in exchange `number`, if they are there, whole."""
        start = self._start(rank, number)
        there = self._memory[start : start + self._BYTES]  # looked at once: it may change
        row = there[: self._ROW.size]
        found = self._ROW.unpack(row)
        whole = found[0] == number and self._CHECK.unpack_from(there, self._ROW.size)[0] == zlib.crc32(row)
        return found[1:] if whole else None

    def _start(self, rank: int, number: int) -> int:
        return (rank * self._PLACES + number % self._PLACES) * self._BYTES


def shared(tell: Callable[[str], list[str]], rank: int, world_size: int, faults: Faults) -> SharedWords | None:
    """Memory that all ranks of a host share, if they can; a collective, in which each can `tell` all others a text."""
    start = SharedWords.nbytes(world_size)
    own = _file(start + Board.nbytes(world_size)) if rank == 0 else None
    try:
        path = tell(str(own or ""))[0]
        memory = _mapped(Path(path)) if path else None
        everyone = all(tell("" if memory is None else "there"))
    finally:
        if own is not None:
            own.unlink(missing_ok=True)  # what is mapped stays
    if not everyone or memory is None:
        return None
    faults.board = Board(memory, start, world_size)
    return SharedWords(memory, rank, world_size, faults)


def _file(nbytes: int) -> Path | None:
    """A new file of zeros, if there is room for it in memory."""
    if not _SHARED.is_dir():
        return None
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="ringflash-", dir=_SHARED)
        path = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(bytes(nbytes))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            return path
    return None


def _mapped(path: Path) -> mmap.mmap | None:
    """The file in this process's memory; None where there is no such file."""
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
