"""Tile computations in blocked PyTorch, as `Backend` has them, on any device, in float64 too, and in O(seqlen) memory.

Shapes: q, dq (batch, seqlen_q, nheads, headdim); k, dk (batch, seqlen_k, nheads_kv, headdim); v, dv, out, dout likewise
with headdim_v; lse, delta (batch, nheads, seqlen_q). A block of q is folded to (batch, nheads_kv, group * rows,
headdim). One matmul then multiplies all query heads of a group with their KV head, and KV is not repeated. Half
precisions are computed in float32, float32 in float64, because the other kernels are judged by these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.dropout import kept
from ringflash.kernels.contract import BackwardArguments, DqSum, ForwardArguments, ScoreConfig
from ringflash.kernels.eager.mask_blocks import (
    BLOCK_K,
    BLOCK_Q,
    Block,
    Visibility,
    blocks,
    rows_of,
    state_dtype,
    visibility,
)
from ringflash.state import LOG2E, AttentionState


def _fold(x: Tensor, block: Block, nheads_kv: int) -> Tensor:
    """Returns rows of a query-side tensor: (batch, nheads_kv, group * rows, headdim) in `state_dtype`."""
    batch, _, nheads, headdim = x.shape
    return rows_of(x, block).view(batch, nheads_kv, nheads // nheads_kv * (block.end - block.begin), headdim)


def _fold_rows(x: Tensor, block: Block, nheads_kv: int) -> Tensor:
    """Folds one number a row from (batch, nheads, seqlen_q) to (batch, nheads_kv, group * rows)."""
    return x[:, :, block.begin : block.end].reshape(x.shape[0], nheads_kv, -1)


def _unfold(x: Tensor, block: Block, nheads: int) -> Tensor:
    """Inverts `_fold`: returns (batch, rows, nheads, headdim)."""
    return x.reshape(x.shape[0], nheads, block.end - block.begin, x.shape[-1]).transpose(1, 2)


@dataclass(frozen=True)
class _Scorer:
    """Scores of one block of queries against blocks of keys; tensors are (batch, nheads_kv, group * rows, keys)."""

    score_config: ScoreConfig
    queries: Block
    batch: int
    nheads: int
    nheads_kv: int

    def _folded(self, x: Tensor) -> Tensor:
        """Folds (batch or 1, nheads, rows, keys) to (batch or 1, nheads_kv, group * rows, keys)."""
        return x.reshape(x.shape[0], self.nheads_kv, -1, x.shape[-1])

    def capped(self, product: Tensor) -> Tensor:
        """Returns tanh of the scaled product, in place, if there is a softcap, else the unchanged product."""
        return product.mul_(self.score_config.before_tanh).tanh_() if self.score_config.softcap else product

    def scores(self, capped: Tensor, keys: Block) -> Tensor:
        """Returns scores in base 2."""
        scores = capped * self.score_config.to_base2
        if self.score_config.alibi_slopes is not None:
            rows, columns = self.queries.positions(capped.device), keys.positions(capped.device)
            slopes = self.score_config.alibi_slopes.to(capped.dtype)[:, :, None, None] * LOG2E
            scores -= self._folded(slopes * (rows[:, None] - columns).abs())
        return scores

    def drop(self, x: Tensor, keys: Block) -> Tensor:
        """Returns `x`, scaled where dropout keeps a weight and zero elsewhere."""
        if not self.score_config.dropout_p:
            return x
        rows, columns = self.queries.positions(x.device), keys.positions(x.device)
        p, seed, first = self.score_config.dropout_p, self.score_config.dropout_seed, self.score_config.first_head
        stays = kept(p, seed, self.batch, self.nheads, rows, columns, first)
        return x.mul(self.score_config.kept_scale).mul_(self._folded(stays))


def _scorer(q: Tensor, k: Tensor, queries: Block, score_config: ScoreConfig) -> _Scorer:
    return _Scorer(score_config, queries, q.shape[0], q.shape[2], k.shape[2])


def forward(given: ForwardArguments) -> None:
    """Computes one hop; see `Backend.forward`."""
    q, k, v, problem, state, out, lse, first, last = given
    batch, _, nheads, _ = q.shape
    nheads_kv, config = k.shape[2], problem.score_config
    for queries in blocks(problem.q_chunks, BLOCK_Q):
        sees = visibility(problem.mask, problem.q_chunks, queries, nheads // nheads_kv, q.device)
        seen = sees.over(problem.k_chunks)
        if not (seen or first or last):
            continue  # the state stays as it is
        q_block = _fold(q, queries, nheads_kv)
        scorer = _scorer(q, k, queries, config) if config.has_score_mods else None
        if first:
            m = q_block.new_full(q_block.shape[:3], -math.inf)
            row_sum, acc = torch.zeros_like(m), q_block.new_zeros((*m.shape, v.shape[3]))
        else:
            assert state is not None
            m = _fold_rows(state.m, queries, nheads_kv).to(q_block.dtype)
            row_sum = _fold_rows(state.l, queries, nheads_kv).to(q_block.dtype)
            acc = _fold(state.o, queries, nheads_kv).to(q_block.dtype)
        for keys, is_masked in seen:
            product, values = q_block @ sees.rows(k, keys).transpose(-1, -2), sees.rows(v, keys)
            scores = scorer.scores(scorer.capped(product), keys) if scorer else product * config.to_base2
            if is_masked:
                scores = sees.hide(scores, keys, -math.inf)
            m_new = torch.maximum(m, scores.amax(dim=-1))
            shift = m_new.masked_fill(m_new == -math.inf, 0.0)
            weights = scores.sub_(shift[..., None]).exp2_()
            rescale = torch.exp2(m - shift)
            row_sum = row_sum * rescale + weights.sum(dim=-1)
            kept_weights = scorer.drop(weights, keys) if scorer else weights
            product = sees.over_keys(kept_weights, values, keys) if is_masked else kept_weights @ values
            acc = acc * rescale[..., None] + product
            m = m_new
        rows = slice(queries.begin, queries.end)
        shape = (batch, nheads, queries.end - queries.begin)
        part = AttentionState(m.reshape(shape), row_sum.reshape(shape), _unfold(acc, queries, nheads))
        if last:
            part = part if config.sinks is None else part.with_sinks(config.sinks)
            out[:, rows], lse[:, :, rows] = part.finalize(out.dtype)
        else:
            assert state is not None
            state.m[:, :, rows], state.l[:, :, rows], state.o[:, rows] = part.m, part.l, part.o


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns rowsum(dout * out) - dlse, which the softmax's backward subtracts: (batch, nheads, seqlen_q)."""
    product = torch.einsum("bshd,bshd->bhs", out.double(), dout.double())  # in float64, because the terms cancel
    return (product if dlse is None else product - dlse).to(state_dtype(out.dtype))


