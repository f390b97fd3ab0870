"""Calls that differ in packed documents alone share a prepared call, and read the tables of their own mask."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash import reference
from ringflash.errors import ArgumentError
from ringflash.kernels.contract import ForwardArguments, ScoreConfig, TileProblem, Tiling
from ringflash.kernels.eager.backend import EagerBackend
from ringflash.kernels.hopper.backend import HOPPER as HOPPER_BACKEND
from ringflash.kernels.hopper.backend import HopperBackend
from ringflash.kernels.launch import observers
from ringflash.kernels.triton.backend import TritonBackend
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask, serialize
from ringflash.masks.base import Packing
from ringflash.ops.attention import cache_info
from ringflash.ops.call import AttentionCall
from ringflash.ops.one_device import OneDevice
from ringflash.recent_calls import RecentCalls
from tests.helpers.accuracy import as_tensor
from tests.helpers.documents import check_tables, interpreted, made, needs_hopper

# Calls on a CPU whose backend reads tables: the eager kernels, which compare these with the host's.


@pytest.fixture
def reads_tables(monkeypatch: pytest.MonkeyPatch) -> list[Mask]:
    """Makes the eager backend read tables of documents, and returns the masks of its forwards."""
    masks: list[Mask] = []
    forward = EagerBackend.forward

    def checked(given: ForwardArguments) -> None:
        problem = given.problem
        if problem.tiling is not None:
            masks.append(problem.mask)
            tables = made(problem.mask, problem.tiling, given.q.shape[1], given.k.shape[1], given.q.device)
            assert all(map(torch.equal, problem.tables, tables))
        forward(given._replace(problem=problem.by_value()))

    def tilings(
        self: EagerBackend, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, deterministic: bool
    ) -> tuple[Tiling, Tiling] | None:
        return Tiling(128, 64, False, False), Tiling(64, 64, True, deterministic)

    monkeypatch.setattr(EagerBackend, "forward", staticmethod(checked))
    monkeypatch.setattr(EagerBackend, "packed_tilings", tilings)
    monkeypatch.setattr("ringflash.ops.attention._known", RecentCalls())
    monkeypatch.setattr("ringflash.ops.one_device._operators", RecentCalls())
    return masks


def inputs(seqlen: int = 24, batch: int = 2, seqlen_k: int | None = None) -> list[Tensor]:
    q = torch.randn(batch, seqlen, 4, 16, dtype=torch.float64)
    k, v = (torch.randn(batch, seqlen_k or seqlen, 2, 16, dtype=torch.float64) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v)]


def formula(*tensors: Tensor, mask: Mask) -> Tensor:
    return reference.attention(*tensors, mask=mask)[0]


def check_call(attend: Callable[..., Any], mask: Mask, tensors: list[Tensor]) -> None:
    """Compares out and each gradient with the plain formula."""
    dout = torch.randn_like(tensors[0])
    results = []
    for function in (attend, formula):
        out = as_tensor(function(*tensors, mask=mask))
        results.append([out, *torch.autograd.grad(out, tensors, dout)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@interpreted
def test_masks_of_one_form_are_one_prepared_call(reads_tables: list[Mask]) -> None:
    for index, inner in enumerate(([7, 9], [1, 1], [0, 24], [7, 9])):
        before = cache_info()
        check_call(rf.flash_attention, rf.Causal() & rf.Documents([0, *inner, 24]), inputs())
        assert (cache_info().hits > before.hits) == (index > 0)
    assert len(reads_tables) == 4
    check_call(rf.flash_attention, rf.Causal() & rf.SlidingWindow(3) & rf.Documents([[0, 4, 24], [0, 9, 24]]), inputs())
    check_call(rf.flash_attention, rf.Causal() & rf.Documents([0, 7, 9, 31]), inputs(24, 2, 31))


@interpreted
def test_a_backward_has_the_mask_of_its_forward(reads_tables: list[Mask]) -> None:
    masks = [rf.Causal() & rf.Documents([0, cut, 24]) for cut in (5, 17)]
    tensors, dout = inputs(), torch.randn(2, 24, 4, 16, dtype=torch.float64)
    outs = [as_tensor(rf.flash_attention(*tensors, mask=mask)) for mask in masks]
    for mask, out in reversed(list(zip(masks, outs, strict=True))):
        expected = formula(*tensors, mask=mask)
        for got, want in zip(
            torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@interpreted
def test_documents_are_copies(reads_tables: list[Mask]) -> None:
    ends = torch.tensor([0, 7, 24])
    mask, tensors = rf.Documents(ends), inputs()
    expected = rf.flash_attention(*tensors, mask=mask)
    ends[1] = 11
    assert torch.equal(as_tensor(rf.flash_attention(*tensors, mask=mask)), as_tensor(expected))
    check_call(rf.flash_attention, rf.Documents(ends), tensors)


@interpreted
def test_other_calls_of_packed_documents(reads_tables: list[Mask]) -> None:
    mask = rf.Causal() & rf.Documents([0, 7, 24])
    context = rf.ContextParallel.local(1)
    for _ in range(2):
        check_call(lambda q, k, v, mask: rf.ring_attention(q, k, v, context, mask=mask), mask, inputs())
        check_call(torch.compile(rf.flash_attention, backend="aot_eager"), mask, inputs())
        check_call(lambda *x, mask: torch.func.functional_call(_Attends(mask), {}, tuple(x)), mask, inputs())
    assert len(reads_tables) == 6
    options = rf.AttentionOptions(sinks=torch.zeros(4, dtype=torch.float64))
    rf.flash_attention(*inputs(), mask=mask, options=options)
    rf.flash_attention(*inputs(), mask=mask, softcap=3.0)
    q, k, v = inputs()
    rf.ring_attention(q, k, v, rf.ContextParallel.local(2), mask=mask)
    assert len(reads_tables) == 6, "these calls read the values on the host"


def test_an_operator_makes_its_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each making copies the tensors; of lengths on a GPU it may wait."""
    made: list[str] = []
    make = serialize._made
    monkeypatch.setattr(serialize, "_made", lambda words, tensors: made.append(words) or make(words, tensors))
    q, k, v = (x.detach() for x in inputs())
    for _ in range(2):
        made.clear()
        call = AttentionCall(
            None, None, None, "", "documents", [torch.tensor([0, 7, 24])], 0.25, 0.0, 0.0, "auto", False
        )
        OneDevice.of(q, k, v, call)
    assert made == ["documents"]


class _Attends(torch.nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, *tensors: Tensor) -> Any:
        return rf.flash_attention(*tensors, mask=self.mask)


@interpreted
def test_each_call_of_a_form_checks_its_own_documents(reads_tables: list[Mask]) -> None:
    rf.flash_attention(*inputs(), mask=rf.Documents([0, 7, 24]))
    with pytest.raises(ArgumentError, match="a sum of 23"):
        rf.flash_attention(*inputs(), mask=rf.Documents([0, 7, 23]))
    with pytest.raises(ArgumentError, match="batch 3"):
        rf.flash_attention(*inputs(), mask=rf.Documents([[0, 7, 24]] * 3))
    with pytest.raises(ArgumentError, match="device_check"):
        rf.Documents([0, 7, 24], device_check=1)  # pyright: ignore[reportArgumentType]


class _Launched(TritonBackend):
    """Triton's backend, which notes problems of forwards and launches nothing; it observes launches too."""

    def __init__(self) -> None:
        self.problems: list[TileProblem] = []
        self.launches: list[object] = []

    def forward(self, given: ForwardArguments) -> None:
        self.problems.append(given.problem)

    def launched(self, launch: object, addresses: Sequence[int]) -> None:
        self.launches.append(launch)


def test_other_kernels_read_table_spec_each_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the Hopper backend a q that is not aligned: Triton's launches differ by mask, and no replay serves them."""
    triton = _Launched()
    monkeypatch.setitem(observers, get_ident(), triton)
    q, k = torch.zeros(24 * 4 * 16 + 1, dtype=torch.bfloat16)[1:].view(1, 24, 4, 16), torch.zeros(1, 24, 4, 16)
    k, out, lse, place = k.bfloat16(), torch.zeros(1, 24, 4, 16), torch.zeros(1, 4, 24), object()
    for cut in (5, 9, 5):
        problem = TileProblem(
            (Chunk(0, 24),),
            (Chunk(0, 24),),
            rf.Causal() & rf.Documents([0, cut, 24]),
            ScoreConfig(1.0),
            place=place,
            tiling=Tiling(128, 128, by_keys=False, ordered=False),
            tables=(out,),
        )
        backend = HopperBackend(triton, leaves_little=False)
        backend.forward(ForwardArguments(q, k, k, problem, None, out, lse, first=True, last=True))
    assert all(problem.tiling is None and not problem.tables for problem in triton.problems)
    first, other, again = (problem.launch_key() for problem in triton.problems)
    assert first == again != other
    assert triton.launches == [None] * 3


@pytest.mark.parametrize("shapes", [((24, 2, 16),) * 3, ((1, 24, 2, 16), (1, 24, 2, 16), (1, 24, 16)), ((),) * 3])
def test_wrong_shapes_are_named(shapes: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives shapes that no kernel takes to the Hopper backend's choice of tiles, before any check."""
    monkeypatch.setattr(EagerBackend, "packed_tilings", HOPPER_BACKEND.packed_tilings)
    with pytest.raises(ArgumentError, match="expected 4 dimensions"):
        rf.flash_attention(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes), mask=rf.Documents([0, 24]))


# Documents on a GPU.


def on_gpu(ends: list[int] | list[list[int]], **options: Any) -> rf.Documents:
    return rf.Documents(torch.tensor(ends, device="cuda", dtype=torch.int32), **options)


def gpu_inputs(seqlen: int, headdim: int = 64, nheads: tuple[int, int] = (8, 2)) -> list[Tensor]:
    shapes = [(2, seqlen, count, headdim) for count in (nheads[0], nheads[1], nheads[1])]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def results_of(mask: Mask, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    out = as_tensor(rf.flash_attention(*tensors, mask=mask, options=rf.AttentionOptions(**options)))
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))]


@needs_hopper
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("seqlen", [700, 3000])
def test_documents_on_a_gpu_have_the_results_of_the_hosts(headdim: int, seqlen: int) -> None:
    for ends in ([0, 300, 301, seqlen], [[0, 9, 640, seqlen], [0, 0, 128, seqlen]]):
        for rule in (rf.Causal(), rf.Causal() & rf.SlidingWindow(200)):
            tensors = gpu_inputs(seqlen, headdim)
            expected = results_of(rule & rf.Documents(ends), tensors, deterministic=True)
            for _ in range(3):  # by its code, recorded, and replayed
                got = results_of(rule & on_gpu(ends), tensors, deterministic=True)
                for one, other in zip(got, expected, strict=True):  # lengths that the host knows may change tiles
                    assert (one - other).float().norm() < 1e-2 * other.float().norm()
            check_tables(rule & rf.Documents(ends), seqlen, seqlen, Tiling(128, 128, True, True))


