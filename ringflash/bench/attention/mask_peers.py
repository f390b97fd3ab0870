"""Contenders of the mask benchmark: flash_attention and peers with the same masks, on the same problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import ringflash as rf
from ringflash.bench.attention.mask_cases import BLOCK, Case
from ringflash.bench.attention.single import Unavailable, compiled_flex, cute, out_of
from ringflash.bench.common.problem import Problem, Setup, swapped

MaskContender = Callable[[Case, Problem], Setup]


def ours(case: Case, problem: Problem, *, deterministic: bool, backend: str) -> Setup:
    """Prepares `flash_attention`. Both modes have the same forward."""
    given, options = problem.map(case.cut), rf.AttentionOptions(deterministic=deterministic, backend=backend)
    call = partial(rf.flash_attention, mask=case.mask, options=options, return_lse=False)
    return Setup(given.leaves(), given.dout, call, _joined)


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
    return Setup(given.leaves(), given.dout, out_of(function, **options), _joined)


def flex(case: Case, problem: Problem) -> Setup:
    """Prepares torch's flex_attention, compiled for this shape and mask, with its block mask made beforehand."""
    given = problem.map(lambda x: swapped(case.cut(x)))
    seqlen, device = given.q.shape[2], problem.q.device
    sizes: Any = {"B": None, "H": None, "Q_LEN": seqlen, "KV_LEN": seqlen, "BLOCK_SIZE": BLOCK}
    seen = torch.compile(create_block_mask)(_rule(case, device), **sizes, device=str(device))
    call = compiled_flex(seen, problem.group)
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
