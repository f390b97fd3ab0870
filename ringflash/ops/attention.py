"""flash_attention and ring_attention: validate, choose, call."""

from __future__ import annotations

import logging
from typing import Literal, overload

import torch
from torch import Tensor

from ringflash.checks import (
    DTYPES,
    check_heads,
    check_of_heads,
    check_return_lse,
    check_softcap,
    check_tensors,
    scale_of,
)
from ringflash.context import ContextParallel, context_by_name, other_cut
from ringflash.dropout import Dropout
from ringflash.errors import ArgumentError
from ringflash.kernels.select import choose
from ringflash.masks import Mask, as_mask, find_packing, spec_of
from ringflash.ops import derivatives
from ringflash.ops.call import AttentionCall, AttentionOptions
from ringflash.ops.guard import Phase, announce
from ringflash.ops.one_device import OneDevice, PackedCall
from ringflash.ops.packed import packed_form
from ringflash.ops.prepared import PreparedCall, key_of
from ringflash.ops.ring_call import BoundCall, RingCall, call_of
from ringflash.recent_calls import CacheInfo, RecentCalls
from ringflash.torch_private import is_any_autocast_enabled

logger = logging.getLogger(__name__)

_DEFAULTS = AttentionOptions()
_known: RecentCalls[PreparedCall[OneDevice]] = RecentCalls()


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    return_lse: None = None,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = ...,
    return_lse: Literal[False],
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = ...,
    return_lse: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = _DEFAULTS,
    return_lse: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale q k^T + mask) v on one device, exact, with O(seqlen) memory.

    Under torch.autocast q, k and v take its dtype, as in scaled_dot_product_attention; float64 stays.

    Differentiable once in reverse mode, with torch.func.grad, vjp, jacrev and vmap (a loop) too. Forward mode and
    second derivatives raise ArgumentError.

    Args:
        q: (batch, seqlen_q, nheads, headdim), any strides; float16, bfloat16, float32 or float64.
        k: (batch, seqlen_k, nheads_kv, headdim), nheads a multiple of nheads_kv (GQA, MQA).
        v: (batch, seqlen_k, nheads_kv, headdim_v).
        mask: which keys a query sees; None is all. Masks compose: `Causal() & SlidingWindow(4096)`. The queries are
            the last `seqlen_q` positions: a causal diagonal ends in the bottom right corner.
        softmax_scale: positive; 1 / sqrt(headdim) by default.
        dropout: a `Dropout` of attention weights; None drops nothing.
        softcap: bounds the scores smoothly, softcap * tanh(scores / softcap), before the mask; 0 is none.
        options: an `AttentionOptions`.
        return_lse: True returns (out, lse), False returns out; None does what `options.return_lse` says.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) in the dtype of q; 0 for rows that see no key.
        With `return_lse` (out, lse), lse in float32 (float64 for float64), -inf for such rows.

    Raises:
        ArgumentError: shapes, dtypes, devices or options that do not fit, with what would.

    Source: Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2".
    """
    if torch.compiler.is_compiling() or is_any_autocast_enabled():
        q, k, v = map(_autocast, (q, k, v))
    key = key_of(q, k, v, mask, softmax_scale, dropout, softcap, options, return_lse, by_form=True)
    known = None if key is None else _known.get(key)
    if known is None:
        mask = as_mask(mask)
        scale = _validate(q, k, v, mask, softmax_scale, dropout, softcap, options)
        with_lse = check_return_lse(return_lse, options.return_lse)
        call = _call("", mask, scale, dropout, softcap, options)
        if key is None:
            return _attend(q, k, v, call, with_lse)
        form = packed_form(mask, q, k, v, softcap, options.backend, deterministic=call.deterministic)
        known = _known.put(key, PreparedCall(OneDevice.new(q, k, v, call, form), with_lse))
    return _attend(q, k, v, _with_mask(known.attention, mask), known.with_lse)


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ContextParallel,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    return_lse: None = None,
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ContextParallel,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = ...,
    return_lse: Literal[False],
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ContextParallel,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ContextParallel,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = ...,
    return_lse: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ContextParallel,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    dropout: Dropout | None = None,
    softcap: float = 0.0,
    options: AttentionOptions = _DEFAULTS,
    return_lse: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of a sequence that is cut over the ranks of `context`; a collective, forward and backward.

    Args:
        q: this rank's shard (batch, seqlen_local, nheads, headdim), as `context.shard` gives it.
        k: this rank's shard (batch, seqlen_local, nheads_kv, headdim).
        v: this rank's shard (batch, seqlen_local, nheads_kv, headdim_v).
        context: the ranks, and how the sequence, or sequence and heads, are cut over them.
        mask: as in `flash_attention`, on global positions.
        softmax_scale: as in `flash_attention`.
        dropout: as in `flash_attention`, keyed by global positions: the same under any layout and number of ranks.
        softcap: as in `flash_attention`.
        options: an `AttentionOptions`.
        return_lse: as in `flash_attention`.

    Returns:
        This rank's rows of what `flash_attention` gives for the whole sequence: out, or (out, lse).

    Raises:
        ArgumentError: as `flash_attention`, and for a context of another device or a destroyed group.
        RankMismatch: on every rank, before any data moves, when ranks differ in shape, dtype, mask, layout or scale.
        PeerFailed: another rank raised, here or in the backward; with its traceback.
        PeerLost: another rank's process is gone.
        RingTimeout: another rank did not do its part within the context's timeout.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """
    if not isinstance(context, ContextParallel):
        remedy = "Make one from a mesh or group, or use flash_attention on one device."
        raise ArgumentError("context", expected="a rf.ContextParallel", got=repr(context), remedy=remedy)
    try:
        if torch.compiler.is_compiling() or is_any_autocast_enabled():
            q, k, v = map(_autocast, (q, k, v))
        by_form = context.world_size == 1 and context.graphs is None  # attention on one device
        key = key_of(q, k, v, mask, softmax_scale, dropout, softcap, options, return_lse, by_form=by_form)
        known: PreparedCall[RingCall | OneDevice] | None = None if key is None else context.prepared_calls.get(key)
        call, with_lse = None, known is not None and known.with_lse
        if known is None:
            mask = as_mask(mask)
            scale = _validate(q, k, v, mask, softmax_scale, dropout, softcap, options)
            with_lse = check_return_lse(return_lse, options.return_lse)
            _validate_shards(q, k, context)
            call = _call(context.name, mask, scale, dropout, softcap, options)
            if key is not None:
                context_by_name(context.name)  # a copy from another process has no context of its name here
                made = call_of(context, q, k, v, call)
                made = made.attention if isinstance(made, PackedCall) else made
                known = context.prepared_calls.put(key, PreparedCall(made, with_lse))
    except BaseException as error:
        announce(context, error, Phase.PREPARING)  # the others are about to wait for this rank
        raise
    if known is None:
        assert call is not None
        return _attend(q, k, v, call, with_lse)
    attention = known.attention
    if isinstance(attention, RingCall):
        return _attend(q, k, v, BoundCall(attention, context), with_lse)
    context.check_alive()
    return _attend(q, k, v, _with_mask(attention, mask), with_lse)


