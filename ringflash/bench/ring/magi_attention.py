"""The peer MagiAttention: chunks of the sequence dealt out by its solver, if its package is installed.

Source: https://github.com/SandAI-org/MagiAttention.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringflash.bench.attention.single import Unavailable, package_of
from ringflash.bench.common.problem import Contender, Problem, Setup

CHUNK = 512  # tokens of a chunk in the package's examples


def magi_attention(mesh: DeviceMesh) -> Contender:
    """Returns the contender `calc_attn` over all ranks of `mesh`, for one sequence a batch.

    The length of the sequence must be a multiple of 512 times the number of ranks; the package would pad others.
    """
    # A separate group: a call that fails leaves messages behind, which other contenders must not receive.
    group = dist.new_group()

    @contextmanager
    def prepare(problem: Problem) -> Generator[Setup, None, None]:
        api, seqlen, chunks = package_of("magi_attention.api"), problem.seqlen, CHUNK * mesh.size()
        if seqlen % chunks:
            raise Unavailable(f"takes multiples of {chunks} tokens, not {seqlen}")
        if problem.q.shape[0] != 1:
            raise Unavailable(f"takes one sequence, not a batch of {problem.q.shape[0]}")
        everything = api.AttnRanges.from_ranges([[0, seqlen]])
        key = api.magi_attn_flex_key(
            q_ranges=everything,
            k_ranges=everything,
            attn_mask_type=[api.AttnMaskType.CAUSAL],
            total_seqlen_q=seqlen,
            total_seqlen_k=seqlen,
            num_heads_q=problem.q.shape[2],
            num_heads_kv=problem.k.shape[2],
            head_dim=problem.q.shape[3],
            pad_size=0,
            chunk_size=CHUNK,
            cp_group_or_mesh=group,
        )

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, *_ = api.calc_attn(q[0], k[0], v[0], key=key)
            return out[None]

        # The package has no dimension for the batch.
        shard, whole = (partial(_without_batch, move, key) for move in (api.dispatch, api.undispatch))
        local = problem.map(shard)
        yield Setup(local.leaves(), local.dout, call, whole)

    return prepare


def _without_batch(move: Any, key: Any, x: Tensor) -> Tensor:
    return move(x[0], key=key)[None]
