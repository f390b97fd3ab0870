"""Decoding as a torch.library custom op: the parts of this process's ranks, their exchange and their merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringflash.context import ContextParallel, context_by_name
from ringflash.errors import ArgumentError
from ringflash.kernels import select
from ringflash.kernels.backend import Backend
from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.decode_step import DecodeTiles, Partials, Step, sight_of, whole_sight
from ringflash.masks import Full, Mask, SlidingWindow, described, mask_from_spec
from ringflash.ops.guard import Guard, Phase


@torch.library.custom_op("ringflash::decode", mutates_args=())
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    context: str,
    mask: str,
    mask_tensors: Sequence[Tensor],
    softmax_scale: float,
    softcap: float,
    backend: str,
    newest_rank: int,
    splits: int,
    tiles: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Returns out and lse over the valid keys of all ranks of the named context."""
    ranks = context_by_name(context) if context else None
    with Guard(ranks) as guard:
        kernels, lengths = select.choose(backend, q), lengths.contiguous()  # kernels read them as one vector
        score_config = ScoreConfig.of(q.dtype, softmax_scale, softcap, alibi_slopes=alibi_slopes, sinks=sinks)
        capacity = k_cache.shape[1] // lengths.shape[0]
        check_on_cpu(lengths, capacity)
        seen = mask_from_spec(mask, mask_tensors)
        sight = sight_of(seen, q.shape[1], capacity)
        if ranks is not None and ranks.world_size > 1:
            _check_shardable(seen)
            if lengths.device.type == "cpu" and bool(lacks_new_tokens(lengths, q.shape[1], seen, ranks, newest_rank)):
                raise _new_tokens_elsewhere(q.shape[1], lengths)
        step = Step(score_config, sight, splits or None, DecodeTiles(*tiles) if tiles else None)
        if ranks is None:
            with select.kernels_of(q):
                return kernels.decode(q, k_cache, v_cache, lengths[0], step)
        guard.phase = Phase.AGREEING
        _agree(ranks, q, k_cache, v_cache, seen, step, kernels, newest_rank)
        guard.phase = Phase.RUNNING
        whole = Step(score_config, whole_sight(q.shape[1], capacity), step.splits, step.tiles)
        with select.kernels_of(q):
            parts = [
                kernels.decode_partial(q, k, v, lengths, step if rank == newest_rank % ranks.world_size else whole)
                for rank, k, v, lengths in zip(
                    ranks.local_ranks, k_cache.split(capacity, 1), v_cache.split(capacity, 1), lengths, strict=True
                )
            ]
            states = _of_all_ranks(ranks, parts)
            result = kernels.decode_combine(states, score_config, q.dtype)
    masked = q.shape[1] > 1 and not isinstance(seen, Full)
    if masked and q.device.type == "cpu" and _lacks_sequence(states, newest_rank):
        raise _new_tokens_elsewhere(q.shape[1], lengths)
    return result


@decode.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_parameters: Any) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, nheads, _ = q.shape
    lse = q.new_empty((batch, nheads, seqlen_q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((batch, seqlen_q, nheads, v_cache.shape[3])), lse


def check_on_cpu(lengths: Tensor, capacity: int) -> None:
    """Raises ArgumentError for lengths on the CPU that are not between 0 and `capacity`."""
    if lengths.device.type == "cpu" and bool(((lengths < 0) | (lengths > capacity)).any()):
        remedy = "It counts the valid keys, the new ones among them."
        raise ArgumentError("cache_seqlens", expected=f"0 to {capacity}", got=lengths.tolist(), remedy=remedy)


def lacks_new_tokens(lengths: Tensor, seqlen_q: int, mask: Mask, ranks: ContextParallel, newest_rank: int) -> Tensor:
    """Returns whether `lengths` (ranks in this process, batch) show that `newest_rank` lacks some of the new tokens."""
    newest = newest_rank % ranks.world_size
    if isinstance(mask, Full) or newest not in ranks.local_ranks:
        return lengths.new_zeros((), dtype=torch.bool)
    there = lengths[ranks.local_ranks.index(newest)]
    begun = there > 0 if len(lengths) == 1 else lengths.sum(0) > there  # one rank does not know the others' lengths
    return (begun & (there < seqlen_q)).any()


def _lacks_sequence(states: Partials, newest_rank: int) -> bool:
    """Returns whether `newest_rank` sees no key of a sequence that has keys on other ranks, and so lacks new tokens.

    That rank takes the sequence for one that nobody has begun. Every rank has the states of all, and finds the same.
    A single query sees all keys, and its result is right.
    """
    seen = (states.stacked.l > 0).flatten(2).any(2)  # (ranks, batch)
    return bool((seen.any(0) & ~seen[newest_rank]).any())


def _new_tokens_elsewhere(seqlen_q: int, lengths: Tensor) -> ArgumentError:
    expected = f"the {seqlen_q} new tokens among those of newest_rank, under a mask"
    remedy = "Keep new tokens on one rank, the newest_rank of the call, or pass no mask."
    return ArgumentError("cache_seqlens", expected=expected, got=lengths.tolist(), remedy=remedy)


def _check_shardable(mask: Mask) -> None:
    if any(isinstance(part, SlidingWindow) and part.left is not None for part in mask.parts):
        expected = "one without a window to the left for a sharded cache"
        remedy = "A rank knows only its own keys' positions: decode with the whole cache on one device."
        raise ArgumentError("mask", expected=expected, got=repr(mask), remedy=remedy)


def _agree(
    ranks: ContextParallel, q: Tensor, k: Tensor, v: Tensor, mask: Mask, step: Step, kernels: Backend, newest_rank: int
) -> None:
    """Raises RankMismatch on every rank unless all make the same call; capacities may differ."""
    if ranks._control is None:
        return
    fields = {
        "operation": "decode",
        "device": q.device.type,
        "q": str(tuple(q.shape)),
        "nheads_kv": k.shape[2],
        "headdim_v": v.shape[3],
        "dtype": str(q.dtype),
        "mask": described(mask),
        "softmax_scale": step.score_config.softmax_scale,
        "softcap": step.score_config.softcap,
        "sinks": "none" if step.score_config.sinks is None else "given",
        "backend": "eager" if kernels.name == "eager" else "triton",  # Hopper decodes in Triton too
        "newest_rank": newest_rank % ranks.world_size,
        "capacity": k.shape[1],
    }
    ranks._control.agree(fields, free="capacity")


def _of_all_ranks(ranks: ContextParallel, parts: Sequence[Partials]) -> Partials:
    """Returns the states of all ranks in rank order, the same on every rank."""
    own = torch.cat([part.storage for part in parts])
    storage = own if ranks._control is None else ranks._control.stack(own[0])
    return Partials(storage, parts[0].batch, parts[0].seqlen_q, parts[0].nheads, parts[0].headdim_v)
