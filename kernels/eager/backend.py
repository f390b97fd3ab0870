"""Backend "eager": blocked PyTorch on any device, in float64 too."""

from __future__ import annotations

from torch import Tensor

from ringflash.kernels.contract import DqSum, ScoreConfig
from ringflash.kernels.eager import prefill
from ringflash.kernels.eager.decode import attend, combine, partial, splits_of
from ringflash.kernels.eager.mask_blocks import state_dtype
from ringflash.masks import Mask
from ringflash.masks.base import Packing


class EagerBackend:
    """Attention in PyTorch; see `Backend`."""

    name = "eager"
    state_dtype = staticmethod(state_dtype)
    forward = staticmethod(prefill.forward)
    delta = staticmethod(prefill.delta)
    delta_of_one_hop = delta
    backward_dq = staticmethod(prefill.backward_dq)
    backward_dkdv = staticmethod(prefill.backward_dkdv)
    decode = staticmethod(attend)
    decode_splits = staticmethod(splits_of)
    decode_partial = staticmethod(partial)
    decode_combine = staticmethod(combine)

    def packed_tilings(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, deterministic: bool) -> None:
        """Returns None: the host makes all tables of these kernels."""

    def new_dq(self, q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
        """See `Backend.new_dq`."""
        return DqSum(q, self.state_dtype(q.dtype), ordered=deterministic)

    def fuses_dq(
        self, q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool
    ) -> bool:
        """Returns `not deterministic`, so that both backwards run without a GPU; both are deterministic here."""
        return not deterministic


EAGER = EagerBackend()
