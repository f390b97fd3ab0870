"""The plain formula of attention in any dtype up to float64, the reference of every test."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringflash.dropout import Dropout, kept
from ringflash.masks import Mask, as_mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout: Dropout | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes softmax(softmax_scale q k^T + mask) v with every score in memory, differentiable, in the inputs' dtype.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_kv, headdim); each KV head is repeated for its group of query heads.
        v: (batch, seqlen_k, nheads_kv, headdim_v).
        mask: which keys a query sees; the queries are the last `seqlen_q` positions.
        softmax_scale: 1 / sqrt(headdim) by default.
        softcap: scores become softcap * tanh(scores / softcap); 0 is none.
        dropout: selects the weights that are dropped; pass one with a seed.
        alibi_slopes: (nheads,) or (batch, nheads); scores lose slope * |position_q - position_k|.
        sinks: (nheads,), the logit of one more key without a value, in rows that see a key.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v), 0 in fully masked rows, and lse (batch, nheads, seqlen_q).

    Source: Vaswani et al. 2017, equation 1.
    """
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    positions_q = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)
    positions_k = torch.arange(seqlen_k, device=q.device)
    visible = as_mask(mask).dense(positions_q, positions_k)[:, None]
    fully_masked = ~visible.any(dim=-1, keepdim=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (positions_q[:, None] - positions_k).abs()
        scores = scores - torch.atleast_2d(alibi_slopes).to(q.dtype)[..., None, None] * distance
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        logits = sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, logits.masked_fill(fully_masked, -math.inf)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores.masked_fill(fully_masked, 0.0), dim=-1).masked_fill(fully_masked, 0.0)[
        ..., :seqlen_k
    ]
    if dropout is not None:
        stays = kept(dropout.p, int(dropout.drawn()), q.shape[0], q.shape[2], positions_q, positions_k)
        weights = weights * stays / (1.0 - dropout.p)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse
