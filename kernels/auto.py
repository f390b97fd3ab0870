"""What "auto" is on sm_90: the Hopper kernels, but for backwards of little work Triton's two."""

from __future__ import annotations

from torch import Tensor

from ringflash.kernels.contract import Scoring
from ringflash.kernels.hopper import backend as hopper
from ringflash.kernels.hopper.backend import backward_dkdv, backward_dq, delta, forward, new_dq, state_dtype
from ringflash.kernels.hopper.config import is_little
from ringflash.kernels.triton import backend
from ringflash.masks import Mask

__all__ = ["backward_dkdv", "backward_dq", "delta", "forward", "has_single_pass", "new_dq", "state_dtype"]


def has_single_pass(q: Tensor, v: Tensor, mask: Mask, scoring: Scoring, *, hops: int, deterministic: bool) -> bool:
    """As `hopper.has_single_pass`, but where there `is_little` to do, in one hop."""
    (batch, seqlen_q, _, headdim), (seqlen_k, nheads_kv) = q.shape, v.shape[1:3]
    measured = hops == 1 and headdim <= hopper.WIDEST_BACKWARD
    little = measured and is_little(batch, seqlen_q, seqlen_k, nheads_kv, headdim)
    kernels = backend if little else hopper
    return kernels.has_single_pass(q, v, mask, scoring, hops=hops, deterministic=deterministic)