@dataclass(frozen=True)
class _Queries:
    """Inputs of the backward for one block of queries; scores are computed as in the forward, so they round alike."""

    sees: Visibility
    q: Tensor
    dout: Tensor
    lse: Tensor  # in base 2; +inf for fully masked rows, so that their probabilities are 0
    delta: Tensor
    scorer: _Scorer

    def probabilities_and_gradient(self, keys: Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Computes P and dS over one block of keys.

        P = 2^(s - lse), dS = P * (dropout(dout v^T) - delta). The returned P has dropout applied.
        """
        capped = self.scorer.capped(self.q @ self.sees.rows(k, keys).transpose(-1, -2))
        p = self.scorer.scores(capped, keys).sub_(self.lse[..., None]).exp2_()
        p = self.sees.hide(p, keys, 0.0)  # after the exponential: the NaN lse of a row must not reach masked keys
        dp = self.scorer.drop(self.dout @ self.sees.rows(v, keys).transpose(-1, -2), keys)
        ds = dp.sub_(self.delta[..., None]).mul_(p)
        if self.scorer.score_config.softcap:
            ds.mul_(1.0 - capped.square())
        # fully masked rows may hold anything, NaN included
        return self.scorer.drop(p, keys), self.sees.hide(ds, keys, 0.0)


def _queries(block: Block, sees: Visibility, inputs: BackwardArguments) -> _Queries:
    dout, q, k, _, lse, delta, problem = inputs
    nheads_kv = k.shape[2]
    lse_rows = _fold_rows(lse, block, nheads_kv)
    fully_masked = lse_rows == -math.inf
    return _Queries(
        sees,
        _fold(q, block, nheads_kv).masked_fill(fully_masked[..., None], 0.0),
        _fold(dout, block, nheads_kv).masked_fill(fully_masked[..., None], 0.0),
        (lse_rows.double() * LOG2E).to(state_dtype(q.dtype)).masked_fill(fully_masked, math.inf),
        _fold_rows(delta, block, nheads_kv),
        _scorer(q, k, block, problem.score_config),
    )


def backward_dq(inputs: BackwardArguments, dq: Tensor, *, accumulate: bool) -> None:
    """Computes dq = softmax_scale * dS k over these keys; adds it to `dq` when `accumulate`, else overwrites `dq`."""
    _, q, k, v, *_, problem = inputs
    nheads, nheads_kv = q.shape[2], k.shape[2]
    for queries in blocks(problem.q_chunks, BLOCK_Q):
        sees = visibility(problem.mask, problem.q_chunks, queries, nheads // nheads_kv, q.device)
        rows = _queries(queries, sees, inputs)
        acc = torch.zeros_like(rows.q)
        for keys, _ in sees.over(problem.k_chunks):
            _, ds = rows.probabilities_and_gradient(keys, k, v)
            acc += sees.over_keys(ds, sees.rows(k, keys), keys)
        update = _unfold(acc * problem.score_config.softmax_scale, queries, nheads)
        target = dq[:, queries.begin : queries.end]
        target.copy_(target + update if accumulate else update)


def backward_dkdv(
    inputs: BackwardArguments, dk: Tensor, dv: Tensor, *, accumulate: bool, dq: DqSum | None = None
) -> None:
    """Computes dk = softmax_scale * dS^T q and dv = P^T dout over these queries; adds them when `accumulate`.

    With `dq`, also adds the share softmax_scale * dS k of these keys to that sum, in a fixed order.
    """
    _, q, k, v, *_, problem = inputs
    nheads, nheads_kv = q.shape[2], k.shape[2]
    queries_and_masks = [
        (queries, visibility(problem.mask, problem.q_chunks, queries, nheads // nheads_kv, q.device))
        for queries in blocks(problem.q_chunks, BLOCK_Q)
    ]
    for block in blocks(problem.k_chunks, BLOCK_K):
        shape = (k.shape[0], nheads_kv, block.end - block.begin)
        dk_acc, dv_acc = (x.new_zeros((*shape, x.shape[3]), dtype=state_dtype(k.dtype)) for x in (k, v))
        for queries, sees in queries_and_masks:
            keys = sees.of(block)
            if keys is None:
                continue
            rows = _queries(queries, sees, inputs)
            p, ds = rows.probabilities_and_gradient(keys, k, v)
            seen = slice(keys.begin - block.begin, keys.end - block.begin)
            dv_acc[:, :, seen] += sees.over_rows(p, rows.dout, keys)
            dk_acc[:, :, seen] += sees.over_rows(ds, rows.q, keys)
            if dq is not None:
                part = sees.over_keys(ds, sees.rows(k, keys), keys) * problem.score_config.softmax_scale
                dq.rows()[:, queries.begin : queries.end] += _unfold(part, queries, nheads)
        for total, acc in ((dk, dk_acc * problem.score_config.softmax_scale), (dv, dv_acc)):
            target = total[:, block.begin : block.end]
            update = acc.transpose(1, 2)
            target.copy_(target + update if accumulate else update)
