"""Backend "auto" on sm_90: the Hopper kernels, but Triton's two backward kernels where there is little work."""

from __future__ import annotations

from torch import Tensor

from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.fallback import WIDEST_BACKWARD
from ringflash.kernels.hopper import backend as hopper
from ringflash.kernels.hopper.backend import (
    backward_dkdv,
    backward_dq,
    delta,
    delta_of_one_hop,
    forward,
    new_dq,
    state_dtype,
)
from ringflash.kernels.hopper.config import prefer_triton_backward
from ringflash.kernels.triton import backend
from ringflash.masks import Mask

__all__ = ["backward_dkdv", "backward_dq", "delta", "delta_of_one_hop", "forward", "fuses_dq", "new_dq", "state_dtype"]


def fuses_dq(q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool) -> bool:
    """Returns `hopper.fuses_dq`, or Triton's answer for a backward of one hop that `prefer_triton_backward` selects."""
    (batch, seqlen_q, _, headdim), (seqlen_k, nheads_kv) = q.shape, v.shape[1:3]
    measured = hops == 1 and headdim <= WIDEST_BACKWARD
    little = measured and prefer_triton_backward(batch, seqlen_q, seqlen_k, nheads_kv, headdim)
    kernels = backend if little else hopper
    return kernels.fuses_dq(q, v, mask, score_config, hops=hops, deterministic=deterministic)
