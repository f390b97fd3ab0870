"""Recorded calls: their replays allocate and launch the same, and calls that do anything else are not replayed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.kernels import launch, replay
from ringflash.kernels.launch import Launches, Memory, observe_supply, observers
from ringflash.kernels.replay import MOST, MOST_TRIES, Replay, Replays
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


def test_a_call_without_scratch_memory_allocates_its_results_alone(call: _Call) -> None:
    def lean(x: Tensor, y: Tensor) -> tuple[Tensor]:
        out = x.new_empty_strided((3, 4), (4, 1))
        call._launch("lean", (x, y, out))
        return (out,)

    replays, (x, y) = Replays(), _inputs()
    (out,) = [replays("key", lean, (x, y)) for _ in range(3)][-1]
    assert call.compiled.launches[-1][-3:] == (x.data_ptr(), y.data_ptr(), out.data_ptr())


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


def test_a_conversion_to_the_same_dtype_is_no_work(call: _Call) -> None:
    call.also = lambda x: x.to(x.dtype)
    with torch.inference_mode():  # below autograd, as in a graph of torch.compile
        assert _is_replayed(Replays(), call, _inputs())
        call.also = lambda x: x.to(torch.float64)
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


def _without_replays(self: Replays, key: Any, procedure: Any, tensors: Any) -> Any:
    return procedure(*tensors)


def _packed(shape: tuple[int, ...]) -> list[Tensor]:
    """Returns q, k and v that are slices of one tensor."""
    return list(torch.randn(*shape[:3], 3 * shape[3], device="cuda", dtype=torch.bfloat16).split(shape[3], -1))


def _heads_first(shape: tuple[int, ...]) -> list[Tensor]:
    batch, seqlen, heads, headdim = shape
    drawn = torch.randn(3, batch, heads, seqlen, headdim, device="cuda", dtype=torch.bfloat16)
    return [x.transpose(1, 2) for x in drawn]


def _unaligned(shape: tuple[int, ...]) -> list[Tensor]:
    wide = torch.randn(3, *shape[:3], shape[3] + 1, device="cuda", dtype=torch.bfloat16)
    return [x[..., 1:] for x in wide]


def _contiguous(shape: tuple[int, ...]) -> list[Tensor]:
    return list(torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16))


def _results(tensors: list[Tensor], with_lse: bool, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = rf.flash_attention(*leaves, return_lse=True, **options)
    dout = torch.sin(out.detach() * 100)
    dlse = torch.cos(lse.detach() * 100) if with_lse else None
    loss = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss[0], leaves, loss[1])]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="launches on a GPU")


@needs_gpu
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("headdim", [64, 80])
def test_replays_have_the_bits_of_the_code(
    headdim: int, backend: str, with_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"options": rf.AttentionOptions(deterministic=True, backend=backend)}
    masks = [rf.Causal(), rf.Causal() & rf.Documents([0, 100, 180, 300])]
    made = [f((2, 300, 4, headdim)) for f in (_contiguous, _heads_first, _packed, _unaligned) for _ in range(4)]
    cases = [(tensors, {"mask": mask, **options}) for tensors in made for mask in masks]
    with monkeypatch.context() as patch:
        patch.setattr(Replays, "__call__", _without_replays)
        expected = [_results(tensors, with_lse, **given) for tensors, given in cases]
    for _ in range(2):
        for (tensors, given), wanted in zip(cases, expected, strict=True):
            for x, y in zip(_results(tensors, with_lse, **given), wanted, strict=True):
                assert torch.equal(x, y)


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("seqlen", "nheads_kv"), [(300, 4), (2048, 4), (2048, 1), (4096, 4)])
def test_both_passes_are_replayed(seqlen: int, nheads_kv: int, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, replayed = Replay.__call__, list[bool]()

    def noted(self: Replay, tensors: Any) -> Any:
        results = run(self, tensors)
        replayed.append(results is not None)
        return results

    monkeypatch.setattr(Replay, "__call__", noted)
    attention = torch.compile(rf.flash_attention) if compiles else rf.flash_attention
    for _ in range(MOST_TRIES):
        replayed.clear()
        shapes = [(1, seqlen, heads, 64) for heads in (4, nheads_kv, nheads_kv)]
        leaves = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
        attention(*leaves, mask=rf.Causal()).backward(torch.randn(shapes[0], device="cuda").bfloat16())
    assert replayed == [True, True]


@needs_gpu
def test_threads_on_streams_of_their_own_replay_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"mask": rf.Causal(), "options": rf.AttentionOptions(deterministic=True)}
    given = [[_contiguous((1, 512, 4, 64)) for _ in range(40)] for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(Replays, "__call__", _without_replays)
        expected = [[_results(tensors, False, **options) for tensors in of_thread] for of_thread in given]
    torch.cuda.synchronize()

    def run(of_thread: list[list[Tensor]]) -> list[list[Tensor]]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [_results(tensors, False, **options) for tensors in of_thread]
        stream.synchronize()
        return results

    with ThreadPoolExecutor(len(given)) as pool:
        for got, wanted in zip(pool.map(run, given), expected, strict=True):
            for xs, ys in zip(got, wanted, strict=True):
                assert all(map(torch.equal, xs, ys))


@needs_gpu
def test_decoding_steps_replay_with_the_bits_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        (torch.randn(2, 1, 8, 64, device="cuda").half(), *torch.randn(2, 2, 700, 2, 64, device="cuda").half())
        for _ in range(6)
    ]
    lengths = [torch.tensor([n, 700 - n], device="cuda") for n in range(1, 7)]

    def run() -> list[Tensor]:
        return [rf.flash_decode(*step, cache_seqlens=n) for step, n in zip(steps, lengths, strict=True)]

    with monkeypatch.context() as patch:
        patch.setattr(Replays, "__call__", _without_replays)
        expected = run()
    for _ in range(2):
        assert all(map(torch.equal, run(), expected))
