"""Backend "hopper": the Gluon kernels for sm_90, and the Triton backend for calls that these kernels do not take.

The results of both differ by rounding only. `kernels/fallback.py` says what the Hopper kernels take.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringflash.kernels.contract import (
    BackwardArguments,
    DqSum,
    ForwardArguments,
    PendingDelta,
    ScoreConfig,
    TileProblem,
    Tiling,
)
from ringflash.kernels.fallback import (
    WIDEST,
    WIDEST_STATE,
    is_viewable,
    lacking_feature,
    lacking_inputs,
    lacking_mode,
    report_feature,
)
from ringflash.kernels.hopper import calls
from ringflash.kernels.hopper.config import dq_sum_shape, prefer_triton_backward
from ringflash.kernels.hopper.dq_accumulator import DqAccumulator
from ringflash.kernels.launch import refuse_replay
from ringflash.kernels.triton.backend import TRITON, TritonBackend
from ringflash.masks import Full, Mask
from ringflash.masks.base import Packing

MOST_SEQUENCES = 2**16 - 1  # of a grid's second dimension, over which the tables of packed documents are made
MOST_PADDING = 2**26  # elements of the sum of dq if most of it is padding: a quarter of a GiB


class HopperBackend:
    """Attention by the Hopper kernels, or by `triton` where these do not apply; see `Backend`."""

    name = "hopper"

    def __init__(self, triton: TritonBackend, *, leaves_little: bool) -> None:
        """Makes a backend that falls back to `triton`.

        Args:
            triton: computes what the Hopper kernels lack.
            leaves_little: whether backwards of one hop with little work go to `triton`, where they are faster.
        """
        self._triton, self._leaves_little = triton, leaves_little
        # Methods of `triton` itself: methods around them would add a Python frame to each call.
        self.state_dtype, self.delta, self.backward_dq = triton.state_dtype, triton.delta, triton.backward_dq
        self.decode, self.decode_splits = triton.decode, triton.decode_splits
        self.decode_partial, self.decode_combine = triton.decode_partial, triton.decode_combine

    def new_dq(self, q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
        """Makes the sum of dq; see `Backend.new_dq`."""
        return DqAccumulator(q, hops=hops, ordered=deterministic)

    def packed_tilings(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, deterministic: bool
    ) -> tuple[Tiling, Tiling] | None:
        """Returns the tilings where the kernels for sm_90 apply; see `Backend.packed_tilings`."""
        if q.shape[1] > k.shape[1] or packing.documents.batch > MOST_SEQUENCES:
            return None
        if lacking_inputs(q, v, Full(), WIDEST) is not None:
            return None
        return calls.packed_tilings(q, k, packing, ordered=deterministic)

    def fuses_dq(
        self, q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool
    ) -> bool:
        """Returns True wherever the Hopper kernels apply, as far as can be known without strides and chunks.

        Elsewhere it returns the answer of the Triton backend; see `Backend.fuses_dq`.
        """
        if not (self._leaves_little and hops == 1 and _has_little_work(q, v)):
            lacking = lacking_mode(score_config) or lacking_inputs(q, v, mask, WIDEST)
            if lacking is None:
                return True
            report_feature(lacking)
        return self._triton.fuses_dq(q, v, mask, score_config, hops=hops, deterministic=deterministic)

    def delta_of_one_hop(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> PendingDelta:
        """Returns delta as not computed: one launch computes it, scales lse, and clears the sum of dq."""
        return PendingDelta(out, dlse)

    def forward(self, given: ForwardArguments) -> None:
        """Computes one hop; see `Backend.forward`."""
        if calls.repeat_forward(given):
            return None
        problem = given.problem
        widest = WIDEST if given.first and given.last else WIDEST_STATE
        lacking = "sinks" if problem.score_config.sinks is not None else None
        lacking = lacking_feature(problem, given[:3], widest) or lacking
        if lacking is not None:
            report_feature(lacking)
            return self._triton.forward(given._replace(problem=_by_value(problem)))
        return calls.forward(given)

    def backward_dkdv(
        self, inputs: BackwardArguments, dk: Tensor, dv: Tensor, *, accumulate: bool, dq: DqSum | None = None
    ) -> None:
        """Computes dk, dv and the share of dq of one hop; see `Backend.backward_dkdv`."""
        if dq is not None and calls.repeat_backward(inputs, dk, dv, accumulate=accumulate, dq=dq):
            return None
        dout, q, k, v, _, delta, problem = inputs
        lacking = None if dq is None else lacking_feature(problem, (q, k, v, dout), WIDEST)
        if dq is None or lacking is not None or _is_mostly_padding(q):
            if lacking is not None:
                report_feature(lacking)
            inputs = inputs._replace(problem=_by_value(problem))
            if isinstance(delta, PendingDelta):
                inputs = inputs._replace(delta=self._triton.delta(delta.out, dout, delta.dlse))
            if dq is not None and not self._triton_adds(dq, q, v, problem):
                self._triton.backward_dq(inputs, dq.rows(), accumulate=True)
                dq = None
            return self._triton.backward_dkdv(inputs, dk, dv, accumulate=accumulate, dq=dq)
        assert all(map(is_viewable, (dk, dv))), "they leave by the copy engine"
        assert not accumulate or dk.dtype == dv.dtype == torch.float32, "it would round twice"
        return calls.backward(inputs, dk, dv, accumulate=accumulate, dq=dq)

    def _triton_adds(self, dq: DqSum, q: Tensor, v: Tensor, problem: TileProblem) -> bool:
        """Returns whether one kernel of `triton` adds this hop's share of dq."""
        return self._triton.fuses_dq(q, v, problem.mask, problem.score_config, hops=1, deterministic=dq.ordered)


def _by_value(problem: TileProblem) -> TileProblem:
    """Returns the problem for kernels whose tables the host makes of the mask.

    A replay of the call would serve other masks of the packed form too, with the tables of this one.
    """
    if problem.tiling is not None:
        refuse_replay()
    return problem.by_value()


def _has_little_work(q: Tensor, v: Tensor) -> bool:
    """Returns whether Triton's two kernels are faster in a backward of one hop, by sweeps up to the widest headdim."""
    (batch, seqlen_q, _, headdim), (seqlen_k, nheads_kv) = q.shape, v.shape[1:3]
    return headdim <= WIDEST and prefer_triton_backward(batch, seqlen_q, seqlen_k, nheads_kv, headdim)


def _is_mostly_padding(q: Tensor) -> bool:
    """Returns whether padding to tiles would waste memory in the sum of dq: for short sequences, or narrow heads."""
    size = math.prod(dq_sum_shape(q))
    return size > 2 * q.numel() and size > MOST_PADDING


HOPPER = HopperBackend(TRITON, leaves_little=False)
AUTO = HopperBackend(TRITON, leaves_little=True)
