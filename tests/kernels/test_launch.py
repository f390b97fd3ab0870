"""Launches that repeat: the same bits as launches through Triton, and no launch that could read a wrong tensor."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import ringflash as rf
from ringflash.kernels import c_launcher, launch
from ringflash.kernels.launch import Launch, Launches, layout
from tests.helpers.accuracy import Problem, as_tensor
from tests.kernels.conftest import Compiled


class _Pair(NamedTuple):
    x: Any
    stride: Any


def _first(compiled: Compiled, launches: Launches, key: Any, arguments: Any, tensors: Any, tables: Any = ()) -> None:
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: compiled

    launches.first(key, Kernel(), (3,), arguments, {"num_warps": 4}, tensors, tables)


def test_a_repeat_replaces_the_tensors_of_the_call_and_nothing_else(compiled: Compiled) -> None:
    x, y, table = torch.zeros(4, 16), torch.ones(4, 16), torch.arange(3)
    view = TensorDescriptor(x, [4, 16], [16, 1], [2, 16])
    nested = _Pair(_Pair(y, 16), 3)
    launches = Launches()
    _first(compiled, launches, "key", (x, nested, view, table, 5, None), (x, y), [table])
    other, another = torch.zeros(4, 16), torch.zeros(4, 16)
    for _ in range(2):
        assert launches.repeat("key", (other, another))
        *grid, stream, function, metadata, a, b, c, rows, columns, d, e, f = compiled.launches[-1]
        assert (grid, stream, function, metadata) == ([3, 1, 1], 7, 1, (2,))
        assert (a, b) == (other.data_ptr(), ((another.data_ptr(), 16), 3))
        assert (c, rows, columns) == ((other.data_ptr(), "tiles"), 4, 16)
        assert (d, e, f) == (table.data_ptr(), 5, None)
    assert not launches.repeat("another key", (other, another))


def test_a_known_family_is_launched_without_triton_s_run(compiled: Compiled) -> None:
    runs = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: (runs.append(arguments), compiled)[1]

    def first(key: str, family: Any, x: Tensor, number: int) -> int:
        tables, grid = (torch.full((3,), number),), (number % 7,)
        kept.extend(tables)
        if not launches.bind(key, family, grid, (x,), tables, (number,)):
            arguments = (x, _Pair(tables[0], _Pair(x, 2)), number, 9)
            launches.first(key, Kernel(), grid, arguments, {}, (x,), tables, range(2, 3), family=family)
        return len(runs)

    kept: list[Tensor] = []
    launches, x = Launches(), torch.zeros(33)
    assert first("one", "a", x, 5) == 1
    assert first("two", "a", x, 6) == 1
    assert compiled.launches[-1][:3] == (6, 1, 1)
    assert compiled.launches[-1][-4:] == (x.data_ptr(), (kept[-1].data_ptr(), (x.data_ptr(), 2)), 6, 9)
    other = torch.zeros(33)
    assert launches.repeat("two", (other,))
    assert compiled.launches[-1][-4:] == (other.data_ptr(), (kept[-1].data_ptr(), (other.data_ptr(), 2)), 6, 9)
    assert launches.repeat("one", (other,))
    assert compiled.launches[-1][-4:] == (other.data_ptr(), (kept[0].data_ptr(), (other.data_ptr(), 2)), 5, 9)
    assert first("three", "b", x, 6) == 2
    assert first("four", "a", x, 2**31) == 3  # an argument of 64 bits
    assert first("five", "a", x[1:], 6) == 4  # an address that is no multiple of 16
    assert first("six", None, x, 6) == 5
    assert first("seven", None, x, 6) == 6


def test_tables_that_are_one_tensor_make_no_family(compiled: Compiled) -> None:
    launches, x, table = Launches(), torch.zeros(16), torch.arange(3)
    kernel = {(1,): lambda *arguments, **options: compiled}
    launches.first("one", kernel, (1,), (x, table, table), {}, (x,), (table, table), family="a")
    assert launches.repeat("one", (x,))
    assert not launches.bind("two", "a", (1,), (x,), (table, torch.arange(3)), ())


def test_no_launch_is_kept_that_reads_a_tensor_of_its_own(compiled: Compiled) -> None:
    launches, x = Launches(), torch.zeros(16)
    _first(compiled, launches, "copy", (x, x.clone()), (x,))
    _first(compiled, launches, "twice", (x, x), (x, x))
    _first(compiled, launches, None, (x,), (x,))
    assert not any(launches.repeat(key, (x,)) for key in ("copy", "twice", None))


def test_no_launch_is_kept_of_a_kernel_that_needs_scratch_memory(compiled: Compiled) -> None:
    launches, x = Launches(), torch.zeros(16)
    compiled.run.global_scratch_size = 128
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x,))


def test_descriptors_are_encoded_once_an_address(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def expand(descriptor: Any, metadata: Any) -> list[Any]:
        encoded.append(descriptor.base.data_ptr())
        return [object(), 4]

    monkeypatch.setattr(c_launcher, "_expand", lambda: expand)
    monkeypatch.setattr(c_launcher, "MOST_ADDRESSES", 2)
    launches, (x, *others) = Launches(), [torch.zeros(4, 16) for _ in range(4)]
    _first(compiled, launches, "key", (TensorDescriptor(x, [4, 16], [16, 1], [2, 16]),), (x,))
    encoded.clear()
    for y in (x, x, others[0], x, others[1], x):
        assert launches.repeat("key", (y,))
    assert encoded == [y.data_ptr() for y in (x, others[0], others[1], x)]  # the third address empties the cache


def test_no_launch_is_kept_of_a_kernel_that_was_only_compiled(compiled: Compiled) -> None:
    launches, x = Launches(), torch.zeros(16)
    compiled.function = None
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x,))


def test_a_launch_that_is_not_kept_names_its_stream(compiled: Compiled) -> None:
    """Checks that tables stay until such a launch, of a call with dropout for instance, has read them."""
    device = torch.device("cuda", 0)
    x: Any = SimpleNamespace(is_cuda=True, device=device)
    assert not launch.readers(device)
    _first(compiled, Launches(), None, (1,), (x,))
    assert launch.readers(device) == {7}


def test_another_alignment_needs_a_launch_of_its_own(compiled: Compiled) -> None:
    launches, x = Launches(), torch.zeros(32)
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x[1:],))
    assert launches.repeat("key", (x[4:],))


def test_old_launches_are_dropped(compiled: Compiled) -> None:
    launches, x = Launches(most=2), torch.zeros(16)
    for key in "abc":
        _first(compiled, launches, key, (x,), (x,))
    assert [launches.repeat(key, (x,)) for key in "abc"] == [False, True, True]


def test_a_captured_launch_keeps_its_tables(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, x, capturing = Launches(most=1), torch.zeros(16), [False]
    monkeypatch.setattr(launch, "is_capturing", lambda: capturing[0])
    gone = []
    for key, captures in (("a", True), ("b", False), ("c", False)):
        table = torch.arange(3)
        gone.append(weakref.ref(table))
        _first(compiled, launches, key, (x, table), (x,), (table,))
        capturing[0] = captures
        assert launches.repeat(key, (x,))
        compiled.launches.clear()
        capturing[0] = False
        del table
    assert [reference() is None for reference in gone] == [False, True, False]


def test_a_profiler_s_hooks_see_every_launch(compiled: Compiled) -> None:
    launches, x = Launches(), torch.zeros(16)
    _first(compiled, launches, "key", (x,), (x,))
    hooks = launch.knobs.runtime.launch_enter_hook

    def seen(metadata: Any) -> None: ...

    hooks.add(seen)
    try:
        assert not launches.repeat("key", (x,))
    finally:
        hooks.remove(seen)
    assert launches.repeat("key", (x,))


def test_a_function_in_place_of_the_hooks_sees_every_launch(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, x = Launches(), torch.zeros(16)
    _first(compiled, launches, "key", (x,), (x,))
    runtime = SimpleNamespace(launch_enter_hook=lambda metadata: None, launch_exit_hook=None)
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=runtime))
    assert not launches.repeat("key", (x,))
    runtime.launch_enter_hook = None
    assert launches.repeat("key", (x,))


def test_other_releases_of_triton_keep_nothing(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.triton, "__version__", "4.0.0")
    launches, x = Launches(), torch.zeros(16)
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x,))


def test_a_layout_tells_shapes_strides_and_dtypes_apart() -> None:
    x = torch.zeros(2, 3)
    assert layout(x, x) == layout(x.clone(), x.clone())
    others = [layout(x.half(), x), layout(x.T, x), layout(x, x[:, :2]), layout(x, torch.zeros(3, 2).T), layout(x)]
    others.append(layout(x, x.half()))
    assert layout(x, x) not in others


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="launches on a GPU")
DOCUMENTS = [rf.Causal() & rf.Documents(ends) for ends in ([0, 100, 180, 256], [0, 20, 100, 256], [0, 128, 256])]
MASKS = [None, rf.Causal(), rf.Causal() & rf.SlidingWindow(70), *DOCUMENTS]


def _padded(x: Tensor) -> Tensor:
    """Returns a copy of `x` whose heads lie further apart, at an address that is no multiple of 16 bytes."""
    wide = torch.zeros(*x.shape[:3], x.shape[3] + 9, device=x.device, dtype=x.dtype)
    return wide[..., 1 : 1 + x.shape[3]].copy_(x)


def _results(problem: Problem, context: rf.ContextParallel | None, options: rf.AttentionOptions) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    if context is None:
        out = rf.flash_attention(q, k, v, mask=problem.mask, options=options)
    else:
        out = rf.ring_attention(q, k, v, context, mask=problem.mask, options=options)
    return [as_tensor(out).detach(), *torch.autograd.grad(as_tensor(out), (q, k, v), problem.dout)]


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("headdim", [64, 128])
def test_repeated_launches_have_the_bits_of_first_ones(
    backend: str, ranks: int, headdim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = rf.ContextParallel.local(ranks) if ranks else None
    slopes = torch.rand(4, device="cuda")
    every = [
        rf.AttentionOptions(deterministic=True, backend=backend),
        rf.AttentionOptions(deterministic=True, backend=backend, alibi_slopes=slopes),
    ]
    cases = []
    for mask in MASKS:
        for seed in range(3):
            shape = {"seqlen": 256, "batch": 2, "heads": (4, 2), "headdim": headdim, "dtype": torch.bfloat16}
            problem = Problem.random(**shape, mask=mask, seed=seed, device="cuda")
            cases += [(problem, options) for options in every]
            cases.append((problem.mapped(_padded), every[0]))
    with monkeypatch.context() as patch:
        patch.setattr(Launches, "find", lambda self, key: None)
        patch.setattr(launch, "_is_supported", lambda: False)
        expected = [_results(problem, context, options) for problem, options in cases]
    repeated, at = list[Launch](), Launch.at

    def recorded(self: Launch, addresses: Any, stream: int) -> None:
        repeated.append(self)
        at(self, addresses, stream)

    monkeypatch.setattr(Launch, "at", recorded)
    for _ in range(2):
        for (problem, options), others in zip(cases, expected, strict=True):
            for got, wanted in zip(_results(problem, context, options), others, strict=True):
                assert torch.equal(got, wanted), (problem.mask, options)
    assert len(repeated) > len(cases)
