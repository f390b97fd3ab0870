"""Backend "triton": kernels for any GPU that Triton compiles for; its interpreter runs them without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.contract import DqSum, ScoreConfig
from ringflash.kernels.triton import config
from ringflash.kernels.triton.backward_dkdv import backward_dkdv
from ringflash.kernels.triton.backward_dq import backward_dq
from ringflash.kernels.triton.decode import attend, combine, partial, splits_of
from ringflash.kernels.triton.delta import delta
from ringflash.kernels.triton.forward import forward
from ringflash.masks import Mask
from ringflash.masks.base import Packing
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED_DTYPES = (torch.float16, torch.float32)  # the interpreter's bfloat16 dot is silently wrong


class TritonBackend:
    """Attention by the Triton kernels; see `Backend`."""

    name = "triton"
    forward = staticmethod(forward)
    delta = staticmethod(delta)
    delta_of_one_hop = delta
    backward_dq = staticmethod(backward_dq)
    backward_dkdv = staticmethod(backward_dkdv)
    decode = staticmethod(attend)
    decode_splits = staticmethod(splits_of)
    decode_partial = staticmethod(partial)
    decode_combine = staticmethod(combine)

    @staticmethod
    def state_dtype(dtype: torch.dtype) -> torch.dtype:
        """Returns float32, for every dtype that these kernels support."""
        assert dtype in DTYPES
        return torch.float32

    def packed_tilings(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, deterministic: bool) -> None:
        """Returns None: the host makes all tables of these kernels."""

    def new_dq(self, q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
        """See `Backend.new_dq`."""
        return DqSum(q, self.state_dtype(q.dtype), ordered=deterministic)

    def fuses_dq(
        self, q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool
    ) -> bool:
        """Returns `config.fuses_dq`, but False if `deterministic`: the fused kernel adds dQ in no fixed order."""
        return not deterministic and config.fuses_dq(q.shape[3], v.shape[3], listed=mask.bitmap() is not None)


TRITON = TritonBackend()


def check_supported(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ArgumentError unless these kernels can run on `device`, on inputs of `dtype`."""
    interpreted = knobs.runtime.interpret
    if device.type != "cuda" and not interpreted:
        remedy = 'Move q, k and v there, use backend "eager", or set TRITON_INTERPRET=1 before Python starts.'
        raise ArgumentError("backend", expected="CUDA tensors for triton", got=f"{device}", remedy=remedy)
    dtypes = INTERPRETED_DTYPES if interpreted else DTYPES
    if dtype not in dtypes:
        where = "Triton's interpreter" if interpreted else "triton"
        remedy = 'Cast q, k and v, or use backend "eager".'
        raise ArgumentError("backend", expected=f"one of {dtypes} for {where}", got=dtype, remedy=remedy)
