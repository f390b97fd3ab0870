"""Backend of the tile kernels for sm_90, which falls back to the portable kernels where these do not apply.

The results of both differ by rounding only. `kernels/fallback.py` says what the Hopper kernels take.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringflash.kernels.contract import DqSum, PendingDelta, ScoreConfig, TileProblem
from ringflash.kernels.fallback import (
    WIDEST,
    WIDEST_BACKWARD,
    is_viewable,
    lacking_feature,
    lacking_inputs,
    lacking_mode,
    report_feature,
)
from ringflash.kernels.hopper.config import dq_sum_shape
from ringflash.kernels.triton import backend
from ringflash.kernels.triton.backend import backward_dq, delta, state_dtype
from ringflash.masks import Mask
from ringflash.state import AttentionState

__all__ = [
    "backward_dkdv",
    "backward_dq",
    "delta",
    "delta_of_one_hop",
    "forward",
    "fuses_dq",
    "new_dq",
    "state_dtype",
]

MOST_PADDING = 2**26  # elements of the sum of dq if most of it is padding: a quarter of a GiB


def new_dq(q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
    """Makes the sum of dq; see `TileKernels.new_dq`."""
    from ringflash.kernels.hopper.dq_accumulator import DqAccumulator

    return DqAccumulator(q, hops=hops, ordered=deterministic)


def fuses_dq(q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool) -> bool:
    """Returns True wherever these kernels apply, as far as can be known without strides and chunks.

    Elsewhere it returns the answer of the portable kernels; see `TileKernels.fuses_dq`.
    """
    lacking = lacking_mode(score_config) or lacking_inputs(q, v, mask, WIDEST_BACKWARD)
    if lacking is None:
        return True
    report_feature("wide backward" if lacking == "wide" else lacking)
    return backend.fuses_dq(q, v, mask, score_config, hops=hops, deterministic=deterministic)


def delta_of_one_hop(out: Tensor, dout: Tensor, dlse: Tensor | None) -> PendingDelta:
    """Returns delta as not computed: one launch computes it, scales lse, and clears the sum of dq."""
    return PendingDelta(out, dlse)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: TileProblem,
    *,
    state: AttentionState | None,
    out: Tensor,
    lse: Tensor,
    first: bool,
    last: bool,
) -> None:
    """Computes one hop; see `TileKernels.forward`."""
    from ringflash.kernels.hopper import calls  # here, since only these files need Gluon

    given = {"state": state, "out": out, "lse": lse, "first": first, "last": last}
    if calls.repeat_forward(q, k, v, problem, **given):
        return None
    widest = WIDEST if first and last else WIDEST_BACKWARD
    lacking = "sinks" if problem.score_config.sinks is not None else None
    lacking = lacking_feature(problem, (q, k, v), widest) or lacking
    if lacking is not None:
        report_feature("wide forward" if lacking == "wide" else lacking)
        return backend.forward(q, k, v, problem, **given)
    return calls.forward(q, k, v, problem, **given)


def backward_dkdv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor | PendingDelta,
    dk: Tensor,
    dv: Tensor,
    problem: TileProblem,
    *,
    accumulate: bool,
    dq: DqSum | None = None,
) -> None:
    """Computes dk, dv and the share of dq of one hop; see `TileKernels.backward_dkdv`."""
    from ringflash.kernels.hopper import calls

    given = dout, q, k, v, lse, delta
    if dq is not None and calls.repeat_backward(*given, dk, dv, problem, accumulate=accumulate, dq=dq):
        return None
    lacking = None if dq is None else lacking_feature(problem, (q, k, v, dout), WIDEST_BACKWARD)
    if dq is None or lacking is not None or _is_mostly_padding(q):
        if lacking is not None:
            report_feature("wide backward" if lacking == "wide" else lacking)
        if isinstance(delta, PendingDelta):
            delta = backend.delta(delta.out, dout, delta.dlse)
        portable = dout, q, k, v, lse, delta
        if dq is not None and not _portable_adds(dq, q, v, problem):
            backend.backward_dq(*portable, dq.rows(), problem, accumulate=True)
            dq = None
        return backend.backward_dkdv(*portable, dk, dv, problem, accumulate=accumulate, dq=dq)
    assert all(map(is_viewable, (dk, dv))), "they leave by the copy engine"
    assert not accumulate or dk.dtype == dv.dtype == torch.float32, "it would round twice"
    return calls.backward(*given, dk, dv, problem, accumulate=accumulate, dq=dq)


def _portable_adds(dq: DqSum, q: Tensor, v: Tensor, problem: TileProblem) -> bool:
    return backend.fuses_dq(q, v, problem.mask, problem.score_config, hops=1, deterministic=dq.ordered)


def _is_mostly_padding(q: Tensor) -> bool:
    """Returns whether padding to tiles would waste memory in the sum of dq: for short sequences, or narrow heads."""
    size = math.prod(dq_sum_shape(q))
    return size > 2 * q.numel() and size > MOST_PADDING
