"""Contenders of the mask benchmark: flash_attention and peers with the same masks, on the same problem."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ringflash as rf
from ringflash.bench.attention.mask_cases import BLOCK, Case
from ringflash.bench.attention.single import Unavailable, cute
from ringflash.bench.common.problem import Problem, Setup

MaskContender = Callable[[Case, Problem], Setup]


@contextmanager
def compiling() -> Generator[None, None, None]:
    """Lets `flex` compile all cases of a cell, and run their backwards any number of times."""
    from torch._functorch import config

    torch.compiler.reset()  # dynamo compiles one function for a few shapes and masks only
    with config.patch(donated_buffer=False):  # a backward that donates its buffers runs only once
        yield


def ours(deterministic: bool, backend: str) -> MaskContender:
    """Returns the contender `flash_attention`. Both modes have the same forward."""
    options = rf.AttentionOptions(deterministic=deterministic, backend=backend)

    def prepare(case: Case, problem: Problem) -> Setup:
        given = problem.map(case.cut)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = rf.flash_attention(q, k, v, mask=case.mask, options=options)
            assert isinstance(out, Tensor)
            return out

        return Setup(given.leaves(), given.dout, call, _joined)

    return prepare


def flash_attention_4(case: Case, problem: Problem) -> Setup:
    """Prepares FlashAttention-4, with documents as sequences of variable length.

    Raises:
        Unavailable: its package is not installed, or the mask is of blocks.
    """
    package = cute()
    if case.blocks is not None:
        raise Unavailable("is not given blocks here")
    given = problem.map(case.cut)
    options: dict[str, Any] = {"causal": True}
    if case.window is not None:
        options |= {"window_size": (case.window - 1, 0)}
    function = package.flash_attn_func
    if case.ends is not None:
        ends = torch.tensor(case.ends, dtype=torch.int32, device=problem.q.device)
        longest = max(stop - start for start, stop in pairwise(case.ends))
        options |= {f"cu_seqlens_{x}": ends for x in "qk"} | {f"max_seqlen_{x}": longest for x in "qk"}
        given, function = problem.map(lambda x: x[0]), package.flash_attn_varlen_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return Setup(given.leaves(), given.dout, call, _joined)


def flex(case: Case, problem: Problem) -> Setup:
    """Prepares torch's flex_attention, compiled for this shape and mask, with its block mask made beforehand."""
    given = problem.map(lambda x: case.cut(x).transpose(1, 2).contiguous())
    seqlen, device = given.q.shape[2], problem.q.device
    sizes: Any = {"B": None, "H": None, "Q_LEN": seqlen, "KV_LEN": seqlen, "BLOCK_SIZE": BLOCK}
    seen = torch.compile(create_block_mask)(_rule(case, device), **sizes, device=str(device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=seen, enable_gqa=problem.group > 1)
        assert isinstance(out, Tensor)
        return out

    return Setup(given.leaves(), given.dout, call, lambda x: _joined(x.transpose(1, 2)))


def _rule(case: Case, device: torch.device) -> Callable[..., Any]:
    """Returns the mask of a case for flex_attention: a function that returns whether query `q` sees key `k`."""
    window = case.window
    if window is not None:
        return lambda b, h, q, k: (q >= k) & (q - k < window)
    if case.ends is not None:
        length = case.ends[1]
        if case.ends == tuple(range(0, case.ends[-1] + 1, length)):  # equal lengths need no table
            return lambda b, h, q, k: (q >= k) & (q // length == k // length)
        rows = torch.arange(case.ends[-1], device=device)
        document = torch.bucketize(rows, torch.tensor(case.ends, device=device), right=True)
        return lambda b, h, q, k: (q >= k) & (document[q] == document[k])
    if case.blocks is not None:
        blocks = case.blocks.to(device)
        return lambda b, h, q, k: (q >= k) & blocks[q // BLOCK, k // BLOCK]
    return lambda b, h, q, k: q >= k


def _joined(x: Tensor) -> Tensor:
    """Returns (..., heads, headdim) as (1, seqlen, heads, headdim)."""
    return x.reshape(1, -1, *x.shape[-2:])
