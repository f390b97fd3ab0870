"""Cross entropy summed over valid tokens, without a float32 copy of the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
CHUNK_TOKENS = 1024


class TokenLosses(NamedTuple):
    """Losses of tokens.

    Args:
        total: sum over valid tokens, a scalar with a graph.
        tokens: loss of each token, in the labels' shape; it has a graph only where the caller asked for one.
    """

    total: Tensor
    tokens: Tensor


def count_valid(labels: Tensor) -> Tensor:
    """Counts the labels that are not `IGNORE_INDEX`: a scalar int64 tensor."""
    return (labels != IGNORE_INDEX).sum()


def token_losses(logits: Tensor, labels: Tensor, *, each: bool = False) -> TokenLosses:
    """Sums logsumexp(logits) - logits[label] over valid tokens: a float32 scalar (float64 for float64 logits).

    The loss is computed in the result's dtype, `CHUNK_TOKENS` tokens at a time; the backward rebuilds the softmax from
    the saved logsumexp. Tokens labelled `IGNORE_INDEX` add exactly 0 to the loss and to the gradient, even for NaN or
    infinite logits. Without a valid token the loss is 0 and still has its graph.

    Args:
        logits: (..., vocab_size), any float dtype.
        labels: (...) int64 in [0, vocab_size), or `IGNORE_INDEX`.
        each: give the loss of each token a graph, for losses that weight tokens.
    """
    tokens: Any = _TokenLoss.apply(logits.flatten(0, -2), labels.flatten())
    return TokenLosses(tokens.sum(), (tokens if each else tokens.detach()).view(labels.shape))


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        lse = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        losses = torch.empty_like(lse)
        for rows in _chunks(labels):
            x = logits[rows].to(dtype)
            valid = labels[rows] != IGNORE_INDEX
            lse[rows] = x.logsumexp(dim=-1)
            picked = x.gather(-1, labels[rows].masked_fill(~valid, 0)[:, None])[:, 0]
            losses[rows] = (lse[rows] - picked).masked_fill(~valid, 0)
        ctx.save_for_backward(logits, labels, lse)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels, lse = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for rows in _chunks(labels):
            valid = (labels[rows] != IGNORE_INDEX)[:, None]
            dx = (logits[rows].to(lse.dtype) - lse[rows][:, None]).exp_()
            index = labels[rows][:, None].masked_fill(~valid, 0)
            dx.scatter_add_(-1, index, torch.full_like(index, -1, dtype=dx.dtype))
            dlogits[rows] = dx.mul_(dout[0][rows][:, None]).masked_fill_(~valid, 0).to(logits.dtype)
        return dlogits, None


def _chunks(labels: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, labels.shape[0], CHUNK_TOKENS)]
