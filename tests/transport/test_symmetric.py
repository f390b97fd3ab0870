"""The symmetric transport: the same bits at any size as NCCL, or as virtual ranks if all ranks share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it

import ringflash as rf
from ringflash import torch_private
from ringflash.errors import ArgumentError
from ringflash.ring import cuda_graphs, schedule, tiles
from ringflash.transport import rendezvous
from tests.helpers import one_gpu
from tests.helpers.accuracy import Problem, as_tensor
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.skipif(one_gpu.GPUS == 0, reason="needs a GPU")
WORLDS = one_gpu.WORLDS

MASKS = [None, rf.Causal(), rf.Causal() & rf.SlidingWindow(300), rf.Causal() & rf.Documents([0, 100, 900, 1531])]
REPEATABLE = rf.AttentionOptions(deterministic=True)


def _call(context: rf.ContextParallel, problem: Problem) -> list[Tensor]:
    """Returns this rank's shards of out, dq, dk and dv."""
    if context.transport_kind == "local":
        place = rf.ContextParallel(dist.group.WORLD, context.layout, transport="symmetric")
        whole = problem.mapped(lambda x: x.cuda()).ring(context, deterministic=True)
        return [place.shard(x) for x in whole]
    local = problem.mapped(lambda x: context.shard(x).cuda())
    q, k, v = (x.requires_grad_() for x in (local.q, local.k, local.v))
    out = as_tensor(rf.ring_attention(q, k, v, context, mask=problem.mask, options=REPEATABLE))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), local.dout)]


def _contexts(layout: str, hops: str = "ring") -> tuple[rf.ContextParallel, rf.ContextParallel]:
    """Returns a symmetric context and a reference with the same bits: NCCL, or virtual ranks if ranks share a GPU."""
    symmetric = rf.ContextParallel(dist.group.WORLD, layout, transport="symmetric", hops=hops)
    if one_gpu.is_shared(symmetric.world_size):
        return symmetric, rf.ContextParallel.local(symmetric.world_size, layout, hops=hops)
    return symmetric, rf.ContextParallel(dist.group.WORLD, layout, transport="nccl", hops=hops)


def _compare(layout: str, hops: str) -> str:
    symmetric, nccl = _contexts(layout, hops)
    _, ring = _contexts(layout)
    reference = "local" if one_gpu.is_shared(symmetric.world_size) else "nccl"
    assert (symmetric.transport_kind, nccl.transport_kind) == ("symmetric", reference)
    for seqlen, batch in ((1531, 2), (64, 1), (4096, 1)):  # kept memory is too large, then too small
        for dtype in (torch.bfloat16, torch.float32):
            for index, mask in enumerate(MASKS if seqlen == 1531 else MASKS[:3]):
                problem = Problem.random(
                    seqlen=seqlen, batch=batch, dtype=dtype, heads=(8, 2), headdim=64, mask=mask, seed=index
                )
                results = (_call(context, problem) for context in (symmetric, nccl, ring))
                for a, b, c in zip(*results, strict=True):
                    assert torch.equal(a, b), (seqlen, dtype, mask)
                    torch.testing.assert_close(a, c, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)
    return rf.ContextParallel(dist.group.WORLD, layout).transport_kind


@pytest.mark.parametrize("hops", ["ring", "grouped"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", WORLDS)
def test_same_bits_as_nccl(world: int, layout: str, hops: str) -> None:
    assert run_ranks(world, _compare, layout, hops, backend="nccl") == ["symmetric"] * world


def _after_exchanges_of_some() -> None:
    """Makes an exchange that only rank 0 takes part in, as a ring of some ranks does, and then a ring of all ranks."""
    if dist.get_rank() == 0:
        memory = torch_private.allocate_shared(2**21, torch.device("cuda", torch.cuda.current_device()))
        store = HashStore()
        alone = torch_private.name_group("alone", 0, 1, store)
        torch_private.share(memory, "alone")
        next(rendezvous._EXCHANGES)
        assert alone.size() == 1
    symmetric, nccl = _contexts("zigzag")
    problem = Problem.random(seqlen=512, batch=1, mask=rf.Causal())
    assert all(torch.equal(a, b) for a, b in zip(_call(symmetric, problem), _call(nccl, problem), strict=True))


@pytest.mark.parametrize("world", WORLDS[:1])
def test_ranks_that_made_other_numbers_of_exchanges(world: int) -> None:
    run_ranks(world, _after_exchanges_of_some, backend="nccl")


def _repeat(hops: str) -> None:
    """Runs calls without a pause in which a late rank could catch up."""
    symmetric, nccl = _contexts("zigzag", hops)
    problems = [Problem.random(seqlen=2048, batch=1, mask=rf.Causal(), seed=seed) for seed in range(4)]
    expected = [_call(nccl, problem) for problem in problems]
    results = []
    for index in range(100):
        if index % 10 == dist.get_rank():
            torch.cuda._sleep(20_000_000)  # makes this rank late
        results.append(_call(symmetric, problems[index % 4]))
    for index, result in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(result, expected[index % 4], strict=True)), index


@pytest.mark.parametrize("hops", ["ring", "grouped"])
@pytest.mark.parametrize("world", WORLDS)
def test_calls_one_after_another(world: int, hops: str) -> None:
    run_ranks(world, _repeat, hops, backend="nccl")


def _replay(transport: str, hops: str) -> None:
    """Captures forward and backward in a CUDA graph, and replays it with other inputs, also after a larger call."""
    context = rf.ContextParallel(dist.group.WORLD, transport=transport, hops=hops)
    _, nccl = _contexts("zigzag", hops)
    first, second = (Problem.random(seqlen=1024, batch=1, mask=rf.Causal(), seed=seed) for seed in range(2))
    local = first.mapped(lambda x: context.shard(x).cuda())
    q, k, v = (x.requires_grad_() for x in (local.q, local.k, local.v))

    def step() -> list[Tensor]:
        out = as_tensor(rf.ring_attention(q, k, v, context, mask=first.mask, options=REPEATABLE))
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), local.dout)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for index, problem in enumerate((second, first, second)):
        if index == 2:  # memory grows, and the graph's memory stays
            _call(context, Problem.random(seqlen=32768, batch=1, mask=rf.Causal()))
        with torch.no_grad():
            for x, whole in ((q, problem.q), (k, problem.k), (v, problem.v), (local.dout, problem.dout)):
                x.copy_(context.shard(whole))
        graph.replay()
        for a, b in zip(captured, _call(nccl, problem), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("transport", "hops"),
    [("symmetric", "ring"), *((transport, "grouped") for transport in one_gpu.TRANSPORTS)],
)
@pytest.mark.parametrize("world", WORLDS)
def test_replay_of_a_graph(world: int, transport: str, hops: str) -> None:
    run_ranks(world, _replay, transport, hops, backend="nccl")


