"""The mean loss over the valid tokens of all ranks: a loss to call backward on, and a value to log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringflash.errors import ArgumentError

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
NO_ATTENTION = (
    "context.token_mean: no attention has used this context yet, so each of its %d ranks attends to its own part of "
    "the sequence alone. Call rf.ring_attention with the context, or pass ring_context= to a model of transformers, "
    "unless no token of this model sees another."
)
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class TokenMean:
    """The mean loss over the valid tokens of all ranks.

    Args:
        loss: a scalar with a graph, equal to `value` on every rank. Its gradient is this rank's part of the gradient of
            the mean, scaled so that the reduction over ranks gives exactly the gradient of the mean.
        value: the mean, detached, equal on all ranks; 0 where no token is valid.
        num_valid: valid tokens of all ranks, an int64 scalar.
    """

    loss: Tensor
    value: Tensor
    num_valid: Tensor


@dataclass(frozen=True)
class TokenRanks:
    """Ranks that the tokens of a batch are counted over.

    Args:
        groups: process groups to reduce over, one after another; empty in a single process.
        size: number of ranks in all groups together.
    """

    groups: tuple[dist.ProcessGroup, ...]
    size: int

    def sum(self, local: Tensor) -> Tensor:
        """Adds `local` over the ranks, in place."""
        for group in self.groups:
            dist.all_reduce(local, group=group)
        return local


class TokenMeans:
    """Methods of `ContextParallel` for token means."""

    group: dist.ProcessGroup | None
    heads_group: dist.ProcessGroup | None
    # A strategy that sums gradients itself sets these for its own context.
    gradients: Reduction = "mean"
    weighs_windows = False
    labels_shape: tuple[int, int] | None = None  # of this rank's part of the batch, if the strategy has cut it
    token_means_made = 0

    @property
    def passes(self) -> int:
        """Forwards and backwards of attention so far."""
        raise NotImplementedError

    def token_mean(
        self,
        token_losses: Tensor,
        labels: Tensor,
        *,
        num_valid_tokens: Tensor | int | None = None,
        group: dist.ProcessGroup | None = None,
        gradients: Reduction | None = None,
    ) -> TokenMean:
        """Returns the mean loss over the valid tokens of all ranks: `loss` for backward, `value` to log; a collective.

        The loss is correct under DDP and FSDP2, which average gradients, and under `RingAttentionStrategy`. A rank may
        have any number of valid tokens, including none.

        Args:
            token_losses: the loss of each token of this rank, in the shape of `labels`; any value for masked tokens.
            labels: this rank's labels, shifted before they were cut, -100 where there is no target.
            num_valid_tokens: valid tokens of the accumulation window on all ranks, from `count_valid_tokens`. The
                losses and values of the micro-batches then add up to the window's mean. None: the tokens of this call.
            group: the ranks that average their gradients, or the data-parallel ranks alone; None: all processes.
            gradients: "mean" if gradients are averaged over ranks, "sum" if they are summed; None: "mean", and "sum"
                for the context of a `RingAttentionStrategy`.

        Raises:
            ArgumentError: a tensor has another shape or dtype, the count is not a whole number, or `group` has only a
                part of the context's ranks. Also raised if an argument contradicts the strategy.
        """
        if gradients is None:
            gradients = self.gradients
        elif self.gradients == "sum" and gradients == "mean":
            remedy = "Leave it out: the strategy of this context sums gradients over ranks."
            raise ArgumentError("gradients", expected='None or "sum"', got=repr(gradients), remedy=remedy)
        if self.weighs_windows and num_valid_tokens is not None:
            remedy = "Leave it out: the strategy weighs the micro-batches of a window by their valid tokens."
            raise ArgumentError("num_valid_tokens", expected="None", got=repr(num_valid_tokens), remedy=remedy)
        _check(token_losses, labels, num_valid_tokens, gradients)
        if num_valid_tokens is None:  # with a count a call may hold only a chunk of the batch
            self._check_cut_once(labels)
        mean = _token_mean(token_losses, labels, num_valid_tokens, self._token_ranks(group), gradients)
        # the strategy looks at each step
        if self.token_means_made == 0 and self.gradients == "mean" and self.passes == 0:
            self._warn_without_attention()
        self.token_means_made += 1
        return mean

    def count_valid_tokens(
        self, labels: Tensor | Sequence[Tensor], *, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Returns the number of valid tokens of all ranks, an int64 scalar; a collective.

        Args:
            labels: this rank's labels of one micro-batch, or of several.
            group: as in `token_mean`.

        Raises:
            ArgumentError: `labels` is empty or holds no whole numbers; or `group`, as in `token_mean`.
        """
        parts = [labels] if isinstance(labels, Tensor) else list(labels)
        if not parts:
            raise ArgumentError("labels", expected="at least one tensor", got="none", remedy="Pass this rank's labels.")
        for part in parts:
            _check_labels(part)
        local = torch.stack([(part != IGNORE_INDEX).sum() for part in parts]).sum()
        return self._token_ranks(group).sum(local)

    def _warn_without_attention(self) -> None:
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        if ranks > 1 and dist.get_rank() == 0:
            logger.warning(NO_ATTENTION, ranks)

    def _check_cut_once(self, labels: Tensor) -> None:
        """Raises ArgumentError for labels of the shape that `context.shard` makes of those that a strategy has cut."""
        if self.labels_shape is None or self.group is None or (ranks := dist.get_world_size(self.group)) == 1:
            return
        batch, rows = self.labels_shape
        again = {rows // ranks, -(-rows // ranks)} - {rows}
        if labels.dim() == 2 and labels.shape[0] == batch and labels.shape[1] in again:
            raise ArgumentError(
                "labels",
                expected=f"this rank's part of the batch, {self.labels_shape}",
                got=f"{tuple(labels.shape)}, of a batch that was cut twice",
                remedy="Leave out context.shard: the strategy has cut input_ids and labels.",
            )

    def _token_ranks(self, group: dist.ProcessGroup | None) -> TokenRanks:
        return _token_ranks([each for each in (self.group, self.heads_group) if each is not None], group)


def _token_ranks(context_groups: Sequence[dist.ProcessGroup], group: dist.ProcessGroup | None) -> TokenRanks:
    """Returns the ranks to count over, from the groups of a context (empty for virtual ranks) and the given `group`."""
    if group is None:
        world = dist.group.WORLD if dist.is_initialized() else None
        return TokenRanks((), 1) if world is None else TokenRanks((world,), dist.get_world_size())
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ArgumentError(
            "group",
            expected="a process group that this rank belongs to, or None for all processes",
            got=repr(group),
            remedy="Pass mesh.get_group(name) of a DeviceMesh.",
        )
    members = set(dist.get_process_group_ranks(group))
    shared = {rank for each in context_groups for rank in dist.get_process_group_ranks(each)}
    if shared <= members:
        return TokenRanks((group,), len(members))
    if shared & members == {dist.get_rank()}:
        groups = (*context_groups, group)
        size = 1
        for each in groups:
            size *= dist.get_world_size(each)
        return TokenRanks(groups, size)
    raise ArgumentError(
        "group",
        expected=f"all ranks of the context, {sorted(shared)}, or this one alone of them",
        got=f"a group of ranks {sorted(members)}",
        remedy="Pass the group that gradients are averaged over, or that of the data-parallel ranks.",
        rank=dist.get_rank(),
    )


def _token_mean(
    token_losses: Tensor, labels: Tensor, num_valid_tokens: Tensor | int | None, ranks: TokenRanks, gradients: Reduction
) -> TokenMean:
    valid = labels != IGNORE_INDEX
    dtype = torch.float64 if token_losses.dtype == torch.float64 else torch.float32
    local = torch.where(valid, token_losses, 0).sum(dtype=dtype)
    # float64 counts exactly up to 2**53, so one collective can sum the losses and the count.
    sums = ranks.sum(torch.stack([local.detach().double(), valid.sum().double()]))
    counted = sums[1].long()
    count = counted if num_valid_tokens is None else torch.as_tensor(num_valid_tokens, device=labels.device)
    divisor = count.clamp(min=1).double()
    value = (sums[0] / divisor).to(dtype)
    scale = (ranks.size if gradients == "mean" else 1) / divisor
    loss = cast("Tensor", _WithValue.apply(local, value, scale.to(dtype)))
    return TokenMean(loss, value, counted if num_valid_tokens is None else count)


class _WithValue(torch.autograd.Function):
    """Returns `value` in the forward, and the gradient of `scale * local` in the backward."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scale,) = ctx.saved_tensors
        return dout[0] * scale, None, None


def _check_labels(labels: object) -> None:
    is_number = isinstance(labels, Tensor) and labels.dtype != torch.bool and not labels.is_complex()
    if not isinstance(labels, Tensor) or not is_number or labels.is_floating_point():
        raise ArgumentError(
            "labels",
            expected="a tensor of whole numbers, -100 where there is no target",
            got=f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__,
            remedy="Pass this rank's labels, context.shard(labels).",
        )


def _check(token_losses: object, labels: object, num_valid_tokens: object, gradients: object) -> None:
    _check_labels(labels)
    assert isinstance(labels, Tensor)
    if not isinstance(token_losses, Tensor) or not token_losses.is_floating_point():
        raise ArgumentError(
            "token_losses",
            expected="a floating-point tensor",
            got=token_losses.dtype if isinstance(token_losses, Tensor) else type(token_losses).__name__,
            remedy='Pass the loss of each token: cross_entropy(..., reduction="none").',
        )
    if token_losses.shape != labels.shape:
        raise ArgumentError(
            "token_losses",
            expected=f"the shape of labels, {tuple(labels.shape)}",
            got=tuple(token_losses.shape),
            remedy='Pass the loss of each token: cross_entropy(..., reduction="none").view_as(labels). Cut labels with '
            "context.shard, as the inputs were.",
        )
    n = num_valid_tokens
    is_whole = isinstance(n, int) and not isinstance(n, bool) and n >= 0
    is_scalar = isinstance(n, Tensor) and n.ndim == 0 and n.dtype == torch.int64
    if n is not None and not is_whole and not is_scalar:
        raise ArgumentError(
            "num_valid_tokens",
            expected="a whole number from 0 or an int64 scalar tensor",
            got=repr(num_valid_tokens),
            remedy="Leave it out, or pass context.count_valid_tokens(labels of the window).",
        )
    if gradients not in get_args(Reduction):
        remedy = 'DDP and FSDP2 average gradients: leave it out. Pass "sum" where they are summed.'
        raise ArgumentError("gradients", expected='"mean" or "sum"', got=repr(gradients), remedy=remedy)
