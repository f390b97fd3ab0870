"""The plain formula of attention, in any dtype up to float64: what every test compares with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringflash.masks import Mask, as_mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(softmax_scale q k^T + mask) v with every score in memory, differentiable, in the inputs' dtype.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_kv, headdim); KV heads are repeated over their group.
        v: as k.
        mask: which keys a query sees; the queries are the last `seqlen_q` positions.
        softmax_scale: 1 / sqrt(headdim) by default.
        softcap: scores become softcap * tanh(scores / softcap); 0 is none.

    Returns:
        out (batch, seqlen_q, nheads, headdim), 0 where a row sees nothing, and lse (batch, nheads, seqlen_q).

    Source: Vaswani et al. 2017, equation 1.
    """
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    positions_q = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)
    visible = as_mask(mask).dense(positions_q, torch.arange(seqlen_k, device=q.device))[:, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    blind = ~visible.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse
