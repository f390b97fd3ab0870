"""CUDA graphs of passes: when a pass is captured and replayed, which graphs are kept, and captures that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError, PeerLost
from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.ring import cuda_graphs
from ringflash.ring.cuda_graphs import GraphCache, _by_dtype, _Memory
from ringflash.torch_private import copy_each
from tests.helpers.distributed import run_ranks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_calls_of_a_kind_are_captured_and_the_last_kinds_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST", 2)
    graphs, ran, started = GraphCache(), list[str](), list[str]()

    def call(kind: str, x: Tensor, y: Tensor | None) -> Tensor:
        def compute(x: Tensor, y: Tensor | None) -> tuple[Tensor]:
            ran.append(kind)
            return (2 * x if y is None else x @ y,)

        (result,) = graphs.run(kind, compute, (x, y), nullcontext, lambda _: started.append(kind))
        return result

    x = torch.randn(4, 8, device="cuda").T  # strided
    results = [call("a", x + i, None) for i in range(5)]
    for i, result in enumerate(results):
        torch.testing.assert_close(result, 2 * (x + i), rtol=0, atol=0)
    assert (ran, started) == (["a"] * 3, ["a"] * 3)  # run eagerly twice, captured, then replayed
    torch.testing.assert_close(call("a", x, x.T.contiguous()), x @ x.T)  # another input makes another key
    assert len(graphs) == 1
    call("b", x, None)
    call("b", x, None)
    assert len(graphs) == 1  # the graph of "b"; the first graph of "a" was evicted
    call("a", x, None)
    assert ran[-1] == "a"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_tables_that_were_dropped_between_calls_are_uploaded_again() -> None:
    @device_tables(maxsize=1)
    def table(n: int) -> Tensor:
        return uploaded([np.arange(n)], torch.device("cuda", 0))[0]

    graphs, x = GraphCache(), torch.ones(3, device="cuda")
    for call in range(4):
        (result,) = graphs.run("a", lambda x: (x + table(3),), (x + call,), nullcontext, lambda _: None)
        assert result.tolist() == [1 + call, 2 + call, 3 + call]
        table(4)
    assert len(graphs) == 1


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events of graphs and of their cache, without a GPU."""
    events = list[str]()

    class Graph:
        def __init__(self, compute: Callable[..., Any], inputs: Any, *_: Any) -> None:
            events.append("capture")
            compute(*inputs)

        def replay(self, inputs: Any) -> tuple[int]:
            events.append("replay")
            return (7,)

    monkeypatch.setattr(cuda_graphs, "_Graph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    return events


def _call(graphs: GraphCache, events: list[str], kind: str = "a", x: Tensor | None = None) -> list[str]:
    """Calls a pass, and returns the events since the last call."""

    def compute(x: Tensor | None) -> tuple[int]:
        events.append("compute")
        return (7,)

    events.clear()
    run: Any = graphs.run
    assert run(kind, compute, (x,), nullcontext, lambda _: None) == (7,)
    return list(events)


def test_a_pass_is_captured_right_after_it_has_run(events: list[str]) -> None:
    graphs = GraphCache()
    for expected in (["compute"], ["compute", "capture", "compute"], ["replay"], ["replay"]):
        assert _call(graphs, events) == expected


def test_without_a_request_a_pass_is_captured_after_many_calls(events: list[str]) -> None:
    graphs = GraphCache(asked=False)
    for _ in range(cuda_graphs.UNASKED - 1):
        assert _call(graphs, events) == ["compute"]
    assert _call(graphs, events) == ["compute", "capture", "compute"]
    assert _call(graphs, events) == ["replay"]
    for kind in range(cuda_graphs.MOST - 1):  # kinds that do not recur
        assert _call(graphs, events, str(kind)) == ["compute"]
    assert _call(graphs, events, "another") == ["compute", "synchronize"]  # the graph leaves the cache
    assert _call(graphs, events, "yet another") == ["compute"]


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.zeros(2, 6, 4, 64, dtype=torch.bfloat16)[:, :, :2], True),  # of one product for q, k and v
        (torch.zeros(2, 5, 7), True),
        (torch.zeros(2, 6, 4, 64, dtype=torch.bfloat16)[..., :60], True),
        (torch.zeros(2, 6, 4, 60, dtype=torch.bfloat16)[..., :50], False),
        (torch.zeros(2, 6, 4, 64, dtype=torch.bfloat16)[..., 1:], False),
        (torch.zeros(2, 6, 4, 64).transpose(2, 3), False),
        (torch.zeros(2, 6, 1, 64).expand(-1, -1, 4, -1), False),
    ],
)
def test_without_a_request_kernels_get_tensors_like_their_copies(events: list[str], x: Tensor, taken: bool) -> None:
    graphs = GraphCache(asked=False)
    for _ in range(cuda_graphs.UNASKED):
        _call(graphs, events, x=x)
    assert ("capture" in events) == taken
    assert _call(graphs, events, x=x) == (["replay"] if taken else ["compute"])


