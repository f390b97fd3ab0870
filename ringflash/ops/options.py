"""Options of attention that are rarely changed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Options of a call that are rarely changed.

    Args:
        return_lse: return (out, lse), lse (batch, nheads, seqlen_q) in natural logarithm; differentiable too.
        deterministic: gradients bitwise the same from run to run; False lets kernels add dq up in any order, where that
            is faster. None does what torch.use_deterministic_algorithms says.
        alibi_slopes: (nheads,) or (batch, nheads) float32; scores lose slope * |position_q - position_k|, after the
            softcap. Has no gradient. Source: Press et al. 2021, "Train short, test long".
        sinks: (nheads,), a learned logit a head that takes part in the softmax of every row that sees a key and has no
            value; lse includes it. Its gradient is of the rows here: in a ring each rank has its share, as of any
            parameter. Source: Xiao et al. 2023, "Efficient streaming language models with attention sinks".
        backend: "hopper" (Gluon kernels for sm_90, where they know mask and modes, else Triton's), "triton", "eager",
            or "auto": the first of these that the device and dtype allow; but on sm_90 the backward of up to 1024 rows
            (in the default mode above headdim 64: 512) whose heads do not share keys is Triton's, as fast or faster.
    """

    return_lse: bool = False
    deterministic: bool | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    backend: str = "auto"