@needs_hopper
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_host_never_waits_for_documents_on_a_gpu() -> None:
    tensors, ends = gpu_inputs(1024), torch.tensor([0, 300, 1024], device="cuda")
    for _ in range(4):
        results_of(rf.Causal() & rf.Documents(ends), tensors)
    try:
        torch.cuda.set_sync_debug_mode("error")
        results_of(rf.Causal() & rf.Documents(ends), tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_hopper
def test_a_graph_reads_the_documents_of_each_replay() -> None:
    tensors, ends = gpu_inputs(1024), torch.tensor([0, 300, 1024], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            results_of(rf.Causal() & rf.Documents(ends), tensors, deterministic=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of(rf.Causal() & rf.Documents(ends), tensors, deterministic=True)
    for cut in (300, 0, 513, 1024):
        ends[1] = cut
        graph.replay()
        expected = results_of(rf.Causal() & rf.Documents([0, cut, 1024]), tensors, deterministic=True)
        assert all(map(torch.equal, results, expected))


@needs_hopper
def test_a_graph_keeps_the_table_spec_a_mask() -> None:
    """Drops the mask of a captured call, and makes other tables in its memory before the replay."""
    tensors, mask = gpu_inputs(1024), rf.Causal() & rf.Documents([0, 300, 1024])
    expected = results_of(mask, tensors, deterministic=True)
    results_of(mask, tensors, deterministic=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of(mask, tensors, deterministic=True)
    del mask
    for cut in range(1, 200):
        results_of(rf.Causal() & rf.Documents([0, cut, 1024]), tensors, deterministic=True)
    graph.replay()
    assert all(map(torch.equal, results, expected))
    with (
        pytest.raises(ArgumentError, match="before the capture"),
        pytest.warns(UserWarning, match="Graph is empty"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        rf.flash_attention(*tensors, mask=rf.Causal() & rf.Documents([0, 5, 1024]))


@needs_hopper
def test_each_stream_makes_its_own_tables() -> None:
    tensors, documents = gpu_inputs(2048), on_gpu([0, 700, 2048])
    expected = results_of(rf.Causal() & rf.Documents([0, 700, 2048]), tensors, deterministic=True)
    torch.cuda._sleep(20_000_000)
    results_of(rf.Causal() & documents, tensors, deterministic=True)  # its tables wait behind the sleep
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fresh = on_gpu([0, 700, 2048])
        got = results_of(rf.Causal() & fresh, tensors, deterministic=True)
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, expected))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = results_of(rf.Causal() & documents, tensors, deterministic=True)
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, expected))


@needs_hopper
def test_lengths_live_until_another_stream_has_read_them() -> None:
    tensors = gpu_inputs(1024)
    expected = results_of(rf.Causal() & rf.Documents([0, 300, 1024]), tensors, deterministic=True)
    mask, side = rf.Causal() & on_gpu([0, 300, 1024]), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        got = results_of(mask, tensors, deterministic=True)
    del mask
    others = [torch.full((3,), 7, device="cuda") for _ in range(1000)]  # in the memory of the lengths, if it is free
    torch.cuda.synchronize()
    assert len(others) == 1000
    assert all(map(torch.equal, got, expected))


@needs_hopper
def test_values_are_read_where_the_host_needs_them() -> None:
    tensors, documents = gpu_inputs(512), on_gpu([0, 200, 512])
    q, k, v = tensors
    for call in (
        lambda mask: rf.flash_attention(*tensors, mask=mask, softcap=5.0),
        lambda mask: rf.flash_attention(*tensors, mask=mask, options=rf.AttentionOptions(backend="triton")),
        lambda mask: rf.ring_attention(q, k, v, rf.ContextParallel.local(2), mask=mask),
    ):
        assert torch.equal(
            as_tensor(call(rf.Causal() & documents)), as_tensor(call(rf.Causal() & rf.Documents([0, 200, 512])))
        )
    assert documents == rf.Documents([0, 200, 512])
    with pytest.raises(ArgumentError, match="never falling"):
        hash(on_gpu([0, 300, 200, 512]))


_WRONG = """
import torch, ringflash as rf
q, k, v = (torch.randn(1, 1024, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
ends = torch.tensor([0, 300, 200, 1024], device="cuda")
rf.flash_attention(q, k, v, mask=rf.Causal() & rf.Documents(ends, device_check={check}))
torch.cuda.synchronize()
print("went on")
"""


@needs_hopper
@pytest.mark.parametrize("check", [True, False])
def test_a_gpu_checks_the_lengths(check: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRONG.format(check=check)], capture_output=True, text=True, timeout=300
    )
    assert ("went on" in done.stdout) == (not check)
    if check:
        assert "cu_seqlens must begin at 0" in done.stderr
