"""What "auto" is on sm_90: the Hopper kernels, but for backwards of short sequences Triton's two."""

from __future__ import annotations

from torch import Tensor

from ringflash.kernels import portable
from ringflash.kernels.hopper import backend as hopper
from ringflash.kernels.hopper.backend import backward_dkdv, backward_dq, delta, forward, new_dq, state_dtype
from ringflash.kernels.meeting import Scoring
from ringflash.masks import Mask

__all__ = ["backward_dkdv", "backward_dq", "delta", "forward", "has_single_pass", "new_dq", "state_dtype"]

# By sweeps on an H200, the latter for the default mode above headdim 64. Between the two the deterministic mode there
# differs by a few percent, but for a single sequence, where Triton's are far ahead.
SHORT, SHORT_DEFAULT_WIDE = 1024, 512


def is_short(rows: int, nheads: int, nheads_kv: int, headdim: int, *, deterministic: bool) -> bool:
    """Whether a backward is of so few rows of queries and keys, the more of them counted, that it is Triton's.

    Programs of 128 keys are then too few, and a kernel that makes dQ of its sum takes as long as what it saves. Where
    heads share keys, the Hopper kernel is ahead from 1024 rows on, and was not measured below.
    """
    return nheads == nheads_kv and rows <= (SHORT if deterministic or headdim <= 64 else SHORT_DEFAULT_WIDE)


def has_single_pass(q: Tensor, v: Tensor, mask: Mask, scoring: Scoring, *, deterministic: bool) -> bool:
    """As `hopper.has_single_pass`, but where `is_short`."""
    shape = max(q.shape[1], v.shape[1]), q.shape[2], v.shape[2], q.shape[3]
    kernels = portable if is_short(*shape, deterministic=deterministic) else hopper
    return kernels.has_single_pass(q, v, mask, scoring, deterministic=deterministic)
