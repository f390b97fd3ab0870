"""The peer TransformerEngine: its ring of messages between pairs of ranks ("p2p"), if its package is installed.

Source: https://github.com/NVIDIA/TransformerEngine, `DotProductAttention`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.bench.attention.single import Unavailable, package_of
from ringflash.bench.common.problem import Contender, Problem, Setup


def transformer_engine(mesh: DeviceMesh) -> Contender:
    """Returns the contender `DotProductAttention` over all ranks of `mesh`.

    The length of the sequence must be a multiple of twice the number of ranks.
    """
    # A separate group: a call that fails leaves messages behind, which other contenders must not receive.
    group, ranks = dist.new_group(), list(range(mesh.size()))

    @contextmanager
    def prepare(problem: Problem) -> Generator[Setup, None, None]:
        chunks = 2 * len(ranks)
        if problem.seqlen % chunks:
            raise Unavailable(f"takes multiples of {chunks} tokens, not {problem.seqlen}")
        nheads, headdim = problem.q.shape[2:]
        attention = package_of("transformer_engine.pytorch").DotProductAttention(
            nheads,
            headdim,
            num_gqa_groups=problem.k.shape[2],
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal",
        )
        attention.set_context_parallel_group(group, ranks, torch.cuda.Stream(), "p2p")

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v).unflatten(-1, (nheads, headdim))  # from (batch, rows, nheads * headdim)

        context = rf.ContextParallel(mesh, layout="zigzag")  # the same chunks on the same ranks
        local = problem.map(context.shard)
        yield Setup(local.leaves(), local.dout, call, context.unshard)

    return prepare
