"""flash_decode: a few new queries against a cache of keys and values, on one device or sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringflash.checks import (
    DTYPES,
    check_heads,
    check_of_heads,
    check_return_lse,
    check_softcap,
    check_tensors,
    scale_of,
)
from ringflash.context import ContextParallel
from ringflash.errors import ArgumentError
from ringflash.kernels.decode_step import MAX_SEQLEN_Q, MAX_SPLITS, DecodeTiles
from ringflash.kernels.select import choose
from ringflash.masks import Mask, as_mask, spec_of
from ringflash.ops import decode_op
from ringflash.ops.decode_call import DecodeCall, key_of
from ringflash.ops.guard import Phase, announce
from ringflash.recent_calls import RecentCalls
from ringflash.torch_private import assert_async, forward_mode_level


@dataclass(frozen=True, eq=False)
class DecodeOptions:
    """Options of a decoding call that are rarely changed.

    Args:
        return_lse: return (out, lse), lse (batch, nheads, seqlen_q) in natural logarithm.
        softcap: bounds the scores smoothly, softcap * tanh(scores / softcap), before the mask; 0 is none.
        sinks: (nheads,) a logit a head that takes weight from every row that sees a key, and has no value; lse has it.
        alibi_slopes: (nheads,) or (batch, nheads); the score of a key n positions away falls by slope * n.
        backend: "auto" (Triton on CUDA devices, else eager), "triton" or "eager".
        check_lengths: verify on the GPU, without waiting for it, that 0 <= cache_seqlens <= capacity, and that of a
            sharded cache `newest_rank` has the new tokens. Lengths on the CPU always are verified; others are brought
            into that range unseen.
        newest_rank: of a sharded cache, the rank whose shard ends with the new tokens; counted from the end if below 0.
        splits: parts into which each sequence's keys are cut, 1 to 128. None chooses by shapes and number of SMs; a
            number makes results bitwise the same on GPUs that differ only in that.
        tiles: of the Triton kernel, for a GPU that the shipped ones were not chosen on.
    """

    return_lse: bool = False
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    backend: str = "auto"
    check_lengths: bool = False
    newest_rank: int = -1
    splits: int | None = None
    tiles: DecodeTiles | None = None


_DEFAULTS = DecodeOptions()
_known: RecentCalls[DecodeCall] = RecentCalls()


@overload
def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    context: ContextParallel | None = None,
    return_lse: None = None,
) -> Tensor: ...


@overload
def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    context: ContextParallel | None = None,
    options: DecodeOptions = ...,
    return_lse: Literal[False],
) -> Tensor: ...


@overload
def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    context: ContextParallel | None = None,
    options: DecodeOptions = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    context: ContextParallel | None = None,
    options: DecodeOptions = ...,
    return_lse: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    context: ContextParallel | None = None,
    options: DecodeOptions = _DEFAULTS,
    return_lse: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale q k^T + mask) v over the valid keys of a cache; inference only.

    The new tokens are in the cache already: query i of sequence b stands at cache_seqlens[b] - seqlen_q + i. Nothing
    waits for the GPU, so a call can be captured in a CUDA graph; with a Tree, call once before the capture.

    torch.autocast changes no dtype here: a cache is never copied.

    A cache may be sharded over the ranks of `context`: each holds some keys of every sequence, all have the same
    queries, and only states (m, l, O) travel. Without a mask any rank may hold any keys. A mask needs the cache cut in
    rank order: the new tokens are the last keys of `options.newest_rank`, and every query sees the other ranks' keys.
    For virtual ranks, `ContextParallel.local(n)`, the caches hold the ranks' shards one after another in dimension 1,
    of equal capacity, and cache_seqlens is (n, batch).

    Args:
        q: (batch, seqlen_q, nheads, headdim), seqlen_q 1 to 64; float16, bfloat16, float32 or float64.
        k_cache: (batch, capacity, nheads_kv, headdim), nheads a multiple of nheads_kv. Its last dimension is
            consecutive in memory, the others are as they are: a cache is never copied.
        v_cache: (batch, capacity, nheads_kv, headdim_v), likewise.
        cache_seqlens: valid keys of each sequence, the new ones among them: int32 or int64 (batch,) on q's device, or
            one integer for all; of a sharded cache, those of this rank. Entries past them are not read.
        mask: None sees all valid keys; `rf.Causal()` is causal among the new tokens; `rf.SlidingWindow` counts from
            each query's position; `rf.Tree(parents)` makes the new tokens a tree: each sees what was before them, its
            ancestors and itself. They compose with `&`.
        softmax_scale: positive; 1 / sqrt(headdim) by default.
        context: the ranks over which the cache is sharded; None where it is whole.
        options: a `DecodeOptions`.
        return_lse: True returns (out, lse), False returns out; None does what `options.return_lse` says.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) in q's dtype, 0 where there are no keys; on every rank the same bits.
        With `return_lse` (out, lse), lse in float32 (float64 for float64), -inf where there are no keys.

    Raises:
        ArgumentError: shapes, dtypes, devices, masks or options that do not fit, with what would; inputs that require a
            gradient while gradients are on. On a sharded cache the other ranks raise PeerFailed.
        RankMismatch: on every rank, before any data moves, when ranks differ in what must be alike.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    key = None
    if context is None and type(options) is DecodeOptions:
        key = key_of(q, k_cache, v_cache, cache_seqlens, mask, softmax_scale, options, return_lse)
        known = None if key is None else _known.get(key)
        if known is not None:
            out, lse = known.run(q, k_cache, v_cache, cache_seqlens)
            return (out, lse) if known.with_lse else out
    if context is not None and not isinstance(context, ContextParallel):
        remedy = "Pass the context whose ranks hold the cache, or None."
        raise ArgumentError("context", expected="None or a rf.ContextParallel", got=repr(context), remedy=remedy)
    try:
        mask = as_mask(mask)
        if not isinstance(options, DecodeOptions):
            remedy = "Pass rf.DecodeOptions(...), or leave it out."
            raise ArgumentError("options", expected="a rf.DecodeOptions", got=repr(options), remedy=remedy)
        _check_tensors(q, k_cache, v_cache)
        lengths = _lengths(cache_seqlens, q, k_cache, context)
        scale = _check_scoring(q, softmax_scale, options)
        _check_options(q, options, context)
        with_lse = check_return_lse(return_lse, options.return_lse)
        if options.check_lengths:
            _check_lengths(lengths, q.shape[1], k_cache, mask, context, options)
    except BaseException as error:
        if context is not None:
            announce(context, error, Phase.PREPARING)  # the others are about to wait for this rank
        raise
    if key is not None:
        known = _known.put(key, DecodeCall.of(q, k_cache, v_cache, mask, scale, options, with_lse))
        out, lse = known.run(q, k_cache, v_cache, cache_seqlens)
        return (out, lse) if with_lse else out
    out, lse = decode_op.decode(
        q,
        k_cache,
        v_cache,
        lengths,
        options.sinks,
        options.alibi_slopes,
        context.name if context is not None else "",
        *spec_of(mask),
        scale,
        float(options.softcap),
        options.backend,
        options.newest_rank,
        options.splits or 0,
        [] if options.tiles is None else [options.tiles.block_n, options.tiles.num_warps, options.tiles.num_stages],
    )
    return (out, lse) if with_lse else out


def _check_lengths(
    lengths: Tensor, seqlen_q: int, k: Tensor, mask: Mask, context: ContextParallel | None, options: DecodeOptions
) -> None:
    """Raises where lengths do not fit the cache; on a GPU, asynchronously."""
    valid = (lengths >= 0) & (lengths <= k.shape[1] // lengths.shape[0])
    message = "cache_seqlens: expected 0 to the cache's capacity"
    assert_async(valid.all(), message)
    if context is not None and context.world_size > 1:
        lacks = decode_op.lacks_new_tokens(lengths, seqlen_q, mask, context, options.newest_rank)
        message = "cache_seqlens: expected the new tokens among those of newest_rank"
        assert_async(~lacks, message)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    tensors, alike = (
        {"q": q, "k_cache": k, "v_cache": v},
        "Keep the cache in the dtype and on the device of the queries.",
    )
    check_tensors(tensors, "(batch, rows, heads, headdim)", alike=alike)
    for name, x in tensors.items():
        _check_no_gradient(name, x)
    if q.dtype not in DTYPES:
        raise ArgumentError("q", expected=f"one of {DTYPES}", got=q.dtype, remedy="Cast q and the cache.")
    batch, seqlen_q, nheads, headdim = q.shape
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != headdim:
        expected = f"({batch}, capacity, nheads_kv, {headdim}) and ({batch}, capacity, nheads_kv, headdim_v)"
        got = f"{tuple(k.shape)} and {tuple(v.shape)}"
        remedy = "Give all three one batch size, and both caches one capacity and nheads_kv."
        raise ArgumentError("k_cache, v_cache", expected=expected, got=got, remedy=remedy)
    if not 1 <= seqlen_q <= MAX_SEQLEN_Q:
        remedy = "Use rf.flash_attention for longer ones."
        raise ArgumentError("seqlen_q", expected=f"1 to {MAX_SEQLEN_Q}", got=seqlen_q, remedy=remedy)
    check_heads(nheads, k.shape[2], {"headdim": headdim, "headdim_v": v.shape[3]})
    if 0 in (batch, nheads, k.shape[1]):
        got = f"q {tuple(q.shape)}, k_cache {tuple(k.shape)}"
        raise ArgumentError("q, k_cache", expected="at least one row and head", got=got, remedy="Skip empty batches.")
    for name, x in (("k_cache", k), ("v_cache", v)):
        if x.stride(3) != 1:
            got = f"strides {x.stride()}"
            remedy = "Store each head's vector in one piece; other dimensions may lie in any order."
            raise ArgumentError(name, expected="a last dimension of stride 1", got=got, remedy=remedy)


def _check_no_gradient(name: str, x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        expected, got = "none that requires a gradient: decoding has no backward", "one that does"
        remedy = "Call under torch.no_grad(), or use rf.flash_attention, which has a backward."
        raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
    if forward_mode_level() >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        expected, got = "none with a tangent: decoding has no derivative", "a dual tensor (or torch.func.jvp, jacfwd)"
        remedy = "Use ringflash.reference.attention, the plain formula, over the valid keys."
        raise ArgumentError(name, expected=expected, got=got, remedy=remedy)


def _lengths(cache_seqlens: Tensor | int, q: Tensor, k: Tensor, context: ContextParallel | None) -> Tensor:
    """Returns cache_seqlens as a tensor (ranks in this process, batch)."""
    ranks = 1 if context is None else len(context.local_ranks)
    capacity = k.shape[1] // ranks
    if k.shape[1] % ranks:
        remedy = "Put the virtual ranks' shards one after another, all of one capacity."
        raise ArgumentError("k_cache", expected=f"a multiple of {ranks} rows", got=k.shape[1], remedy=remedy)
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens <= capacity:
            remedy = "It counts the valid keys, the new ones among them."
            raise ArgumentError("cache_seqlens", expected=f"0 to {capacity}", got=cache_seqlens, remedy=remedy)
        return torch.full((ranks, q.shape[0]), cache_seqlens, dtype=torch.int32, device=q.device)
    shape = (ranks, q.shape[0]) if ranks > 1 else (q.shape[0],)
    expected = f"an integer or an int32 or int64 tensor {shape} on {q.device}"
    remedy = "Pass the number of valid keys of each sequence."
    if not isinstance(cache_seqlens, Tensor):
        raise ArgumentError("cache_seqlens", expected=expected, got=repr(cache_seqlens), remedy=remedy)
    whole = cache_seqlens.dtype in (torch.int32, torch.int64)
    if not whole or cache_seqlens.device != q.device or cache_seqlens.shape not in (shape, (ranks, q.shape[0])):
        got = f"{cache_seqlens.dtype} {tuple(cache_seqlens.shape)} on {cache_seqlens.device}"
        raise ArgumentError("cache_seqlens", expected=expected, got=got, remedy=remedy)
    return cache_seqlens.reshape(ranks, -1)


def _check_scoring(q: Tensor, softmax_scale: float | None, options: DecodeOptions) -> float:
    """Checks what becomes of the scores, and returns the scale."""
    check_of_heads(q, options.sinks, options.alibi_slopes)
    for name, x in (("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)):
        if x is not None:
            _check_no_gradient(name, x)
    check_softcap(options.softcap)
    return scale_of(softmax_scale, q.shape[3])


def _check_options(q: Tensor, options: DecodeOptions, context: ContextParallel | None) -> None:
    kernels = choose(options.backend, q)
    splits = options.splits
    is_number = isinstance(splits, int) and not isinstance(splits, bool)
    if splits is not None and not (is_number and 1 <= splits <= MAX_SPLITS):
        remedy = "None chooses."
        raise ArgumentError("splits", expected=f"None or 1 to {MAX_SPLITS}", got=repr(splits), remedy=remedy)
    if not isinstance(options.tiles, DecodeTiles | None):
        remedy = "Pass rf.DecodeTiles(block_n, num_warps, num_stages)."
        raise ArgumentError("tiles", expected="None or a rf.DecodeTiles", got=repr(options.tiles), remedy=remedy)
    if options.tiles is not None and kernels.name == "eager":
        remedy = "Leave them out, or use the triton backend."
        raise ArgumentError("tiles", expected="None for the eager backend", got=options.tiles, remedy=remedy)
    world = 1 if context is None else context.world_size
    if world > 1 and options.alibi_slopes is not None:
        remedy = "A rank knows only its own keys' positions: decode with the whole cache on one device."
        raise ArgumentError("alibi_slopes", expected="None for a sharded cache", got="slopes", remedy=remedy)
    newest = options.newest_rank
    if not isinstance(newest, Integral) or isinstance(newest, bool) or not -world <= newest < world:
        remedy = "It counts the ranks of the context."
        raise ArgumentError("newest_rank", expected=f"{-world} to {world - 1}", got=repr(newest), remedy=remedy)
