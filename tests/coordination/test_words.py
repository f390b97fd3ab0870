"""Exchange of a few integers (words) between ranks, over gloo and in shared memory."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from ringflash.coordination import words as module
from ringflash.coordination.failures import Faults
from ringflash.coordination.processes import together
from ringflash.coordination.words import KEPT, WIDTH, GlooWords, Rows, SharedWords, Words
from ringflash.errors import RingTimeout
from tests.coordination.test_session import control_of_all
from tests.helpers.distributed import run_ranks


def _exchanges() -> list[str]:
    """Returns the classes of both carriers after many exchanges over each, with late ranks and some waits left open."""
    control, rank, ranks = control_of_all(), dist.get_rank(), range(dist.get_world_size())
    carriers: list[Words] = [control._words, control._over_gloo]
    for carrier in carriers:
        left: dict[int, Callable[[], Rows]] = {}
        for number in range(3 * KEPT // 2):
            if number % 97 == rank:
                time.sleep(0.002)
            wait = carrier.post([number, rank - 1, 2**62 + number])
            if number % 3:
                table = wait()
                assert [row[:4] for row in table] == [(number, other - 1, 2**62 + number, 0) for other in ranks]
                assert {len(row) for row in table} == {WIDTH}
            else:
                left[number] = wait
            if number % 10 == 9:
                assert {each: wait()[-1][0] for each, wait in left.items()} == {each: each for each in left}
                left.clear()
    return [type(carrier).__name__ for carrier in carriers]


def test_all_ranks_words_arrive() -> None:
    assert run_ranks(3, _exchanges) == [["SharedWords", "GlooWords"]] * 3


def _one_cannot(folder: str) -> str:
    """Returns the class of the carrier when one rank has no shared memory."""
    path, mapped = Path(folder), module._mapped
    module._mapped = lambda file: None if dist.get_rank() == 1 else mapped(file)
    module._SHARED = path
    control = control_of_all()
    assert control.agree({"operation": "attention", "seqlen": dist.get_rank()}, free="seqlen") == [0, 1]
    dist.barrier()
    assert not list(path.iterdir())
    return type(control._words).__name__


def test_ranks_that_share_no_memory(tmp_path: Path) -> None:
    assert run_ranks(2, _one_cannot, str(tmp_path)) == [GlooWords.__name__] * 2


def _of_two(rank: int, memory: mmap.mmap, deadline: float = 60.0) -> SharedWords:
    class Alone(Faults):
        """Faults of a ring of two ranks in which the other rank lives but reports nothing."""

        def was_reported(self) -> bool:
            return False

        def broken(self, kind: object, hop: int | None, peers: object = ()) -> RingTimeout:
            return RingTimeout([1 - rank], hop, deadline, [], rank=rank)

    return SharedWords(memory, rank, 2, Alone(cast("Any", None), rank, 2, deadline))


def test_words_that_are_there_in_part_are_waited_for() -> None:
    memory = mmap.mmap(-1, SharedWords.nbytes(2))
    first, second = (_of_two(rank, memory) for rank in range(2))
    wait = first.post([7])
    second.post([8, 9])
    place = slice(second._start(1, 1), second._start(1, 1) + SharedWords._BYTES)
    whole = memory[place]
    for missing in range(8, len(whole), 8):
        memory[place] = whole[:missing] + bytes(len(whole) - missing)
        complete = memory[place] == whole
        assert (first._row_of(1, 1) is not None) == complete
    memory[place] = whole
    assert [row[:2] for row in wait()] == [(7, 0), (8, 9)]


def test_words_of_a_later_exchange_in_the_same_place_are_not_those() -> None:
    second = _of_two(1, memory := mmap.mmap(-1, SharedWords.nbytes(2)))
    second._posted = second._read = 4
    second.post([5])
    first = _of_two(0, memory)
    assert (first._row_of(1, 1), first._row_of(1, 5)) == (None, (5, *[0] * (WIDTH - 1)))


def test_a_file_that_has_no_room_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_SHARED", tmp_path)
    monkeypatch.setattr(module.os, "fdopen", full)
    assert module._file(100) is None
    monkeypatch.setattr(module, "_SHARED", tmp_path / "nothing")
    assert module._file(100) is None
    assert not list(tmp_path.iterdir())


def test_only_processes_that_see_each_other_share() -> None:
    assert together(["host 1 10 99", "host 1 11 99"])
    assert not together(["host 1 10 99", "host 2 10 99"])  # in another container
    assert not together(["host 1 10 99", ""])


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    memory = mmap.mmap(-1, SharedWords.nbytes(2))
    start = time.monotonic()
    with pytest.raises(RingTimeout):
        _of_two(0, memory, deadline=0.3).post([1])()
    assert 0.3 <= time.monotonic() - start < 5
