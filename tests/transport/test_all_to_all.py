"""Ranks in two dimensions, and a double ring, over gloo: the same bits as virtual ranks, and refused calls."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringflash as rf
from ringflash.errors import ArgumentError, RankMismatch
from tests.helpers.accuracy import Problem
from tests.helpers.distributed import run_ranks

PROBLEMS = [
    Problem.random(seqlen=37, heads=(4, 2), dtype=torch.float64, mask=rf.Causal(), dropout=rf.Dropout(0.1, seed=3)),
    Problem.random(seqlen=96, heads=(6, 3), dtype=torch.float32, mask=rf.Documents([0, 30, 41, 96]), batch=1),
    Problem.random(seqlen=50, heads=(8, 1), headdim=(32, 16), dtype=torch.bfloat16, alibi=2),
]


def _options(problem: Problem, device: str) -> dict[str, Any]:
    slopes = None if problem.alibi_slopes is None else problem.alibi_slopes.to(device)
    options = rf.AttentionOptions(alibi_slopes=slopes, return_lse=True, deterministic=True)
    return {"mask": problem.mask, "dropout": problem.dropout, "options": options}


def _attend(context: rf.ContextParallel, device: str = "cpu") -> list[Tensor]:
    """Returns this process's shards of out, lse, dq, dk and dv of every problem, with rows in dimension 1."""
    results = []
    for given in PROBLEMS:
        problem = given.mapped(lambda x: context.shard(x).to(device))
        q, k, v = (x.requires_grad_() for x in (problem.q, problem.k, problem.v))
        out, lse = rf.ring_attention(q, k, v, context, **_options(problem, device))
        results += [out.detach(), lse.detach().transpose(1, 2)]
        results += torch.autograd.grad(out, (q, k, v), problem.dout)
    return [x.cpu() for x in results]


def _four_ranks() -> tuple[int, list[Tensor], list[Tensor], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    context = rf.ContextParallel(mesh)
    shards = _attend(context)
    wholes = [context.unshard(x) for x in shards]

    shard = context.shard(torch.arange(22.0), 0).requires_grad_()
    (context.unshard(shard, 0) * (context.rank + 1)).sum().backward()
    assert shard.grad is not None
    assert bool((shard.grad == 1 + 2 + 3 + 4).all())

    other_order = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "ring"))
    turned = rf.ContextParallel(other_order, "contiguous")
    assert turned.grid.group(0) == (0, 2)
    again = [turned.unshard(x) for x in _attend(turned)]
    for a, b in zip(wholes, again, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert rf.ContextParallel(mesh, "contiguous")._control is context._control
    of_three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "ring", "heads"))
    assert rf.ContextParallel(of_three["ring", "heads"]).grid == context.grid
    _decode(context)
    return context.rank, shards, _attend(rf.ContextParallel(dist.group.WORLD, inner_ring=2)), _refusals(context)


def _decode(context: rf.ContextParallel) -> None:
    """Checks a cache that is sharded over the ranks of both dimensions."""
    generator = torch.Generator().manual_seed(1)
    q, cache = (torch.randn(2, rows, 4, 16, generator=generator) for rows in (3, 40))
    shard = cache[:, context.rank * 10 : context.rank * 10 + 10]
    out = rf.flash_decode(q, shard, shard, cache_seqlens=10, context=context)
    torch.testing.assert_close(out, rf.flash_decode(q, cache, cache, cache_seqlens=40), rtol=0, atol=1e-6)


def _refusals(context: rf.ContextParallel) -> list[str]:
    raised = []
    for dims, names in (((2, 2), ("data", "heads")), ((2, 2), None), ((1, 2, 2), ("data", "ring", "heads"))):
        with pytest.raises(ArgumentError) as caught:
            rf.ContextParallel(init_device_mesh("cpu", dims, mesh_dim_names=names))
        raised.append(str(caught.value))
    with pytest.raises(ArgumentError) as caught:
        rf.ContextParallel(DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("ring", "heads")))
    raised.append(str(caught.value))
    q = torch.zeros(1, 4, 3, 16)
    with pytest.raises(ArgumentError) as caught:
        rf.ring_attention(q, q, q, context)
    raised.append(str(caught.value))
    q = torch.zeros(1, 4, 4, 32 if context.rank == 2 else 16)
    with pytest.raises(RankMismatch) as mismatch:
        rf.ring_attention(q, q, q, context)
    return [*raised, str(mismatch.value)]


REFUSALS = [
    "mesh: expected one dimension, or two named \"ring\" and \"heads\", got dimensions ('data', 'heads')",
    'mesh: expected one dimension, or two named "ring" and "heads", got 2 without names',
    "mesh: expected one dimension, or two named \"ring\" and \"heads\", got dimensions ('data', 'ring', 'heads')",
    "mesh: expected ranks that rise along both dimensions, got [[0, 1], [3, 2]]",
    "nheads: expected a multiple of the 2 ranks that heads are split over, got 3",
    "ranks disagree on headdim: rank 2 against the rest",
]


def test_four_processes_in_two_dimensions() -> None:
    results = run_ranks(4, _four_ranks)
    for which, local in ((1, rf.ContextParallel.local(4, heads=2)), (2, rf.ContextParallel.local(4, inner_ring=2))):
        for parts, whole in zip(zip(*(result[which] for result in results), strict=True), _attend(local), strict=True):
            assert torch.equal(torch.cat(parts, dim=1), whole)
    for rank, (own, *_, refusals) in enumerate(results):
        assert own == rank
        for text, start in zip(refusals, REFUSALS, strict=True):
            assert text.startswith(start)


def _on_gpus(heads: int, inner_ring: int | None) -> list[Tensor]:
    sizes = dist.get_world_size() // heads, heads
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("ring", "heads"))
    return _attend(rf.ContextParallel(mesh, inner_ring=inner_ring), "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("world", "heads", "inner"), [(2, 2, None), (2, 1, 1), (4, 2, None), (4, 2, 1), (4, 1, 2)])
def test_gpus_give_the_bits_of_virtual_ranks(world: int, heads: int, inner: int | None) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    by_rank = run_ranks(world, _on_gpus, heads, inner, backend="nccl")
    expected = _attend(rf.ContextParallel.local(world, heads=heads, inner_ring=inner), "cuda")
    for parts, whole in zip(zip(*by_rank, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(parts, dim=1), whole)
