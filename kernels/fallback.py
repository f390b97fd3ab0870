"""Limits of the kernels for sm_90: what they take, and one log message a process for each reason against them.

The kernels take bfloat16 and float16, headdim up to 256 (128 for a forward in a ring) and any interval mask. Values
must have the same headdim as keys. Softcap, ALiBi, sinks, dropout and bitmaps go to the Triton kernels of all GPUs. The
releases of Triton that they run under are in `c_launcher.py`; `versions.py` has what differs between these.

This file imports no Gluon, so that it also loads under other versions of Triton.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
from torch import Tensor
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import

from ringflash.kernels.c_launcher import SUPPORTED, release_of
from ringflash.kernels.contract import ScoreConfig, TileProblem
from ringflash.kernels.hopper.config import KEYS
from ringflash.kernels.hopper.mask_tables import are_ascending
from ringflash.masks import Mask

log = logging.getLogger("ringflash.kernels")

ALIGNMENT = 16  # bytes; addresses and strides for the tensor memory accelerator (TMA) are multiples of this
DTYPES = (torch.bfloat16, torch.float16)
WIDEST, WIDEST_STATE = 256, 128
MOST_ROWS = 2**30  # in all heads and sequences: bounds have two numbers a row and 32-bit indices

FEATURES = {
    "dtype": "q, k and v are neither bfloat16 nor float16. Cast them, or use torch.autocast",
    "softcap": "softcap is set. Pass softcap=0.0 if the model allows it",
    "alibi_slopes": "ALiBi slopes are set. Leave them out if the model allows it",
    "dropout": "attention dropout is set. Pass dropout=None, and drop outputs of the layers instead",
    "sinks": "attention sinks are set, for the forward alone. Leave them out if the model allows it",
    "softmax_scale": "softmax_scale is so small that it is 0 in float32. Pass a larger one",
    "bitmap": "the mask is no interval of keys a row (BlockSparse, Tree). Use masks of intervals if they say the same",
    "unequal widths": "headdim and headdim_v differ. Pad the narrower one with zeros",
    "wide": "headdim is above 128 in a ring of several hops, for the forward alone, or above 256. "
    "Use more and narrower heads",
    "odd width": "the bytes of a row of one head are no multiple of 16. Pad headdim to a multiple of 8",
    "size": "all heads and sequences together have 2**30 rows or more. Split the batch",
    "storage": "a tensor's storage is not aligned to 16 bytes, expanded, or without stride 1 in its last dimension. "
    "Call .contiguous() on q, k, v and dout first",
    "chunks": "the chunks of a rank are not in ascending order. Use the layouts of ContextParallel",
}
"""Reason and remedy for what the kernels for sm_90 do not compute."""


def why_not(device: torch.device) -> str | None:
    """Returns why these kernels cannot run on `device`, or None; reasons that no installation can fix come first."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they need an NVIDIA GPU, not {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"they need compute capability 9.0, not {major}.{minor}"
    if knobs.runtime.interpret:
        return "Triton's interpreter, which TRITON_INTERPRET asks for, does not run them"
    return _refusal(triton.__version__)


def remedy(device: torch.device) -> str:
    """Returns advice for a device that `why_not` refuses."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return "Use an H100 or H200 for the faster kernels."
    if knobs.runtime.interpret:
        return "Unset TRITON_INTERPRET before Python starts."
    return "Install a version of triton that they are written for; `ringflash doctor` then says which kernels run."


def _refusal(version: str) -> str | None:
    """Returns why the kernels do not run under this version of Triton, or None if they run."""
    if release_of(version) in SUPPORTED:
        return None
    names = [f"{major}.{minor}" for major, minor in SUPPORTED]
    return f"they run under triton {', '.join(names[:-1])} and {names[-1]}, not {version}"


def lacking_feature(problem: TileProblem, tensors: tuple[Tensor, ...], widest: int) -> str | None:
    """Returns the first feature of a hop that these kernels lack, or None.

    `tensors` are q, k, v and the other inputs of the kernels.
    """
    q, _, v, *_ = tensors
    lacking = lacking_mode(problem.score_config) or lacking_inputs(q, v, problem.mask, widest)
    if lacking is not None:
        return lacking
    if not all(are_ascending(chunks) for chunks in (problem.q_chunks, problem.k_chunks)):
        return "chunks"
    return None if all(map(is_viewable, tensors)) else "storage"


def lacking_mode(score_config: ScoreConfig) -> str | None:
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


def lacking_inputs(q: Tensor, v: Tensor, mask: Mask, widest: int) -> str | None:
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


def is_viewable(x: Tensor) -> bool:
    """Returns whether `tile_view` accepts `x` (batch, seqlen, nheads, headdim) as it lies in memory."""
    itemsize = x.itemsize
    for stride, size in zip(x.stride(), x.shape[:3], strict=False):
        if size > 1 and (stride <= 0 or stride * itemsize % ALIGNMENT):
            return False
    return x.stride(3) == 1 and x.data_ptr() % ALIGNMENT == 0 and x.numel() > 0


@cache
def report_device(reason: str, remedy: str) -> None:
    """Logs once that a GPU does not run the kernels for sm_90."""
    log.warning("Attention runs on slower kernels than those for sm_90: %s. %s", reason, remedy)


@cache
def report_feature(feature: str) -> None:
    """Logs once that calls with `feature`, a key of `FEATURES`, run on the Triton kernels of all GPUs.

    A call in float32 cannot run faster in that dtype, so its message is for information; all others are warnings.
    """
    level = logging.INFO if feature == "dtype" else logging.WARNING
    log.log(
        level,
        "Attention runs on slower kernels than this GPU has: %s. Other calls are not affected.",
        FEATURES[feature],
    )
