"""Log messages about attention that runs on slower kernels than the GPU has, one for each reason in a process."""

from __future__ import annotations

import logging
from functools import cache

log = logging.getLogger("ringflash.kernels")

FEATURES = {
    "dtype": "q, k and v are neither bfloat16 nor float16. Cast them, or use torch.autocast",
    "softcap": "softcap is set. Pass softcap=0.0 if the model allows it",
    "alibi_slopes": "ALiBi slopes are set. Leave them out if the model allows it",
    "dropout": "attention dropout is set. Pass dropout=None, and drop outputs of the layers instead",
    "sinks": "attention sinks are set, for the forward alone. Leave them out if the model allows it",
    "softmax_scale": "softmax_scale is so small that it is 0 in float32. Pass a larger one",
    "bitmap": "the mask is no interval of keys a row (BlockSparse, Tree). Use masks of intervals if they say the same",
    "unequal widths": "headdim and headdim_v differ. Pad the narrower one with zeros",
    "wide forward": "headdim is above 128 in a ring of several hops, or above 256. Use more and narrower heads",
    "wide backward": "headdim is above 128, for the backward alone. Use more and narrower heads",
    "odd width": "the bytes of a row of one head are no multiple of 16. Pad headdim to a multiple of 8",
    "size": "all heads and sequences together have 2**30 rows or more. Split the batch",
    "storage": "a tensor's storage is not aligned to 16 bytes, expanded, or without stride 1 in its last dimension. "
    "Call .contiguous() on q, k, v and dout first",
    "chunks": "the chunks of a rank are not in ascending order. Use the layouts of ContextParallel",
}
"""Reason and remedy for what the kernels for sm_90 do not compute."""


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