def _replayed_calls(hops: str) -> int:
    """Runs a context that captures its passes, with several shapes and inputs; some calls are never captured."""
    context = rf.ContextParallel(dist.group.WORLD, transport="symmetric", hops=hops, cuda_graphs=True)
    _, nccl = _contexts("zigzag", hops)
    masks = (rf.Causal(), rf.Causal() & rf.SlidingWindow(100), rf.Causal() & rf.Documents([0, 100, 1024]))
    for turn in range(4):
        for mask, heads in ((masks[0], (8, 2)), (masks[1], (8, 2)), (masks[2], (8, 2)), (masks[0], (4, 4))):
            problem = Problem.random(seqlen=1024, batch=1, heads=heads, mask=mask, seed=turn)
            for a, b in zip(_call(context, problem), _call(nccl, problem), strict=True):
                assert torch.equal(a, b), (turn, mask, heads)
    assert context.graphs is not None
    return len(context.graphs)


@pytest.mark.parametrize("hops", ["ring", "grouped"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_context_that_captures(world: int, hops: str) -> None:
    graphs = run_ranks(world, _replayed_calls, hops, backend="nccl")
    assert graphs == [6] * world  # forward and backward, except under documents


def _captured_without_a_request(hops: str) -> None:
    """Runs contexts until they replay, with q, k and v of one product, and with a capture that fails on one rank."""
    torch.manual_seed(0)
    problem = Problem.random(seqlen=1024, batch=2, heads=(8, 2), mask=rf.Causal())
    context, plain = (
        rf.ContextParallel(dist.group.WORLD, transport="symmetric", hops=hops, cuda_graphs=graphs)
        for graphs in ("auto", False)
    )
    failing = rf.ContextParallel(dist.group.WORLD, transport="symmetric", hops=hops, timeout=20)  # of another name
    assert plain.graphs is None
    assert context.graphs is not None
    assert failing.graphs is not None
    local = problem.mapped(lambda x: context.shard(x).cuda())
    fused = torch.cat([local.q, local.k, local.v], 2).requires_grad_()

    def passes(context: rf.ContextParallel) -> list[Tensor]:
        q, k, v = fused.split([8, 2, 2], 2)
        out = as_tensor(rf.ring_attention(q, k, v, context, mask=problem.mask, options=REPEATABLE))
        return [out.detach(), *torch.autograd.grad(out, fused, local.dout)]

    def empty_results(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        assert failing.graphs is not None
        if failing.graphs.is_attempt:
            raise RuntimeError("cannot be captured")
        return tiles.empty_results(*inputs)

    expected = passes(plain)
    if dist.get_rank() == 1:
        schedule.empty_results = empty_results
    for call in range(cuda_graphs.UNASKED + 3):
        for each in (context, failing):
            for a, b in zip(passes(each), expected, strict=True):
                assert torch.equal(a, b), call
    assert len(context.graphs) == 2
    assert len(failing.graphs) == 2 * (dist.get_rank() != 1)
    assert failing.graphs.takes(failing.plan(problem.mask, 1024), 1024) == (dist.get_rank() != 1)


@pytest.mark.parametrize("hops", ["ring", "grouped"])
@pytest.mark.parametrize("world", WORLDS)
def test_passes_that_recur_are_captured_without_a_request(world: int, hops: str) -> None:
    run_ranks(world, _captured_without_a_request, hops, backend="nccl")


def _elsewhere() -> list[str]:
    context = rf.ContextParallel(dist.group.WORLD, transport="symmetric")
    texts: list[Any] = []
    others = [] if one_gpu.is_shared(dist.get_world_size()) else [f"cuda:{(dist.get_rank() + 1) % 2}"]
    for device in ("cpu", *others):
        x = torch.zeros(1, 8, 2, 16, device=device)
        with pytest.raises(ArgumentError) as caught:
            rf.ring_attention(x, x, x, context)
        texts.append(str(caught.value))
    return texts


def test_tensors_on_another_device() -> None:
    for rank, texts in enumerate(run_ranks(2, _elsewhere, backend="nccl")):
        for text in texts:
            assert text.startswith(f"q: expected a tensor on cuda:{rank % one_gpu.GPUS}, as the context, got")
