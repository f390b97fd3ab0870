"""Cross entropy from final hidden states and the head's weight, without whole logits.

Written here instead of taken from a library: liger-kernel's needs a GPU, cut-cross-entropy's computes the logits twice,
and neither has float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringflash.errors import ArgumentError
from ringflash.train.models.loss import IGNORE_INDEX, TokenLosses

# Size of a chunk's logits in float32: 2048 tokens at a vocabulary of 128k. The weight's gradient is read and written
# once a chunk, which takes 0.4 of the 3.9 ms of its product (128k x 4096, H100). Smaller chunks pay this more often.
CHUNK_BYTES = 2**30
ROW_MULTIPLE = 128  # rows in a tile of a matrix product


def linear_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, each: bool = False) -> TokenLosses:
    """Computes `token_losses(hidden @ weight.T, labels)` with the logits of `chunk_rows` tokens at a time.

    The forward also computes the gradients, dhidden = dlogits @ weight and dweight = dlogits.T @ hidden, so that each
    chunk's logits are computed once; the backward scales them. A frozen weight has no dweight. Logits, softmax and the
    sum of dweight are in float32 (float64 for float64); dlogits are rounded to hidden's dtype for their two products.
    Under torch.autocast hidden and weight take its dtype, as in torch.nn.functional.linear. Tokens labelled
    `IGNORE_INDEX` have loss exactly 0 and dlogits exactly 0; without a valid token the total is 0 and still has its
    graph.

    Args:
        hidden: (batch, seqlen, dim), any float dtype.
        weight: (vocab_size, dim), whole: under FSDP inside the forward of the module that gathers it.
        labels: (batch, seqlen) int64 in [0, vocab_size), or `IGNORE_INDEX`. Other values are undefined behaviour on
            GPUs; `ringflash.train.lightning.batch.check_tokens` rejects them while they are on the CPU.
        each: give the loss of each token a graph, for losses that weight tokens. The backward then computes a trained
            weight's gradient, from logits that it makes once more.

    Raises:
        ArgumentError: the shapes do not fit.
    """
    if hidden.shape[:-1] != labels.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            "hidden",
            expected=f"labels' shape {tuple(labels.shape)} and the width of weight {tuple(weight.shape)}",
            got=tuple(hidden.shape),
            remedy="Pass one label a row of hidden, and weight as (vocab_size, dim).",
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        losses: Any = _LinearTokenLoss.apply(hidden.flatten(0, -2), weight, labels, needs_gradient, each)
    return TokenLosses(*losses)


def chunk_rows(vocab_size: int) -> int:
    """Returns the number of tokens with logits in memory at a time."""
    rows = CHUNK_BYTES // (4 * vocab_size)
    return max(rows // ROW_MULTIPLE * ROW_MULTIPLE, ROW_MULTIPLE)


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, needs_gradient: bool, each: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        losses = torch.empty(labels.shape, dtype=dtype, device=hidden.device)  # no view, since FSDP2 warns of those
        by_row, labels = losses.view(-1), labels.flatten()
        dhidden = torch.empty_like(hidden) if needs_gradient else None
        trains_head = needs_gradient and ctx.needs_input_grad[1]
        dweight = torch.zeros_like(weight, dtype=dtype) if trains_head and not each else None
        for rows in _chunks(labels, weight):
            by_row[rows], dlogits = _chunk(hidden[rows], weight, labels[rows], dtype, needs_gradient)
            if dlogits is not None and dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[rows])
                if dweight is not None:
                    _add_product(dweight, dlogits.T, hidden[rows])
        ctx.save_for_backward(dhidden, dweight, *((hidden, weight, labels) if trains_head and each else ()))
        ctx.weight_dtype = weight.dtype
        if not each:
            ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dhidden, dweight, *of_head = ctx.saved_tensors
        scales = (douts[0] + douts[1]).flatten()[:, None]  # without `each` the second is 0
        if of_head:
            hidden, weight, labels = of_head
            dweight = torch.zeros_like(weight, dtype=scales.dtype)
            for rows in _chunks(labels, weight):
                _, dlogits = _chunk(hidden[rows], weight, labels[rows], scales.dtype, needs_gradient=True)
                assert dlogits is not None
                _add_product(dweight, torch.mul(dlogits, scales[rows], out=dlogits).T, hidden[rows])
            dweight = dweight.to(weight.dtype)
        elif dweight is not None:
            # Avoids a second float32 copy of the largest gradient.
            rounded = torch.empty_like(dweight, dtype=ctx.weight_dtype)
            dweight = torch.mul(dweight, douts[0], out=rounded)
        return torch.mul(dhidden, scales, out=torch.empty_like(dhidden)), dweight, None, None, None


def _chunk(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns losses and dlogits of some rows. Their logits are freed here, before the next chunk's are made."""
    cross_entropy = _fused_cross_entropy() if hidden.is_cuda else _cross_entropy
    return cross_entropy(_product(hidden, weight.T, dtype), labels, hidden.dtype if needs_gradient else None)


def _chunks(labels: Tensor, weight: Tensor) -> list[slice]:
    step = chunk_rows(weight.shape[0])
    return [slice(start, start + step) for start in range(0, labels.shape[0], step)]


def _cross_entropy(logits: Tensor, labels: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Returns losses (tokens,) of logits (tokens, vocab_size), and dlogits in `dtype` unless it is None."""
    valid = (labels != IGNORE_INDEX)[:, None]
    index = labels[:, None].masked_fill(~valid, 0)
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, index)
    losses = (-picked).masked_fill(~valid, 0)[:, 0]
    if dtype is None:
        return losses, None
    chosen = torch.arange(logits.shape[1], device=logits.device) == index
    dlogits = torch.where(chosen, picked.expm1(), log_p.exp_())  # p - 1 where p is close to 1
    return losses, dlogits.masked_fill_(~valid, 0).to(dtype)


@cache
def _fused_cross_entropy() -> Callable[[Tensor, Tensor, torch.dtype | None], tuple[Tensor, Tensor | None]]:
    """Returns `_cross_entropy`, compiled to two passes over the logits without further tensors of their size.

    The result is cached, because torch.compile finds compiled code by the function. If there are more kinds of calls
    than the compiler allows, the other kinds run uncompiled.
    """
    return torch.compile(_cross_entropy)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes a @ b in `dtype`, without rounding to the dtype of `a` in between."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes total += a @ b, without rounding to the dtype of `a` in between."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