def test_a_capture_that_fails_without_a_request_is_the_last(
    events: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = list[bool]()

    def graph(*_: Any) -> None:
        attempts.append(graphs.is_attempt)
        raise error

    plan = rf.ContextParallel.local(4).plan(None, 64)
    monkeypatch.setattr(cuda_graphs, "_Graph", type("_Graph", (), {"__new__": graph}))
    monkeypatch.setattr(cuda_graphs, "UNASKED", 1)
    graphs, error = GraphCache(asked=False), RuntimeError("operation not permitted")
    assert graphs.takes(plan, 1)
    assert _call(graphs, events) == ["compute"]
    assert not graphs.takes(plan, 1)
    assert (attempts, graphs.is_attempt) == ([True], False)
    assert "goes on without CUDA graphs" in caplog.text
    assert "operation not permitted" in caplog.text
    graphs, error = GraphCache(asked=False), PeerLost([1], 0, [], rank=0)
    with pytest.raises(PeerLost):  # a broken ring is not a failure of the capture
        _call(graphs, events)
    graphs, error = GraphCache(), RuntimeError("operation not permitted")
    _call(graphs, events)
    with pytest.raises(RuntimeError, match="not permitted"):
        _call(graphs, events)


def test_without_a_request_ranks_of_little_kv_are_captured() -> None:
    row = 8 * (128 + 128) * 2
    for hops in ("ring", "grouped"):
        context = rf.ContextParallel.local(4, hops=hops)
        for tokens, taken in ((16384, True), (16384 + 4, False)):
            for mask in (rf.Causal(), rf.Causal() & rf.SlidingWindow(64)):
                plan = context.plan(mask, tokens, row_bytes=row)
                assert GraphCache(asked=False).takes(plan, row) == taken
                assert GraphCache().takes(plan, row)


def test_a_capture_that_fails_raises_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streams:
        """Stands for the streams of a GPU; `graph` leaves its stream current when the capture cannot end, as torch."""

        current = "the caller's"

        @contextmanager
        def stream(self, stream: str) -> Iterator[None]:
            before, self.current = self.current, stream
            try:
                yield
            finally:
                self.current = before

        @contextmanager
        def graph(self, *_: Any, **__: Any) -> Iterator[None]:
            self.current = "the capture's"
            with suppress(ArgumentError):
                yield
            raise RuntimeError("capturing stream has unjoined work")

    def no_tables() -> tuple[Tensor]:
        raise ArgumentError("mask", expected="tables", got="none", remedy="Make the same call before the capture.")

    graph: Any = None
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "graph", streams.graph)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    with pytest.raises(ArgumentError, match="mask: expected tables"):
        cuda_graphs._captured(graph, no_tables, (), None)
    with pytest.raises(RuntimeError, match="unjoined"):
        cuda_graphs._captured(graph, lambda: (torch.zeros(1),), (), None)
    assert streams.current == "the caller's"


def test_inputs_share_memory_over_graphs_and_not_in_one() -> None:
    memory, q, k = _Memory(), torch.randn(2, 3), torch.randn(4)
    first, again = memory.of((q, None, k, q)), memory.of((k, q))
    assert [None if x is None else x.shape for x in first] == [q.shape, None, k.shape, q.shape]
    assert first[0] is not first[3]
    assert again[0] is first[2]
    assert again[1] is first[0]
    assert len(memory._known) == 3
    del first
    assert len(memory._known) == 2  # freed with its last user


def test_copies_are_of_every_dtype() -> None:
    sources = [torch.randn(3, 2).T, torch.arange(4), None, torch.randn(0), torch.randn(2)]
    targets = [None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in sources]
    launches = _by_dtype(targets)
    assert [places for places, _ in launches] == [[0, 4], [1]]
    for places, alike in launches:
        copy_each(alike, [sources[place] for place in places])
    for source, target in zip(sources, targets, strict=True):
        if source is not None and target is not None:
            assert torch.equal(source, target)


def _on_cpus() -> list[str]:
    texts = list[str]()
    for value in (True, 1, "always"):
        with pytest.raises(ArgumentError) as caught:
            rf.ContextParallel(dist.group.WORLD, cuda_graphs=value)  # pyright: ignore[reportArgumentType]
        texts.append(str(caught.value))
    assert rf.ContextParallel(dist.group.WORLD).graphs is None
    return texts


def test_graphs_take_memory_that_peers_see() -> None:
    *asked, unknown = run_ranks(1, _on_cpus)[0]
    assert ["cuda_graphs: expected the symmetric transport, got gloo" in text for text in asked] == [True] * 2
    assert "cuda_graphs: expected one of (True, False, 'auto'), got 'always'" in unknown