def _with_mask(attention: OneDevice, mask: Mask | None) -> OneDevice | PackedCall:
    """Returns prepared attention; that of a packed form with the mask of this call."""
    return attention if attention.form is None or mask is None else PackedCall(attention, mask)


def cache_info() -> CacheInfo:
    """Returns how often calls of `flash_attention` were prepared already."""
    return _known.info()


def _call(
    context: str, mask: Mask, softmax_scale: float, dropout: Dropout | None, softcap: float, options: AttentionOptions
) -> AttentionCall:
    """Returns the parameters of a call with checked arguments."""
    if dropout is not None and dropout.p == 0.0:
        dropout = None
    if options.deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    else:
        deterministic = options.deterministic
    words, mask_tensors = spec_of(mask)
    if torch.compiler.is_compiling() and (
        context or softcap or dropout is not None or find_packing(mask.parts) is None
    ):
        # Each operator of a graph makes the mask again. One copy to the host serves all that need the values there.
        words, mask_tensors = mask.spec
    return AttentionCall(
        sinks=options.sinks,
        alibi_slopes=options.alibi_slopes,
        dropout_seed=None if dropout is None else dropout.drawn(),
        context=context,
        mask=words,
        mask_tensors=mask_tensors,
        softmax_scale=softmax_scale,
        softcap=float(softcap),
        dropout_p=0.0 if dropout is None else dropout.p,
        backend=options.backend,
        deterministic=deterministic,
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, attention: AttentionCall | OneDevice | PackedCall | BoundCall, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns attention of a checked call, prepared or not, with lse in the dtype that users get."""
    # No guard surrounds this function: torch's checkpointing ends a recomputed forward early by an exception.
    if isinstance(attention, AttentionCall):
        out, lse = derivatives.attend(q, k, v, attention)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = derivatives.attend_prepared(q, k, v, attention, with_lse=return_lse)
    else:
        out, lse = attention.forward(q, k, v)
    if not return_lse or lse is None:
        return out
    return out, lse.to(torch.promote_types(q.dtype, torch.float32))  # kernels may keep more for the backward


def _autocast(x: Tensor) -> Tensor:
    """Returns `x` in the dtype that torch.autocast gives to inputs of scaled_dot_product_attention."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if enabled else x


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float | None,
    dropout: Dropout | None,
    softcap: float,
    options: AttentionOptions,
) -> float:
    """Checks the arguments of any attention, and returns the scale."""
    if not isinstance(options, AttentionOptions):
        remedy = "Pass rf.AttentionOptions(...), or leave it out."
        raise ArgumentError("options", expected="a rf.AttentionOptions", got=repr(options), remedy=remedy)
    form = "(batch, seqlen, nheads, headdim)"
    check_tensors({"q": q, "k": k, "v": v}, form, alike="Cast or move q, k and v alike.")
    batch, seqlen_q, nheads, headdim = q.shape
    if q.dtype not in DTYPES:
        raise ArgumentError("q", expected=f"one of {DTYPES}", got=q.dtype, remedy="Cast q, k and v.")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != headdim:
        expected = f"k ({batch}, seqlen_k, nheads_kv, {headdim}) and v (.., headdim_v) with the same first three"
        got = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ArgumentError("k, v", expected=expected, got=got, remedy="Give q and k one headdim, all one batch size.")
    check_heads(nheads, k.shape[2], {"headdim": headdim, "headdim of v": v.shape[3]})
    if 0 in (batch, seqlen_q, nheads, k.shape[1]):
        got = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        raise ArgumentError("q, k", expected="at least one row and head", got=got, remedy="Skip empty sequences.")
    if mask.sequences not in (None, batch):
        remedy = "Give it one entry a sequence."
        raise ArgumentError("mask", expected=f"one of batch {batch}", got=f"batch {mask.sequences}", remedy=remedy)
    if not torch.compiler.is_compiling():  # it asks Triton, which is not for tracing; the operator chooses again
        choose(options.backend, q)
    _validate_options(options, q)
    if dropout is not None and not isinstance(dropout, Dropout):
        remedy = "Pass rf.Dropout(p), or none while evaluating."
        raise ArgumentError("dropout", expected="None or a rf.Dropout", got=repr(dropout), remedy=remedy)
    check_softcap(softcap)
    return scale_of(softmax_scale, headdim)


