"""flash_attention and ring_attention: validate, choose, call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash import autograd
from ringflash.context import ContextParallel
from ringflash.errors import ArgumentError
from ringflash.kernels.backend import choose
from ringflash.masks import Mask, as_mask

MIN_HEADDIM, MAX_HEADDIM = 16, 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AttentionOptions:
    """What is rarely changed about a call.

    Args:
        return_lse: return (out, lse), lse (batch, nheads, seqlen_q) in natural logarithm; differentiable too.
        backend: "auto" (Triton on CUDA devices, else eager), "triton" or "eager".
    """

    return_lse: bool = False
    backend: str = "auto"


_DEFAULTS = AttentionOptions()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = _DEFAULTS,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale q k^T + mask) v on one device, exact, with O(seqlen) memory.

    Args:
        q: (batch, seqlen_q, nheads, headdim), any strides; float16, bfloat16, float32 or float64.
        k: (batch, seqlen_k, nheads_kv, headdim), nheads a multiple of nheads_kv (GQA, MQA).
        v: as k.
        mask: which keys a query sees; None is all. Masks compose: `Causal() & SlidingWindow(4096)`. The queries are
            the last `seqlen_q` positions.
        softmax_scale: positive; 1 / sqrt(headdim) by default.
        softcap: bounds the scores smoothly, softcap * tanh(scores / softcap), before the mask; 0 is none.
        options: an `AttentionOptions`.

    Returns:
        out as q, in its dtype; 0 for rows that see no key. With `options.return_lse` (out, lse), lse in float32.

    Raises:
        ArgumentError: shapes, dtypes, devices or options that do not fit, with what would.

    Source: Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2".
    """
    mask = as_mask(mask)
    scale = _validate(q, k, v, mask, softmax_scale, softcap, options)
    out, lse = autograd.attention(q, k, v, "", *mask.spec, scale, float(softcap), options.backend)
    return (out, lse) if options.return_lse else out


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ContextParallel,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = _DEFAULTS,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of a sequence that is cut over the ranks of `context`; a collective, forward and backward.

    Args:
        q: this rank's shard (batch, seqlen_local, nheads, headdim), as `context.shard` gives it.
        k: this rank's shard (batch, seqlen_local, nheads_kv, headdim).
        v: as k.
        context: the ranks, and how the sequence is cut over them.
        mask: as in `flash_attention`, on global positions.
        softmax_scale: as in `flash_attention`.
        softcap: as in `flash_attention`.
        options: an `AttentionOptions`.

    Returns:
        out as q: this rank's rows of what `flash_attention` gives for the whole sequence, or (out, lse).

    Raises:
        ArgumentError: as `flash_attention`; the other ranks raise PeerFailed.
        RankMismatch: on every rank, before any data moves, when ranks differ in shape, dtype, mask, layout or scale.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """
    if not isinstance(context, ContextParallel):
        remedy = "Make one from a mesh or group, or use flash_attention on one device."
        raise ArgumentError("context", expected="a rf.ContextParallel", got=repr(context), remedy=remedy)
    try:
        mask = as_mask(mask)
        scale = _validate(q, k, v, mask, softmax_scale, softcap, options)
        if q.is_meta:
            remedy = "A ring needs real tensors on every rank."
            raise ArgumentError("q", expected="a device with storage", got="meta", remedy=remedy)
        if q.shape[1] != k.shape[1]:
            remedy = "Shard queries and keys of the same sequence with context.shard."
            got = f"{q.shape[1]} and {k.shape[1]}"
            raise ArgumentError("k", expected="as many local keys as queries", got=got, remedy=remedy)
    except Exception as error:
        context.announce_failure(error)  # the others are about to wait for this rank
        raise
    out, lse = autograd.attention(q, k, v, context.name, *mask.spec, scale, float(softcap), options.backend)
    return (out, lse) if options.return_lse else out


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float | None,
    softcap: float,
    options: AttentionOptions,
) -> float:
    """Checks what any attention needs, and returns the scale."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(name, expected="a tensor", got=type(x).__name__, remedy="Pass torch tensors.")
        if x.ndim != 4:
            remedy = "Pass (batch, seqlen, nheads, headdim)."
            raise ArgumentError(name, expected="4 dimensions", got=f"shape {tuple(x.shape)}", remedy=remedy)
        if x.dtype != q.dtype or x.device != q.device:
            got = f"{x.dtype} on {x.device}"
            remedy = "Cast or move q, k and v alike."
            raise ArgumentError(name, expected=f"as q: {q.dtype} on {q.device}", got=got, remedy=remedy)
    batch, seqlen_q, nheads, headdim = q.shape
    if q.dtype not in DTYPES:
        raise ArgumentError("q", expected=f"one of {DTYPES}", got=q.dtype, remedy="Cast q, k and v.")
    if not MIN_HEADDIM <= headdim <= MAX_HEADDIM:
        remedy = "Split or pad the heads."
        raise ArgumentError("headdim", expected=f"{MIN_HEADDIM} to {MAX_HEADDIM}", got=headdim, remedy=remedy)
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != headdim:
        expected = f"k and v alike, ({batch}, seqlen_k, nheads_kv, {headdim})"
        got = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ArgumentError("k, v", expected=expected, got=got, remedy="Give all three one batch size and headdim.")
    nheads_kv = k.shape[2]
    if nheads_kv == 0 or nheads % nheads_kv:
        remedy = "Query heads share KV heads in equal groups."
        raise ArgumentError(
            "nheads",
            expected=f"a positive multiple of nheads_kv = {max(nheads_kv, 1)}",
            got=f"{nheads} and {nheads_kv}",
            remedy=remedy,
        )
    if 0 in (batch, seqlen_q, nheads, k.shape[1]):
        got = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        raise ArgumentError("q, k", expected="at least one row and head", got=got, remedy="Skip empty sequences.")
    if mask.batch not in (1, batch):
        remedy = "Give it one entry a sequence."
        raise ArgumentError("mask", expected=f"one of batch {batch}", got=f"batch {mask.batch}", remedy=remedy)
    choose(options.backend, q)
    if not 0.0 <= softcap < math.inf:
        raise ArgumentError("softcap", expected="0 or positive, and finite", got=softcap, remedy="0 is no cap.")
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else float(softmax_scale)
    if not 0.0 < scale < math.inf:
        remedy = "Flip the sign of q for a negative scale."
        raise ArgumentError("softmax_scale", expected="positive and finite", got=scale, remedy=remedy)
    return scale
