"""All layouts, masks, schedules and transports, on CPUs or GPUs: the same bits as virtual ranks, within the bars."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Full, Mask
from tests.helpers import one_gpu
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate
from tests.helpers.distributed import run_ranks
from tests.helpers.pairs import all_pairs
from tests.helpers.strategies import block_sparse
from tests.kernels.triton.test_backend import ROUNDING

ON_GPUS = one_gpu.GPUS > 0
WORLDS = one_gpu.WORLDS if ON_GPUS else [2, 3]
TRANSPORTS = sorted(one_gpu.TRANSPORTS, reverse=True) if ON_GPUS else ["auto"]
SEQLEN = 531 if ON_GPUS else 101
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": rf.Causal(),
    "window": rf.Causal() & rf.SlidingWindow(SEQLEN // 5),
    "documents": rf.Causal() & rf.Documents([0, 7, 7, SEQLEN // 3, SEQLEN - 20, SEQLEN]),
    "prefix": rf.PrefixLM([SEQLEN // 2, 3]),
    "padding": rf.Causal() & rf.KeyPadding([SEQLEN, 17]),
    "sparse": block_sparse(SEQLEN, 32, seed=0, density=0.4),
    "tree": rf.Causal() & rf.Tree([-1, 0, 1, 1, 2, 2, 3, 3, 4], start=SEQLEN - 9),
}
HOPS = ("ring", "grouped")
# GPUs have kernels of their own for each mask and order of sums, and run all combinations.
CASES = [*(product if ON_GPUS else all_pairs)(HOPS, [*MASKS], (True, False))]


def _differences(layout: str) -> list[str]:
    """Returns the calls in which this rank does not get the bits of virtual ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank % one_gpu.GPUS}" if ON_GPUS else "cpu"
    found = []
    for hops in HOPS:
        virtual = rf.ContextParallel.local(world, layout, hops=hops)
        contexts = [rf.ContextParallel(dist.group.WORLD, layout, name, hops=hops) for name in TRANSPORTS]
        for name, mask in MASKS.items():
            dtype = torch.bfloat16 if ON_GPUS else torch.float32
            problem = Problem.random(seqlen=SEQLEN, heads=(4, 2), headdim=64, dtype=dtype, mask=mask, device=device)
            for deterministic in (x for x in (True, False) if (hops, name, x) in CASES):
                whole = [torch.empty_like(x) for x in (problem.q, problem.q, problem.k, problem.v)]
                if rank == 0:
                    try:
                        whole = problem.ring(virtual, deterministic=deterministic)
                        assert_accurate(whole, problem, rounding=ROUNDING)
                    except Exception as error:  # reported at the end: other ranks wait for the next step
                        found.append(f"{virtual} {name}: {error!r}")
                whole = [one_gpu.broadcast(x) for x in whole]
                alike = torch.equal if deterministic or not ON_GPUS else _are_close
                for context in contexts if deterministic else contexts[:1]:
                    local = problem.mapped(lambda x, context=context, mask=mask: context.shard(x, mask=mask))
                    q, k, v = (x.requires_grad_() for x in (local.q, local.k, local.v))
                    options = rf.AttentionOptions(deterministic=deterministic)
                    out = as_tensor(rf.ring_attention(q, k, v, context, mask=mask, options=options))
                    got = [out.detach(), *torch.autograd.grad(out, (q, k, v), local.dout)]
                    expected = (context.shard(x, mask=mask) for x in whole)
                    if not all(map(alike, got, expected)):
                        found.append(f"{context} {name} {'deterministic' if deterministic else 'fast'}")
    return found


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Returns whether two results are close, for sums that a GPU adds in any order."""
    return torch.allclose(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_ring(world: int, layout: str) -> None:
    assert run_ranks(world, _differences, layout, backend="nccl" if ON_GPUS else "gloo") == [[]] * world
