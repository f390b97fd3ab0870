"""What a batch must be, and the agreement of all ranks that it is so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.errors import ArgumentError, PeerFailed, RankMismatch
from ringflash.train.loss import count_valid

ADDED = ("position_ids", "num_valid_tokens")
CHECKSUM_PERIOD = 65521


def check_batch(batch: Any, context_parallel_size: int) -> None:
    """Raises ArgumentError unless `batch` holds "input_ids" and "labels", (batch, seqlen) int64 of whole sequences.

    Nor may it hold what the strategy adds: positions of one's own would be overwritten.
    """
    if not isinstance(batch, Mapping):
        raise ArgumentError(
            "batch",
            expected='a mapping with "input_ids" and "labels"',
            got=type(batch).__name__,
            remedy="Let the dataset yield dictionaries.",
        )
    for name in ("input_ids", "labels"):
        value = batch.get(name)
        if not isinstance(value, Tensor) or value.ndim != 2 or value.dtype != torch.int64:
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(
                f"batch[{name!r}]",
                expected="an int64 tensor (batch, seqlen)",
                got="no such key" if name not in batch else got,
                remedy="labels[i] is the target of position i, -100 where there is none."
                if name == "labels"
                else "Pass the token ids of whole sequences.",
            )
    for name in ADDED:
        if name in batch:
            raise ArgumentError(
                f"batch[{name!r}]",
                expected="no such key",
                got="one of the dataset's own",
                remedy="Leave it out: the strategy counts positions and valid tokens in the whole sequences.",
            )
    input_ids, labels = batch["input_ids"], batch["labels"]
    if input_ids.shape != labels.shape:
        raise ArgumentError(
            'batch["labels"]',
            expected=f"the shape of input_ids, {tuple(input_ids.shape)}",
            got=tuple(labels.shape),
            remedy="labels[i] is the target of position i, -100 where there is none.",
        )
    if input_ids.shape[0] == 0 or input_ids.shape[1] < context_parallel_size:
        raise ArgumentError(
            'batch["input_ids"]',
            expected=f"at least one sequence of at least {context_parallel_size} tokens, one a rank",
            got=tuple(input_ids.shape),
            remedy="Use longer sequences or a smaller context_parallel_size.",
        )


def document_positions(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """Positions in a sequence -> positions in its documents.

    Args:
        cu_seqlens: (batch, ndocuments + 1) int64.
        positions: (n,) int64, from 0 to below the sequence's length.

    Returns:
        (batch, n) int64.
    """
    rows = positions.expand(cu_seqlens.shape[0], -1).contiguous()
    index = torch.searchsorted(cu_seqlens.contiguous(), rows, right=True)
    return rows - cu_seqlens.gather(1, index - 1)


def all_ranks(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n,) of this rank -> (world_size, n) of all, in rank order."""
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered)


def agree_on_batch(batch: Any, group: dist.ProcessGroup, context_parallel_size: int, device: torch.device) -> int:
    """The number of valid tokens in the micro-batch over all ranks; one small collective over `group`.

    Ranks are ordered data-parallel major: the group's ranks [i * context_parallel_size, (i + 1) *
    context_parallel_size) share sequences, and it is checked that they do. A batch that is wrong on one rank
    raises on all of them, so that none waits for it.

    Raises:
        ArgumentError: on a rank whose batch is not of the contract.
        PeerFailed: on the others.
        RankMismatch: on all, when ranks that share sequences hold different ones.
    """
    error: ArgumentError | None = None
    facts = [0, 0, 0, 0, 0]
    try:
        check_batch(batch, context_parallel_size)
        facts = [1, *batch["input_ids"].shape, int(count_valid(batch["labels"])), _checksum(batch)]
    except ArgumentError as raised:
        error = raised
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    rows: list[list[int]] = all_ranks(torch.tensor(facts, device=device), group).tolist()
    if error is not None:
        raise error
    if failed := [r for r, row in enumerate(rows) if not row[0]]:
        raise PeerFailed(failed, ["its batch is not of the contract"] * len(failed), rank=rank)
    for index, field in ((1, "batch size"), (2, "seqlen"), (3, "valid tokens"), (4, "tokens (checksum)")):
        odd: list[int] = []
        for first in range(0, world_size, context_parallel_size):
            shared = [row[index] for row in rows[first : first + context_parallel_size]]
            usual = max(shared, key=shared.count)
            odd += [first + member for member, value in enumerate(shared) if value != usual]
        if odd:
            raise RankMismatch(field, [row[index] for row in rows], odd, rank=rank)
    return sum(row[3] for row in rows[::context_parallel_size])


def _checksum(batch: Mapping[str, Tensor]) -> int:
    mixed = (batch["input_ids"] * 2654435761 + batch["labels"] + 1).flatten()
    weights = torch.arange(mixed.numel(), device=mixed.device) % CHECKSUM_PERIOD + 1
    return int((mixed * weights).sum())
