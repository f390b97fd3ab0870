"""Decoding in blocked PyTorch, as `Backend` has it, on any device and in float64 too.

Shapes: q (batch, seqlen_q, nheads, headdim); k (batch, capacity, nheads_kv, headdim); v (batch, capacity, nheads_kv,
headdim_v); lengths (batch,). Half precisions are computed in float32, float32 in float64.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.decode_step import Partials, Sight, Step, merge_tree
from ringflash.kernels.eager.isolation import is_finite, isolated_matmul
from ringflash.kernels.eager.mask_blocks import BLOCK_K, state_dtype
from ringflash.state import LOG2E, AttentionState


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Returns out (batch, seqlen_q, nheads, headdim_v), lse (batch, nheads, seqlen_q) over the first `lengths` keys."""
    return _finished(_state(q, k, v, lengths, step), step.score_config, q.dtype)


def splits_of(q: Tensor, k: Tensor, v: Tensor, step: Step) -> int:
    """Returns the number of parts into which each sequence's keys are cut: one unless the step names another."""
    return step.splits or 1


def partial(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step) -> Partials:
    """Returns one state over the first `lengths` keys, without sinks."""
    return Partials.of([_state(q, k, v, lengths, step)])


def combine(partials: Partials, score_config: ScoreConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns out in `dtype` and lse over the keys of all states."""
    return _finished(merge_tree(partials.states()), score_config, dtype)


def _finished(state: AttentionState, score_config: ScoreConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, lse = state.with_sinks(score_config.sinks).finalize(dtype)
    return out.contiguous(), lse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def _state(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step) -> AttentionState:
    # Reading lengths from a GPU would wait for the GPU, so there every block of the cache is processed.
    stop = k.shape[1] if lengths.is_cuda else max(1, int(lengths.max()))
    splits = min(step.splits or 1, stop)
    edges = [stop * split // splits for split in range(splits + 1)]
    blocks = [(n, min(n + BLOCK_K, end)) for begin, end in pairwise(edges) for n in range(begin, end, BLOCK_K)]
    return merge_tree([_block_state(q, k, v, lengths, step, begin, end) for begin, end in blocks])


def _block_state(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step, begin: int, end: int) -> AttentionState:
    """Returns the state over the keys [begin, end)."""
    batch, seqlen_q, nheads, _ = q.shape
    nheads_kv, headdim_v = v.shape[2:]
    score_config, dtype = step.score_config, state_dtype(q.dtype)
    grouped = (batch, nheads_kv, nheads // nheads_kv, seqlen_q)
    rows = q.transpose(1, 2).to(dtype).reshape(batch, nheads_kv, -1, q.shape[3])
    keys = torch.arange(begin, end, device=q.device)
    invalid = (keys >= lengths[:, None])[:, None, :, None]  # the cache may hold anything there, NaN included
    k_rows, v_rows = (x[:, begin:end].transpose(1, 2).to(dtype).masked_fill(invalid, 0.0) for x in (k, v))
    scores = (rows @ k_rows.transpose(-1, -2)).view(*grouped, end - begin)
    if score_config.softcap:
        scores = torch.tanh(scores * score_config.before_tanh)
    scores = scores * score_config.to_base2
    positions = lengths[:, None] - seqlen_q + torch.arange(seqlen_q, device=q.device)
    if score_config.alibi_slopes is not None:
        slopes = (score_config.alibi_slopes.to(dtype) * LOG2E).view(-1, nheads_kv, nheads // nheads_kv, 1, 1)
        scores = scores - slopes * (positions[..., None] - keys).abs()[:, None, None]
    visible = _visible(positions, keys, lengths, step.sight)[:, None, None]
    scores = scores.masked_fill(~visible, -math.inf)
    m = scores.amax(-1)
    weights = torch.exp2(scores - m.masked_fill(m == -math.inf, 0.0)[..., None])
    # On a GPU the check for finite values would wait for the GPU, so there the values count as not finite.
    finite = not v_rows.is_cuda and is_finite(v_rows)
    seen = lambda: visible.expand(*grouped, -1).flatten(2, 3)  # noqa: E731
    o = (
        isolated_matmul(weights.flatten(2, 3), v_rows, seen, finite=finite)
        .view(batch, nheads, seqlen_q, headdim_v)
        .transpose(1, 2)
    )
    return AttentionState(m.view(batch, nheads, seqlen_q), weights.sum(-1).view(batch, nheads, seqlen_q), o)


def _visible(positions: Tensor, keys: Tensor, lengths: Tensor, sight: Sight) -> Tensor:
    """Returns the keys each query sees, (batch, seqlen_q, keys), from positions (batch, seqlen_q) and keys (keys,)."""
    p, valid = positions[..., None], lengths[:, None, None]
    visible = (keys >= p - sight.left) & (keys <= p + sight.right) & (keys < valid)
    if sight.tree:
        words = torch.tensor(sight.tree, device=keys.device)[None, :, None]
        token = keys - (valid - len(sight.tree))
        visible &= (token < 0) | ((words >> token.clamp(0, 63)) & 1).bool()
    return visible
