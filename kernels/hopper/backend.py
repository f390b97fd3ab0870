"""Backend of the tile kernels for sm_90, which falls back to the portable kernels where these do not apply.

The results of both differ by rounding only. The Hopper kernels take bfloat16 and float16, headdim up to 128 (256 for a
forward in one hop) and any interval mask. Values must have the same headdim as keys. Softcap, ALiBi, sinks, dropout and
bitmaps go to the portable kernels.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton import knobs

from ringflash.kernels.contract import DqSum, PendingDelta, ScoreConfig, TileProblem
from ringflash.kernels.fallback import report_feature
from ringflash.kernels.hopper.config import KEYS, dq_sum_shape
from ringflash.kernels.hopper.mask_tables import are_ascending
from ringflash.kernels.hopper.support import ALIGNMENT, is_viewable, refusal
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
    "remedy",
    "state_dtype",
    "why_not",
]

DTYPES = (torch.bfloat16, torch.float16)
WIDEST, WIDEST_BACKWARD = 256, 128
MOST_PADDING = 2**26  # elements of the sum of dq if most of it is padding: a quarter of a GiB
MOST_ROWS = 2**30  # in all heads and sequences: bounds have two numbers a row and 32-bit indices


def why_not(device: torch.device) -> str | None:
    """Returns why these kernels cannot run on `device`, or None; reasons that no installation can fix come first."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they need an NVIDIA GPU, not {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"they need compute capability 9.0, not {major}.{minor}"
    if knobs.runtime.interpret:
        return "Triton's interpreter, which TRITON_INTERPRET asks for, does not run them"
    return refusal(triton.__version__)


def remedy(device: torch.device) -> str:
    """Returns advice for a device that `why_not` refuses."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return "Use an H100 or H200 for the faster kernels."
    if knobs.runtime.interpret:
        return "Unset TRITON_INTERPRET before Python starts."
    return "Install a version of triton that they are written for; `ringflash doctor` then says which kernels run."


def new_dq(q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
    """Makes the sum of dq; see `TileKernels.new_dq`."""
    from ringflash.kernels.hopper.dq_accumulator import DqAccumulator

    return DqAccumulator(q, hops=hops, ordered=deterministic)


def fuses_dq(q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool) -> bool:
    """Returns True wherever these kernels apply, as far as can be known without strides and chunks.

    Elsewhere it returns the answer of the portable kernels; see `TileKernels.fuses_dq`.
    """
    lacking = _lacking_mode(score_config) or _lacking_inputs(q, v, mask, WIDEST_BACKWARD)
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
    lacking = _lacking(problem, (q, k, v), widest) or lacking
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
    lacking = None if dq is None else _lacking(problem, (q, k, v, dout), WIDEST_BACKWARD)
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


def _lacking(problem: TileProblem, tensors: tuple[Tensor, ...], widest: int) -> str | None:
    """Returns the first feature of a hop that these kernels lack, or None.

    `tensors` are q, k, v and the other inputs of the kernels.
    """
    q, _, v, *_ = tensors
    lacking = _lacking_mode(problem.score_config) or _lacking_inputs(q, v, problem.mask, widest)
    if lacking is not None:
        return lacking
    if not all(are_ascending(chunks) for chunks in (problem.q_chunks, problem.k_chunks)):
        return "chunks"
    return None if all(map(is_viewable, tensors)) else "storage"


def _lacking_mode(score_config: ScoreConfig) -> str | None:
    """Returns the feature by which weights are not exp(softmax_scale q k^T), or None. Sinks are not considered."""
    if score_config.has_score_mods:
        return (
            "softcap"
            if score_config.softcap
            else "alibi_slopes"
            if score_config.alibi_slopes is not None
            else "dropout"
        )
    return None if score_config.softmax_scale > 0 else "softmax_scale"


def _lacking_inputs(q: Tensor, v: Tensor, mask: Mask, widest: int) -> str | None:
    """Returns the feature that these kernels lack for inputs of these shapes and this mask, or None."""
    if q.dtype not in DTYPES:
        return "dtype"
    if q.shape[3] != v.shape[3]:
        return "unequal widths"
    if q.shape[3] > widest:
        return "wide"
    if q.shape[3] * q.itemsize % ALIGNMENT:
        return "odd width"
    if mask.bitmap() is not None:
        return "bitmap"
    rows = max(x.shape[0] * x.shape[2] * (x.shape[1] + KEYS) for x in (q, v))
    return None if rows < MOST_ROWS else "size"


def _is_mostly_padding(q: Tensor) -> bool:
    """Returns whether padding to tiles would waste memory in the sum of dq: for short sequences, or narrow heads."""
    size = math.prod(dq_sum_shape(q))
    return size > 2 * q.numel() and size > MOST_PADDING
