"""What "auto" is on sm_90: the Hopper kernels, but for backwards of little work Triton's two."""

from __future__ import annotations

from torch import Tensor

from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.hopper import backend as hopper
from ringflash.kernels.hopper.backend import backward_dkdv, backward_dq, delta, forward, new_dq, state_dtype
from ringflash.kernels.hopper.config import prefer_triton_backward
from ringflash.kernels.triton import backend
from ringflash.masks import Mask

__all__ = ["backward_dkdv", "backward_dq", "delta", "forward", "fuses_dq", "new_dq", "state_dtype"]


def fuses_dq(q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool) -> bool:
    """As `hopper.fuses_dq`, but where there `prefer_triton_backward` to do, in one hop."""
    (batch, seqlen_q, _, headdim), (seqlen_k, nheads_kv) = q.shape, v.shape[1:3]
    measured = hops == 1 and headdim <= hopper.WIDEST_BACKWARD
    little = measured and prefer_triton_backward(batch, seqlen_q, seqlen_k, nheads_kv, headdim)
    kernels = backend if little else hopper
    return kernels.fuses_dq(q, v, mask, score_config, hops=hops, deterministic=deterministic)
