"""The peer USP of the package yunchang: heads over pairs of neighbouring ranks, and a zigzag ring over the pairs.

Its ring calls FlashAttention-4's kernels here if they are installed, else torch's FlashAttention-2. The package itself
knows older releases of FlashAttention.
Source: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringflash as rf
from ringflash.bench.attention.single import Unavailable, package_of
from ringflash.bench.common.flash_kernels import Kernels
from ringflash.bench.common.problem import Contender, Problem, Setup
from ringflash.bench.ring.ulysses import check_split

HEADS = 2  # ranks that share the heads


def usp(mesh: DeviceMesh, kernels: Kernels) -> Contender:
    """Returns the contender `LongContextAttention` over all ranks of `mesh`, whose number must be even.

    The length of the sequence must be a multiple of twice the number of ranks.
    """
    is_even = mesh.size() % HEADS == 0
    shape = (mesh.size() // HEADS, HEADS) if is_even else (mesh.size(), 1)
    # A mesh of its own: a call that fails leaves messages behind, which other contenders must not receive.
    both = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("ring", "heads"))

    @contextmanager
    def prepare(problem: Problem) -> Generator[Setup, None, None]:
        if not is_even:
            raise Unavailable(f"takes numbers of ranks that {HEADS} divides, not {mesh.size()}")
        call, chunks = attention(kernels, both["ring"].get_group(), both["heads"].get_group()), 2 * mesh.size()
        check_split(HEADS, problem.q.shape[2], problem.k.shape[2], problem.seqlen)
        if problem.k.shape[2] % HEADS:
            raise Unavailable(f"takes KV heads that {HEADS} divides, not {problem.k.shape[2]}")
        if problem.seqlen % chunks:
            raise Unavailable(f"takes multiples of {chunks} tokens, not {problem.seqlen}")
        context = rf.ContextParallel(both, layout="zigzag")  # the same chunks on the same ranks
        local = problem.map(context.shard)
        yield Setup(local.leaves(), local.dout, partial(call, causal=True), context.unshard)

    return prepare


def attention(kernels: Kernels, ring: dist.ProcessGroup, heads: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Returns the package's module over the two groups, with its ring on `kernels`.

    Raises:
        Unavailable: the package is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the package uses torch.jit.script
        package = package_of("yunchang")
    zigzag, groups = package_of("yunchang.ring.zigzag_ring_flash_attn"), package_of("yunchang.globals").PROCESS_GROUP
    zigzag.select_flash_attn_impl = partial(_implementation, kernels)
    groups.RING_PG, groups.ULYSSES_PG = ring, heads
    return package.LongContextAttention(ring_impl_type="zigzag")


def _implementation(kernels: Kernels, attn_type: Any, stage: str) -> Callable[..., Any]:
    """Returns the function that the package's ring calls in the stage "fwd-only" or "bwd-only".

    The benchmark uses no dropout, window, softcap or ALiBi, so their parameters are ignored.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, *, causal: bool, **ignored: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = kernels.forward(q, k, v, softmax_scale, causal)
        return out, lse

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **_: Any) -> None:
        dq, dk, dv, _dropout_p, softmax_scale, causal, *_ignored = rest
        kernels.backward(dout.contiguous(), q, k, v, out, lse.contiguous(), softmax_scale, causal, dq, dk, dv)

    return {"fwd-only": forward, "bwd-only": backward}[stage]
