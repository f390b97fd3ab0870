"""What "auto" is on sm_90: the Hopper kernels, but for backwards of short sequences, where Triton's two are faster."""

from __future__ import annotations

from torch import Tensor

from ringflash.kernels import portable
from ringflash.kernels.hopper import backend as hopper
from ringflash.kernels.hopper.backend import backward_dkdv, backward_dq, delta, forward, new_dq, state_dtype
from ringflash.kernels.meeting import Scoring
from ringflash.masks import Mask

__all__ = ["backward_dkdv", "backward_dq", "delta", "forward", "has_single_pass", "new_dq", "state_dtype"]

SHORT, SHORT_DEFAULT_WIDE = 1024, 512  # rows of a sequence, the latter of the default mode above headdim 64


def has_single_pass(q: Tensor, v: Tensor, mask: Mask, scoring: Scoring, *, deterministic: bool) -> bool:
    """As `hopper.has_single_pass`, but for sequences that are short, by sweeps on an H200.

    Programs of 128 keys are then too few, and a kernel that makes dQ of its sum takes as long as what it saves. Where
    heads share keys, the Hopper kernel is ahead from 1024 rows on, and was not measured below.
    """
    rows = SHORT if deterministic or q.shape[3] <= 64 else SHORT_DEFAULT_WIDE
    short = max(q.shape[1], v.shape[1]) <= rows and q.shape[2] == v.shape[2]
    return (portable if short else hopper).has_single_pass(q, v, mask, scoring, deterministic=deterministic)
