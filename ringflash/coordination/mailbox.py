"""A board in shared memory, to which ranks of one host write the reports of their failures.

A rank may serve the group's store, which then dies with this rank. The board stays readable for all ranks that live.
"""

from __future__ import annotations

import mmap
import struct
import zlib

_HEAD = struct.Struct("<II")  # length and checksum of a text, because another process may be writing it


class Board:
    """Shared memory with one text a rank, each written once.

    Args:
        memory: shared by the ranks; zeros at first.
        start: offset of the board in the memory, in bytes.
        world_size: number of ranks.
    """

    CAPACITY = 2**15  # bytes for each rank

    def __init__(self, memory: mmap.mmap, start: int, world_size: int) -> None:
        self._memory, self._start, self._world_size = memory, start, world_size

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Returns the size of the board."""
        return world_size * cls.CAPACITY

    def put(self, rank: int, text: str) -> None:
        """Writes the text of `rank`, unless the text is too long."""
        data = text.encode()
        if len(data) <= self.CAPACITY - _HEAD.size:
            first = self._start + rank * self.CAPACITY
            row = _HEAD.pack(len(data), zlib.crc32(data)) + data
            self._memory[first : first + len(row)] = row

    def get(self, rank: int) -> str | None:
        """Returns the text of `rank`, or None until the text is complete, and once the memory is closed."""
        first = self._start + rank * self.CAPACITY
        try:
            length, checksum = _HEAD.unpack(self._memory[first : first + _HEAD.size])
            data = self._memory[first + _HEAD.size : first + _HEAD.size + length]
        except ValueError:  # the program closed the ring while a thread looked for failures
            return None
        is_text = 0 < length <= self.CAPACITY - _HEAD.size and zlib.crc32(data) == checksum
        return data.decode() if is_text else None

    def is_empty(self) -> bool:
        """Returns whether no rank has written."""
        return all(self.get(rank) is None for rank in range(self._world_size))
