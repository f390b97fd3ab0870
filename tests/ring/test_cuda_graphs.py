from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
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
    assert (ran, started) == (["a"] * 2, ["a"] * 4)  # run eagerly, captured, then replayed
    torch.testing.assert_close(call("a", x, x.T.contiguous()), x @ x.T)  # another input makes another key
    assert len(replays) == 1
    call("b", x, None)
    call("b", x, None)
    assert len(replays) == 1  # the graph of "b"; the first graph of "a" was evicted
    call("a", x, None)
    assert ran[-1] == "a"


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
