"""Exchange of a few integers between all ranks before a call, over gloo or in shared memory.

Over gloo an exchange takes a message between every two ranks, through the network stack of the system. Processes of one
host write and read the integers in a file that is mapped into memory instead. Agreement then takes microseconds.
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

WIDTH = 24  # integers in a row; rows with fewer are padded with zeros
KEPT = 256  # tensors of rows that are cached

_SHARED = Path("/dev/shm")  # in memory: a file elsewhere may lie on another machine, which sees writes late

Rows = list[tuple[int, ...]]  # the integers of each rank, in rank order


class Words(Protocol):
    """Exchange of integers between all ranks, which post in the same order."""

    def post(self, words: Sequence[int]) -> Callable[[], Rows]:
        """Sends up to `WIDTH` integers to all ranks.

        Returns:
            A function that waits for the rows of all ranks and returns them; it is called once.
        """
        ...


class GlooWords:
    """Exchange of integers over a gloo group."""

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
        """Sends a CPU tensor, of the same shape and dtype on every rank, to all ranks.

        Returns:
            A function that waits for the tensors of all ranks and returns them as (ranks, ...); it is called once.
        """
        everyone = mine.new_empty(self._world_size, *mine.shape)
        # Calls the group directly: torch.distributed's wrapper spends as long on checking arguments as this call takes.
        work = self._group.allgather([list(everyone.unbind(0))], [mine])

        def wait() -> Tensor:
            self._faults.wait_for(work)
            return everyone

        return wait


class SharedWords:
    """Exchange of integers in memory that the processes of all ranks share.

    Each rank has four places for its rows, and exchange n uses place n mod 4. Before a rank posts in exchange n, it has
    read the rows of all ranks in exchange n - 2. Each rank that posted in n - 2 had read exchange n - 4 before. So no
    rank still needs the row of exchange n - 4, which the new row overwrites.

    Args:
        memory: shared by all ranks, at least `nbytes` long; zeros at first.
        rank: this rank.
        world_size: number of ranks.
        faults: ends the wait with an error if a rank does not post.
    """

    _PLACES = 4  # rows that a rank keeps
    _ROW = struct.Struct(f"<q{WIDTH}q")  # the number of the exchange, from 1 on, and the integers
    _CHECK = struct.Struct("<Q")  # checksum of the row: writes of another process may arrive in any order
    _BYTES = _ROW.size + _CHECK.size

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, faults: Faults) -> None:
        self._memory, self._rank, self._world_size, self._faults = memory, rank, world_size, faults
        self._posted = self._read = 0
        self._unasked: dict[int, Rows] = {}  # rows that were read but not yet returned, by number of the exchange
        faults.on_close(memory.close)

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Returns the size of the memory."""
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
        """Returns the rows of all ranks in an exchange, and forgets them."""
        self._read_until(number)
        return self._unasked.pop(number)

    def _read_until(self, last: int) -> None:
        """Waits for the exchanges up to `last` and keeps their rows."""
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
                # A sleep takes at least 50 us, also one of 0 seconds. `sched_yield` keeps the interpreter's lock.
                time.sleep(0.0 if waited < 1e-4 else min(waited / 10, 1e-3))

        self._faults.wait(attempt, hop=None)
        return [rows[rank] for rank in range(self._world_size)]

    def _row_of(self, rank: int, number: int) -> tuple[int, ...] | None:
        """Returns the integers of `rank` in exchange `number`, or None until the row is complete."""
        start = self._start(rank, number)
        there = self._memory[start : start + self._BYTES]  # copied once, because `rank` may be writing it
        row = there[: self._ROW.size]
        found = self._ROW.unpack(row)
        whole = found[0] == number and self._CHECK.unpack_from(there, self._ROW.size)[0] == zlib.crc32(row)
        return found[1:] if whole else None

    def _start(self, rank: int, number: int) -> int:
        return (rank * self._PLACES + number % self._PLACES) * self._BYTES


def shared(tell: Callable[[str], list[str]], rank: int, world_size: int, faults: Faults) -> SharedWords | None:
    """Makes memory that all ranks share, with the board of `faults` in it; a collective.

    Args:
        tell: exchanges one text a rank and returns the texts of all ranks.
        rank: this rank.
        world_size: number of ranks, all on one host.
        faults: gets the board, and ends waits for ranks that do not post.

    Returns:
        The exchange over this memory, or None if a rank cannot map it.
    """
    start = SharedWords.nbytes(world_size)
    own = _file(start + Board.nbytes(world_size)) if rank == 0 else None
    try:
        path = tell(str(own or ""))[0]
        memory = _mapped(Path(path)) if path else None
        everyone = all(tell("" if memory is None else "there"))
    finally:
        if own is not None:
            own.unlink(missing_ok=True)  # mappings stay valid
    if not everyone or memory is None:
        return None
    faults.board = Board(memory, start, world_size)
    return SharedWords(memory, rank, world_size, faults)


def _file(nbytes: int) -> Path | None:
    """Returns a new file of zeros in memory, or None if there is no room for it."""
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
    """Maps a file into this process; returns None if that fails."""
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