def _validate_shards(q: Tensor, k: Tensor, context: ContextParallel) -> None:
    """Checks what a ring asks of its shards besides `_validate`."""
    if q.is_meta:
        remedy = "A ring needs real tensors on every rank."
        raise ArgumentError("q", expected="a device with storage", got="meta", remedy=remedy)
    context.check_device(q.device)
    if q.shape[1] != k.shape[1]:
        remedy = "Shard both with context.shard; shapes are (batch, seqlen, nheads, headdim)."
        got = f"{q.shape[1]} and {k.shape[1]}"
        raise ArgumentError("k", expected="as many local keys as queries", got=got, remedy=remedy)
    if q.shape[1] < q.shape[2] == k.shape[2] == context.cut_rows:
        _check_order(q, k, context)
    context.check_heads(q.shape[2])
    if not torch.compiler.is_compiling() and not context.has_compared_cuts:
        context.has_compared_cuts = True
        _compare_cuts(q, context)


def _compare_cuts(q: Tensor, context: ContextParallel) -> None:
    """Warns if another context has cut shards such as `q`, and this one has cut nothing and would cut otherwise."""
    other = other_cut(context, q.shape[1]) if context.rank == context.cut_rows == 0 else None
    if other is not None:
        logger.warning(
            "context: %r has cut no sequence, but %r has, in another order. If q, k and v are of its shards, results "
            "are wrong: cut with the context of the call. Contexts of layout contiguous cut alike.",
            context,
            other,
        )


def _check_order(q: Tensor, k: Tensor, context: ContextParallel) -> None:
    """Raises ArgumentError for tensors with heads before rows, and warns once of tensors that may be such.

    A shard with heads first and a stream of fewer rows than heads may have the same shape. Their orders in memory
    differ where a tensor is a transposed view, since projections put out rows first.
    """
    got = f"{tuple(q.shape)}, with the {context.cut_rows} rows of the shard in the place of heads"
    remedy = "Pass x.transpose(1, 2) of each: scaled_dot_product_attention has heads before rows, this call does not."
    if q.stride(1) < q.stride(2) and k.stride(1) < k.stride(2):
        remedy += " If these are fewer rows than heads, stored with heads first, pass x.contiguous()."
        raise ArgumentError("q, k, v", expected="(batch, seqlen, nheads, headdim)", got=got, remedy=remedy)
    if context.rank == 0 and not context.has_warned_of_order and not torch.compiler.is_compiling():
        context.has_warned_of_order = True
        logger.warning("q, k, v: %s. %s All is well if there are fewer rows than heads here.", got, remedy)


def _validate_options(options: AttentionOptions, q: Tensor) -> None:
    if options.deterministic is not None and not isinstance(options.deterministic, bool):
        remedy = "None does what torch.use_deterministic_algorithms says."
        got = repr(options.deterministic)
        raise ArgumentError("deterministic", expected="None, True or False", got=got, remedy=remedy)
    check_of_heads(q, options.sinks, options.alibi_slopes)
    if options.alibi_slopes is not None and options.alibi_slopes.requires_grad:
        remedy = "Detach them: ALiBi's slopes are fixed."
        raise ArgumentError("alibi_slopes", expected="slopes without gradient", got="requires_grad", remedy=remedy)
