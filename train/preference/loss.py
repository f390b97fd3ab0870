"""Loss of direct preference optimisation (DPO), from the losses of tokens that are spread over a ring."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import ringflash as rf
from ringflash.train.exchange import all_ranks


def dpo_losses(rewards: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Computes the loss of each pair, (1 - e) * -log sigmoid(margin) + e * -log sigmoid(-margin).

    The margin is the chosen answer's reward minus the rejected one's.

    Args:
        rewards: (..., 2) of the chosen and the rejected answer: beta * (log p of the policy - log p of the reference).
        label_smoothing: e, the share of pairs whose labels are assumed to be swapped; 0 is DPO, above it cDPO.

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7; Mitchell 2023, "A note on DPO with noisy
    preferences and relationship to IPO", equation 3.
    """
    margin = rewards[..., 0] - rewards[..., 1]
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def sum_by_document(values: Tensor, cu_seqlens: Tensor, context: rf.ContextParallel | None) -> Tensor:
    """Sums values of tokens by document, over all ranks of a ring; a collective of the ring.

    The sums are float64: a reward is a small difference of sums over very many tokens. Their gradients are those of
    the sum of all ranks' losses, if each rank's loss is its share: the loss / ranks of the ring.

    Args:
        values: (batch, seqlen_local) of this rank's tokens, with or without a graph.
        cu_seqlens: (batch, ndocuments + 1) int64 of the whole sequences, on the CPU or on the device of `values`.
        context: the ring; None for whole sequences.

    Returns:
        (batch, ndocuments), rounded up to an even number of documents with zeros.
    """
    seqlen, device = values.shape[1], cu_seqlens.device
    if context is None:
        positions = torch.arange(seqlen, device=device)
    else:
        positions = context.positions(int(cu_seqlens[0, -1]), device=device)
    rows = positions.expand(cu_seqlens.shape[0], -1).contiguous()
    document = torch.searchsorted(cu_seqlens.contiguous(), rows, right=True) - 1
    document = document.to(values.device, non_blocking=True)
    documents = cu_seqlens.shape[1] - 1
    # One by one, since a GPU would scatter in an order that changes from run to run.
    each = [torch.where(document == i, values, 0).sum(1, dtype=torch.float64) for i in range(documents)]
    sums = torch.stack([*each, *[torch.zeros_like(each[0])] * (documents % 2)], dim=1)
    if context is None or context.group is None:
        return sums
    # All ranks compute the same share of the loss from the sums. The gradients of a rank's own sums are thus the number
    # of ranks times what it finds, without a second collective. The order of ranks gives all of them the same bits.
    whole = all_ranks(sums.detach().contiguous(), context.group).sum(0)
    return whole + context.world_size * (sums - sums.detach())
