"""What "auto" is on sm_90: the Hopper kernels, but for backwards of little work Triton's two."""

from __future__ import annotations

from torch import Tensor

from ringflash.kernels import portable
from ringflash.kernels.hopper import backend as hopper
from ringflash.kernels.hopper.backend import backward_dkdv, backward_dq, delta, forward, new_dq, state_dtype
from ringflash.kernels.hopper.config import is_little
from ringflash.kernels.meeting import Scoring
from ringflash.masks import Mask

__all__ = ["backward_dkdv", "backward_dq", "delta", "forward", "has_single_pass", "new_dq", "state_dtype"]


def has_single_pass(q: Tensor, v: Tensor, mask: Mask, scoring: Scoring, *, hops: int, deterministic: bool) -> bool:
    """As `hopper.has_single_pass`, but where there `is_little` to do, in one hop."""
    alone = hops == 1 and q.shape[3] <= hopper.WIDEST_BACKWARD
    little = alone and is_little(q.shape[0], q.shape[1], v.shape[1], v.shape[2], q.shape[3])
    kernels = portable if little else hopper
    return kernels.has_single_pass(q, v, mask, scoring, hops=hops, deterministic=deterministic)
