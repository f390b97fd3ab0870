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
from ringflash.kernels.launch import Launches, layout, statistics
from tests.accuracy import Problem, as_tensor


class _Pair(NamedTuple):
    x: Any
    stride: Any


class _Compiled:
    """Stands for Triton's compiled kernel, and keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.function: int | None = 1
        self.packed_metadata = (2,)
        self.metadata = SimpleNamespace(tensordesc_meta=["tiles"])
        self.launches: list[tuple[Any, ...]] = []
        scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
        self.run = SimpleNamespace(**scratch, launch_cooperative_grid=False, launch_pdl=False)


def _shared(compiled: _Compiled) -> None:
    """Gives the kernel the C function of Triton 3.7 and later, which takes a signature and the kernel's arguments."""
    compiled.run.kernel_signature, compiled.run.arg_annotations = b"signature", ["annotations"]

    def launch(*given: Any) -> None:
        *rest, annotations, signature, arguments = given
        assert (annotations, signature, rest[5:7], rest[8:]) == (["annotations"], b"signature", [False] * 2, [None] * 5)
        compiled.launches.append((*rest[:5], rest[7], *arguments))

    active: Any = c_launcher.driver.active
    active.utils = SimpleNamespace(launch=launch)


class _Own:
    """A C function of Triton 3.6 for one kernel: to Python, it is no function of Python."""

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self._launches = launches

    def __call__(self, *given: Any) -> None:
        assert (given[5:9], given[10:13]) == ((False, False, None, None), (None, None, None))
        self._launches.append((*given[:5], given[9], *given[13:]))


def _own(compiled: _Compiled) -> None:
    """Gives the kernel a C function of its own as in Triton 3.6, for a kernel without descriptors."""
    compiled.run.launch = _Own(compiled.launches)


def _wrapped(compiled: _Compiled) -> None:
    """Gives the kernel a C function of its own, within Triton's Python function that expands descriptors."""
    launcher = _Own(compiled.launches)
    compiled.run.launch = lambda *given: launcher(*given)


@pytest.fixture(params=[_shared, _own, _wrapped])
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> _Compiled:
    """Returns the compiled kernel of `_kernel`, on a machine without a GPU."""
    monkeypatch.setattr(launch, "CompiledKernel", _Compiled)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    for module in (launch, c_launcher):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    expand = lambda descriptor, metadata: [(descriptor.base.data_ptr(), metadata), *descriptor.shape]  # noqa: E731
    monkeypatch.setattr(c_launcher, "_expand", lambda: expand)
    made = _Compiled()
    request.param(made)
    return made


def _first(compiled: _Compiled, launches: Launches, key: Any, arguments: Any, tensors: Any, tables: Any = ()) -> None:
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: compiled

    launches.first(key, Kernel(), (3,), arguments, {"num_warps": 4}, tensors, tables)


def test_a_repeat_replaces_the_tensors_of_the_call_and_nothing_else(compiled: _Compiled) -> None:
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


def test_a_known_variant_is_launched_without_triton_s_run(compiled: _Compiled) -> None:
    runs = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: (runs.append(arguments), compiled)[1]

    def first(key: str, variant: str, x: Tensor, number: int) -> int:
        launches.first(key, Kernel(), (number % 7,), (x, table, number), {}, (x,), (table,), variant=variant)
        return len(runs)

    launches, x, table = Launches(), torch.zeros(33), torch.arange(3)
    assert first("one", "a", x, 5) == 1
    table = torch.arange(4)
    assert first("two", "a", x, 6) == 1
    assert compiled.launches[-1][:3] == (6, 1, 1)
    assert compiled.launches[-1][-3:] == (x.data_ptr(), table.data_ptr(), 6)
    assert launches.repeat("two", (x,))
    assert first("three", "b", x, 6) == 2
    assert first("four", "a", x, 2**31) == 3  # an argument of 64 bits
    assert first("five", "a", x[1:], 6) == 4  # an address that is no multiple of 16
    assert first("six", "a", x.double(), 6) == 5


def test_no_launch_is_kept_that_reads_a_tensor_of_its_own(compiled: _Compiled) -> None:
    launches, x = Launches(), torch.zeros(16)
    _first(compiled, launches, "copy", (x, x.clone()), (x,))
    _first(compiled, launches, "twice", (x, x), (x, x))
    _first(compiled, launches, None, (x,), (x,))
    assert not any(launches.repeat(key, (x,)) for key in ("copy", "twice", None))


def test_no_launch_is_kept_of_a_kernel_that_needs_scratch_memory(compiled: _Compiled) -> None:
    launches, x = Launches(), torch.zeros(16)
    compiled.run.global_scratch_size = 128
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x,))


def test_descriptors_are_encoded_once_an_address(compiled: _Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_launch_is_kept_of_a_kernel_that_was_only_compiled(compiled: _Compiled) -> None:
    launches, x = Launches(), torch.zeros(16)
    compiled.function = None
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x,))


def test_another_alignment_needs_a_launch_of_its_own(compiled: _Compiled) -> None:
    launches, x = Launches(), torch.zeros(32)
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x[1:],))
    assert launches.repeat("key", (x[4:],))


def test_old_launches_are_dropped(compiled: _Compiled) -> None:
    launches, x = Launches(most=2), torch.zeros(16)
    for key in "abc":
        _first(compiled, launches, key, (x,), (x,))
    assert [launches.repeat(key, (x,)) for key in "abc"] == [False, True, True]


def test_a_captured_launch_keeps_its_tables(compiled: _Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_profiler_s_hooks_see_every_launch(compiled: _Compiled) -> None:
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
    compiled: _Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, x = Launches(), torch.zeros(16)
    _first(compiled, launches, "key", (x,), (x,))
    runtime = SimpleNamespace(launch_enter_hook=lambda metadata: None, launch_exit_hook=None)
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=runtime))
    assert not launches.repeat("key", (x,))
    runtime.launch_enter_hook = None
    assert launches.repeat("key", (x,))


def test_other_releases_of_triton_keep_nothing(compiled: _Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.triton, "__version__", "4.0.0")
    launches, x = Launches(), torch.zeros(16)
    _first(compiled, launches, "key", (x,), (x,))
    assert not launches.repeat("key", (x,))


def test_a_layout_tells_shapes_strides_and_dtypes_apart() -> None:
    x = torch.zeros(2, 3)
    assert layout(x, x) == layout(x.clone(), x.clone())
    others = [layout(x.half(), x), layout(x.T, x), layout(x, x[:, :2]), layout(x, torch.zeros(3, 2).T), layout(x)]
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
        patch.setattr(launch, "_is_checked", lambda: False)
        expected = [_results(problem, context, options) for problem, options in cases]
    before = statistics()
    for _ in range(2):
        for (problem, options), others in zip(cases, expected, strict=True):
            for got, wanted in zip(_results(problem, context, options), others, strict=True):
                assert torch.equal(got, wanted), (problem.mask, options)
    assert statistics().repeated > before.repeated + len(cases)
