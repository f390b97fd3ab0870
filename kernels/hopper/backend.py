"""The tile kernels of sm_90, where they apply, and the portable ones for the rest; results do not differ in kind.

They take bfloat16 and float16, heads of up to 128 (forward 256, in one hop) that are as wide in values as in keys, and
any mask of intervals. Softcap, ALiBi, sinks, dropout and bitmaps go to the portable kernels.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton import knobs

from ringflash.kernels.contract import ScoreConfig, TileProblem
from ringflash.kernels.fallback import report_feature
from ringflash.kernels.hopper.config import KEYS, dq_sum_shape
from ringflash.kernels.hopper.mask_tables import are_ascending
from ringflash.kernels.hopper.storage import ALIGNMENT, is_viewable
from ringflash.kernels.hopper.support import refusal
from ringflash.kernels.mask_tables import row_bounds
from ringflash.kernels.triton import backend
from ringflash.kernels.triton.backend import backward_dq, delta, state_dtype
from ringflash.kernels.triton.dq_accumulator import DqSum
from ringflash.masks import KeyPadding, Mask
from ringflash.state import AttentionState

__all__ = [
    "backward_dkdv",
    "backward_dq",
    "delta",
    "forward",
    "fuses_dq",
    "new_dq",
    "remedy",
    "state_dtype",
    "why_not",
]

DTYPES = (torch.bfloat16, torch.float16)
WIDEST, WIDEST_BACKWARD = 256, 128
MOST_PADDING = 2**26  # numbers of dq's sum, where most of it is padding: a quarter of a GiB
MOST_ROWS = 2**30  # in all heads and sequences: bounds, two numbers a row, are indexed with 32 bits


def why_not(device: torch.device) -> str | None:
    """What keeps these kernels from `device`, or None; first what no other installation would cure."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they need an NVIDIA GPU, not {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"they need compute capability 9.0, not {major}.{minor}"
    if knobs.runtime.interpret:
        return "Triton's interpreter, which TRITON_INTERPRET asks for, does not run them"
    return refusal(triton.__version__)


def remedy(device: torch.device) -> str:
    """Advice for a device that `why_not` refuses."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return "Use an H100 or H200 for the faster kernels."
    if knobs.runtime.interpret:
        return "Unset TRITON_INTERPRET before Python starts."
    return "Install a version of triton that they are written for; `ringflash doctor` then says which kernels run."


def new_dq(q: Tensor, *, hops: int, deterministic: bool) -> DqSum:
    """See `TileKernels.new_dq`."""
    from ringflash.kernels.hopper.dq_accumulator import DqAccumulator

    return DqAccumulator(q, hops=hops, ordered=deterministic)


def fuses_dq(q: Tensor, v: Tensor, mask: Mask, score_config: ScoreConfig, *, hops: int, deterministic: bool) -> bool:
    """Wherever these kernels apply, as far as that is known without strides and chunks."""
    lacking = _lacking_mode(score_config) or _lacking_inputs(q, v, mask, WIDEST_BACKWARD)
    if lacking is None:
        return True
    report_feature("wide backward" if lacking == "wide" else lacking)
    return backend.fuses_dq(q, v, mask, score_config, hops=hops, deterministic=deterministic)


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
    """See `TileKernels.forward`."""
    given = {"state": state, "out": out, "lse": lse, "first": first, "last": last}
    widest = WIDEST if first and last else WIDEST_BACKWARD
    lacking = "sinks" if problem.score_config.sinks is not None else None
    lacking = _lacking(problem, (q, k, v), widest) or lacking
    if lacking is not None:
        report_feature("wide forward" if lacking == "wide" else lacking)
        return backend.forward(q, k, v, problem, **given)
    from ringflash.kernels.hopper.forward import forward  # here: only these files need Gluon

    k, v = (_without_padding(x, problem) for x in (k, v))
    return forward(q, k, v, problem, **given)


def backward_dkdv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    problem: TileProblem,
    *,
    accumulate: bool,
    dq: DqSum | None = None,
) -> None:
    """See `TileKernels.backward_dkdv`."""
    lacking = None if dq is None else _lacking(problem, (q, k, v, dout), WIDEST_BACKWARD)
    if dq is None or lacking is not None or _is_mostly_padding(q):
        if lacking is not None:
            report_feature("wide backward" if lacking == "wide" else lacking)
        given = dout, q, k, v, lse, delta
        if dq is not None and not _portable_adds(dq, q, v, problem):
            backend.backward_dq(*given, dq.rows(), problem, accumulate=True)
            dq = None
        return backend.backward_dkdv(*given, dk, dv, problem, accumulate=accumulate, dq=dq)
    assert all(map(is_viewable, (dk, dv))), "they leave by the copy engine"
    assert not accumulate or dk.dtype == dv.dtype == torch.float32, "it would round twice"
    from ringflash.kernels.hopper.backward import backward

    inputs = _cleaned(dout, q, k, v, lse, delta, problem)
    return backward(*inputs, dk, dv, problem, accumulate=accumulate, dq=dq)


def _portable_adds(dq: DqSum, q: Tensor, v: Tensor, problem: TileProblem) -> bool:
    return backend.fuses_dq(q, v, problem.mask, problem.score_config, hops=1, deterministic=dq.ordered)


def _lacking(problem: TileProblem, tensors: tuple[Tensor, ...], widest: int) -> str | None:
    """The first feature of a hop that these kernels lack, or None; `tensors` are q, k, v and what else they read."""
    q, _, v, *_ = tensors
    lacking = _lacking_mode(problem.score_config) or _lacking_inputs(q, v, problem.mask, widest)
    if lacking is not None:
        return lacking
    if not all(are_ascending(chunks) for chunks in (problem.q_chunks, problem.k_chunks)):
        return "chunks"
    return None if all(map(is_viewable, tensors)) else "storage"


def _lacking_mode(score_config: ScoreConfig) -> str | None:
    """What makes weights other than exp(softmax_scale q k^T), sinks left aside, or None."""
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
    """What these kernels lack for inputs of these shapes and this mask, or None."""
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
    """Whether dq's sum, of whole tiles, would waste memory: that of many short sequences, or of narrow heads."""
    size = math.prod(dq_sum_shape(q))
    return size > 2 * q.numel() and size > MOST_PADDING


def _without_padding(x: Tensor, problem: TileProblem) -> Tensor:
    """Keys or values, with zeros where storage may hold anything: a tile's weight 0 does not undo a NaN."""
    if not any(isinstance(part, KeyPadding) for part in problem.mask.parts):
        return x
    begin, end = row_bounds(problem.mask, problem.q_chunks, x.device).hull[:, :, None].unbind(1)
    positions = torch.cat([torch.arange(chunk.start, chunk.stop, device=x.device) for chunk in problem.k_chunks])
    return x.masked_fill(((positions < begin) | (positions >= end))[..., None, None], 0.0)


def _cleaned(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, problem: TileProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A backward's inputs, with zeros in padding and in rows that see nothing, which may hold anything too."""
    k, v = (_without_padding(x, problem) for x in (k, v))
    if problem.q_chunks[0].start < 0 or any(isinstance(part, KeyPadding) for part in problem.mask.parts):
        fully_masked = lse == -torch.inf
        dout, q = (x.masked_fill(fully_masked.transpose(1, 2)[..., None], 0.0) for x in (dout, q))
        delta = delta.masked_fill(fully_masked, 0.0)
    return dout, q, k, v, lse, delta
