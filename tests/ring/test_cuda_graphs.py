from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.ring import cuda_graphs
from ringflash.ring.cuda_graphs import GraphCache, _by_dtype, _Memory
from ringflash.torch_private import copy_each
from tests.distributed import run_ranks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_calls_of_a_kind_are_captured_and_the_last_kinds_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST", 2)
    replays, ran, started = GraphCache(), list[str](), list[str]()

    def call(kind: str, x: Tensor, y: Tensor | None) -> Tensor:
        def compute(x: Tensor, y: Tensor | None) -> tuple[Tensor]:
            ran.append(kind)
            return (2 * x if y is None else x @ y,)

        (result,) = replays.run(kind, compute, (x, y), nullcontext, lambda _: started.append(kind))
        return result

    x = torch.randn(4, 8, device="cuda").T  # strided
    results = [call("a", x + i, None) for i in range(5)]
    for i, result in enumerate(results):
        torch.testing.assert_close(result, 2 * (x + i), rtol=0, atol=0)
    assert (ran, started) == (["a"] * 3, ["a"] * 3)  # run eagerly twice, captured, then replayed
    torch.testing.assert_close(call("a", x, x.T.contiguous()), x @ x.T)  # another input makes another key
    assert len(replays) == 1
    call("b", x, None)
    call("b", x, None)
    assert len(replays) == 1  # the graph of "b"; the first graph of "a" was evicted
    call("a", x, None)
    assert ran[-1] == "a"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_tables_that_were_dropped_between_calls_are_uploaded_again() -> None:
    @device_tables(maxsize=1)
    def table(n: int) -> Tensor:
        return uploaded([np.arange(n)], torch.device("cuda", 0))[0]

    replays, x = GraphCache(), torch.ones(3, device="cuda")
    for call in range(4):
        (result,) = replays.run("a", lambda x: (x + table(3),), (x + call,), nullcontext, lambda _: None)
        assert result.tolist() == [1 + call, 2 + call, 3 + call]
        table(4)
    assert len(replays) == 1


def test_a_pass_is_captured_right_after_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()

    class Graph:
        def __init__(self, compute: Callable[..., Any], inputs: Any, *_: Any) -> None:
            events.append("capture")
            compute(*inputs)

        def replay(self, inputs: Any) -> tuple[int]:
            events.append("replay")
            return (7,)

    def compute(x: None) -> tuple[int]:
        events.append("compute")
        return (7,)

    monkeypatch.setattr(cuda_graphs, "_Graph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    replays: GraphCache = GraphCache()
    for expected in (["compute"], ["compute", "capture", "compute"], ["replay"], ["replay"]):
        events.clear()
        run: Any = replays.run
        assert run("a", compute, (None,), nullcontext, lambda _: None) == (7,)
        assert events == expected


def test_a_capture_that_fails_raises_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unjoined:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("capturing stream has unjoined work")

    def no_tables() -> tuple[Tensor]:
        raise ArgumentError("mask", expected="tables", got="none", remedy="Make the same call before the capture.")

    graph: Any = None
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: Unjoined())
    with pytest.raises(ArgumentError, match="mask: expected tables"):
        cuda_graphs._captured(graph, no_tables, (), None)
    with pytest.raises(RuntimeError, match="unjoined"):
        cuda_graphs._captured(graph, lambda: (torch.zeros(1),), (), None)


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


def _on_cpus() -> str:
    with pytest.raises(ArgumentError) as caught:
        rf.ContextParallel(dist.group.WORLD, cuda_graphs=True)
    return str(caught.value)


def test_graphs_take_memory_that_peers_see() -> None:
    text = run_ranks(1, _on_cpus)[0]
    assert "cuda_graphs: expected the symmetric transport, got gloo" in text
