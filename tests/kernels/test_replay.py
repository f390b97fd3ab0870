"""Recorded calls: their replays allocate and launch the same, and calls that do anything else are not replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringflash.kernels import launch, replay
from ringflash.kernels.launch import Launches, Memory, observe_supply, observers
from ringflash.kernels.replay import MOST, MOST_TRIES, Replays
from tests.kernels.conftest import Compiled


class _Call:
    """A call with two results and scratch memory that makes two launches; counts how often its code runs."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.launches, self.runs = compiled, Launches(), 0
        self.supplied = torch.zeros(8, dtype=torch.int32)
        self.also: Callable[[Tensor], object] = lambda x: None

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.runs += 1
        out = x.new_empty_strided((3, 4), (4, 1))
        scratch = x.new_empty((2, 64), dtype=torch.float64)
        first, second = scratch.split([16, 48], dim=1)
        lse = x.new_empty_strided((5,), (1,), dtype=torch.float64)
        counter = self.supplied[4:]
        if observers:
            observe_supply(lambda: Memory(None, 4096), counter)
        self._launch("one", (x, y, first, second[1]))
        self._launch("two", (second, counter, out, lse))
        self.also(x)
        return out, lse

    def _launch(self, key: str, tensors: tuple[Tensor, ...]) -> None:
        if not self.launches.repeat(key, tensors):
            kernel = {(1,): lambda *arguments, **options: self.compiled}
            self.launches.first(key, kernel, (1,), tensors, {}, tensors)


@pytest.fixture
def call(compiled: Compiled) -> _Call:
    return _Call(compiled)


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.zeros(16), torch.zeros(16)


def _is_replayed(replays: Replays, call: _Call, tensors: tuple[Tensor, ...], key: Any = "key") -> bool:
    for _ in range(2):
        replays(key, call, _inputs())
    before = call.runs
    replays(key, call, tensors)
    return call.runs == before


def test_a_replay_allocates_and_launches_the_same(call: _Call) -> None:
    replays = Replays()
    assert _is_replayed(replays, call, _inputs())
    x, y = _inputs()
    out, lse = replays("key", call, (x, y))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, 4), torch.float32, (5,), torch.float64)
    one, two = (launched[-4:] for launched in call.compiled.launches[-2:])
    scratch = one[2]
    assert one == (x.data_ptr(), y.data_ptr(), scratch, scratch + (64 + 16) * 8)
    assert two == (scratch + 16 * 8, 4096, out.data_ptr(), lse.data_ptr())


def test_results_of_two_replays_are_their_own(call: _Call) -> None:
    replays = Replays()
    _is_replayed(replays, call, _inputs())
    pairs = [replays("key", call, _inputs()) for _ in range(2)]
    assert len({x.data_ptr() for pair in pairs for x in pair}) == 4


@pytest.mark.parametrize(
    "also", [lambda x: x.zero_(), lambda x: x + 1, lambda x: x.clone(), lambda x: x.double(), lambda x: x.new_zeros(3)]
)
def test_a_call_that_computes_with_torch_is_not_replayed(call: _Call, also: Callable[[Tensor], object]) -> None:
    call.also = also
    assert not _is_replayed(Replays(), call, _inputs())


def test_a_call_is_recorded_a_few_times_in_vain(call: _Call) -> None:
    replays, call.also = Replays(), Tensor.zero_
    for _ in range(MOST_TRIES + 1):
        assert not _is_replayed(replays, call, _inputs())
    call.also = lambda x: None
    assert not _is_replayed(replays, call, _inputs())


def test_a_result_that_is_a_view_or_an_input_is_not_replayed(call: _Call) -> None:
    def view(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return call(x, y)[0].view(12), y

    replays = Replays()
    for _ in range(3):
        runs = call.runs
        replays("key", view, _inputs())
        assert call.runs == runs + 1


def test_inputs_of_one_address_are_not_recorded(call: _Call) -> None:
    replays, (x, y) = Replays(), _inputs()
    call(x, y)  # keeps the launches
    for _ in range(3):
        replays("key", call, (x, x))
    before = call.runs
    replays("key", call, (x, y))  # recorded now
    assert call.runs == before + 1
    replays("key", call, (x, x))
    assert call.runs == before + 1
    assert call.compiled.launches[-2][-4:-2] == (x.data_ptr(), x.data_ptr())


def test_another_alignment_runs_the_code(call: _Call) -> None:
    replays, (x, y) = Replays(), _inputs()
    assert not _is_replayed(replays, call, (x, y[1:]))
    assert _is_replayed(replays, call, (x, y[4:]))


def test_a_stream_without_a_supply_runs_the_code(call: _Call, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Memory | None] = [Memory(None, 4096)]
    monkeypatch.setattr("tests.kernels.test_replay.Memory", lambda owner, address: given[0])
    replays = Replays()
    assert _is_replayed(replays, call, _inputs())
    given[0] = None
    assert not _is_replayed(replays, call, _inputs())


def test_captures_and_hooks_see_the_code(call: _Call, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = Replays()
    assert _is_replayed(replays, call, _inputs())
    for name in ("is_capturing", "has_hooks"):
        with monkeypatch.context() as patch:
            patch.setattr(replay, name, lambda: True)
            patch.setattr(launch, name, lambda: True)
            before = call.runs
            replays("key", call, _inputs())
            assert call.runs == before + 1
    assert _is_replayed(replays, call, _inputs())


def test_keys_are_apart_and_bounded(call: _Call) -> None:
    replays = Replays()
    assert all(_is_replayed(replays, call, _inputs(), key) for key in range(MOST))
    assert not _is_replayed(replays, call, _inputs(), "one more")
    assert _is_replayed(replays, call, _inputs(), 0)
