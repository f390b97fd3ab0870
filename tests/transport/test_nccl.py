"""The ring over NCCL: the same bits as virtual ranks on one GPU, within the bars for every layout, mask and dtype."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate
from tests.helpers.distributed import run_ranks
from tests.kernels.triton.test_backend import ROUNDING

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

REPEATABLE = rf.AttentionOptions(deterministic=True)
CASES: list[dict[str, Any]] = [
    {"seqlen": seqlen, "dtype": dtype, "mask": mask, "heads": (8, 2), "headdim": headdim, "batch": batch}
    for seqlen, headdim, batch in ((4096, 128, 1), (1531, 64, 2))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for mask in (None, rf.Causal())
]


def _shards(layout: str, hops: str) -> list[list[Tensor]]:
    """Returns this rank's shards of out, dq, dk and dv in every case."""
    context = rf.ContextParallel(dist.group.WORLD, layout, transport="nccl", hops=hops)
    results = []
    for case in CASES:
        problem = Problem.random(**case).mapped(lambda x: context.shard(x).cuda())
        q, k, v = (x.requires_grad_() for x in (problem.q, problem.k, problem.v))
        out = as_tensor(rf.ring_attention(q, k, v, context, mask=problem.mask, options=REPEATABLE))
        results.append([x.cpu() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout))])
    return results


@pytest.mark.parametrize(("layout", "hops"), [("zigzag", "ring"), ("contiguous", "ring"), ("zigzag", "grouped")])
@pytest.mark.parametrize("world", [2, 4])
def test_same_bits_as_virtual_ranks_and_within_the_bars(world: int, layout: str, hops: str) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    by_rank = run_ranks(world, _shards, layout, hops, backend="nccl")
    context = rf.ContextParallel.local(world, layout, hops=hops)
    for index, case in enumerate(CASES):
        problem = Problem.random(**case, device="cuda")
        whole = [context.unshard(torch.cat(x, 1)).cuda() for x in zip(*(r[index] for r in by_rank), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(whole, problem.ring(context, deterministic=True), strict=True))
        assert_accurate(whole, problem, rounding=ROUNDING)
