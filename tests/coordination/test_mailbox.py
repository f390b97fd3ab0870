"""Texts on a board in shared memory, which other ranks read only if they are complete."""

from __future__ import annotations

import mmap

from ringflash.coordination.mailbox import Board


def test_texts_are_read_by_all_and_long_ones_are_left_out() -> None:
    memory = mmap.mmap(-1, 64 + Board.nbytes(3))
    first, second = Board(memory, 64, 3), Board(memory, 64, 3)
    assert first.is_empty()
    first.put(2, "rank 2: größer")
    first.put(1, "x" * Board.CAPACITY)
    assert not second.is_empty()
    assert [second.get(rank) for rank in range(3)] == [None, None, "rank 2: größer"]


def test_a_text_that_is_half_written_is_not_read() -> None:
    memory = mmap.mmap(-1, Board.nbytes(1))
    board = Board(memory, 0, 1)
    board.put(0, "whole")
    memory[10:11] = b"?"
    assert board.get(0) is None


def test_a_board_has_no_texts_once_its_memory_is_closed() -> None:
    memory = mmap.mmap(-1, Board.nbytes(1))
    board = Board(memory, 0, 1)
    board.put(0, "before")
    memory.close()  # a thread may still look for failures
    assert board.is_empty()
