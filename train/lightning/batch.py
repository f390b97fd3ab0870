"""Contract of batches, and the agreement of all ranks on one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError, PeerFailed, RankMismatch
from ringflash.train.exchange import Place, Purpose, exchange
from ringflash.train.models.loss import IGNORE_INDEX, count_valid

ADDED = ("position_ids", "num_valid_tokens")
WHOLE = ("cu_seqlens",)
CUT = ("input_ids", "labels")
CHECKSUM_PERIOD = 65521
# A batch counts as unshifted from this many labels that equal their own input and differ from the next one.
UNSHIFTED_TOKENS = 8
SAMPLER = (
    "Leave Trainer(use_distributed_sampler=True), its default, which keeps shuffle=True; or give the DataLoader a "
    "sampler of its own: DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs). Let datasets and "
    "collators make no random choices that differ between ranks: seed a generator from the index."
)


@dataclass(frozen=True)
class BatchAgreement:
    """Facts that all ranks agree on.

    Args:
        num_valid: valid tokens of the micro-batch over all ranks.
        is_repeated: whether there are several data-parallel groups and all hold the same sequences.
    """

    num_valid: int
    is_repeated: bool


def check_batch(batch: Any, context_parallel_size: int, shard_keys: Sequence[str] = ()) -> None:
    """Raises ArgumentError unless `batch` holds "input_ids" and "labels", (batch, seqlen) int64 of whole sequences.

    The batch may hold "cu_seqlens", (batch, ndocuments + 1) int64: the starts of the documents packed into each
    sequence, then the sequence's length. Further entries with a value for each token must be named in `shard_keys`.
    The batch may not hold the entries that the strategy adds, since the user's own positions would be overwritten.
    Labels must be shifted, and an attention_mask must hold no zeros.
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
    if "cu_seqlens" in batch:
        _check_documents(batch["cu_seqlens"], *input_ids.shape)
    _check_shifted(input_ids, labels)
    _check_entries(batch, context_parallel_size, shard_keys)


def _check_shifted(input_ids: Tensor, labels: Tensor) -> None:
    valid = labels != IGNORE_INDEX
    if bool((valid & (labels != input_ids)).any()):
        return
    differs = valid[:, :-1] & (labels[:, :-1] != input_ids[:, 1:])
    if int(differs.sum()) >= UNSHIFTED_TOKENS:
        raise ArgumentError(
            "batch['labels']",
            expected="the token after each position: labels[:, i] == input_ids[:, i + 1]",
            got="input_ids themselves, which would train a model that copies its input",
            remedy="Shift them: labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1).",
        )


def _check_entries(batch: Mapping[str, Any], context_parallel_size: int, shard_keys: Sequence[str]) -> None:
    shape = batch["input_ids"].shape
    for name in shard_keys:
        value = batch.get(name)
        if not isinstance(value, Tensor) or value.shape[:2] != shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(
                f"batch[{name!r}]",
                expected=f"a tensor {tuple(shape)} or {(*shape, '...')}, since shard_keys names it",
                got="no such key" if name not in batch else got,
                remedy="Pass a value for each token, or leave the name out of shard_keys.",
            )
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and bool((mask == 0).any()):
        raise ArgumentError(
            "batch['attention_mask']",
            expected="none, or one without zeros",
            got=f"{int((mask == 0).sum())} zeros",
            remedy="Leave it out, and label padding -100: at the end of a sequence a causal mask hides it anyway. "
            "Pack documents with cu_seqlens in place of padding.",
        )
    known = {*CUT, *WHOLE, "attention_mask", *shard_keys}
    for name, value in batch.items():
        is_per_token = isinstance(value, Tensor) and value.shape[:2] == shape
        if name not in known and is_per_token and context_parallel_size > 1:
            raise ArgumentError(
                f"batch[{name!r}]",
                expected="no entry with a value for each token that nobody cuts",
                got=f"{tuple(value.shape)}, which would stay whole beside shards of input_ids",
                remedy=f"Name it in RingAttentionStrategy(shard_keys=({name!r},)), or leave it out.",
            )


def cut_keys(batch: Mapping[str, Any], shard_keys: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names of a checked batch's entries that are cut along the sequence."""
    mask, shape = batch.get("attention_mask"), batch["input_ids"].shape
    cut_mask = isinstance(mask, Tensor) and mask.shape == shape and "attention_mask" not in shard_keys
    return (*CUT, *(("attention_mask",) if cut_mask else ()), *shard_keys)


def _check_documents(cu_seqlens: Any, batch: int, seqlen: int) -> None:
    got: object = type(cu_seqlens).__name__
    if isinstance(cu_seqlens, Tensor):
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        if cu_seqlens.dtype == torch.int64 and cu_seqlens.ndim == 2 and cu_seqlens.shape[0] == batch:
            ends = cu_seqlens.cpu()
            rows = (ends[:, :1] == 0).all(1) & (ends[:, -1:] == seqlen).all(1) & (ends.diff() >= 0).all(1)
            if ends.shape[1] > 1 and bool(rows.all()):
                return
            got = ends[int(rows.long().argmin())].tolist()
    raise ArgumentError(
        "batch['cu_seqlens']",
        expected=f"({batch}, ndocuments + 1) int64, each row from 0 to {seqlen} and never falling",
        got=got,
        remedy="Pass where each sequence's documents begin and then its length, as often as fills the row up.",
    )


def document_positions(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """Converts positions in a sequence to positions in its documents.

    Args:
        cu_seqlens: (batch, ndocuments + 1) int64.
        positions: (n,) int64, from 0 to below the sequence's length.

    Returns:
        (batch, n) int64.
    """
    rows = positions.expand(cu_seqlens.shape[0], -1).contiguous()
    index = torch.searchsorted(cu_seqlens.contiguous(), rows, right=True)
    return rows - cu_seqlens.gather(1, index - 1)


def positions_of(batch: Mapping[str, Any]) -> Tensor:
    """Returns positions of a batch's tokens, (seqlen,) or (batch, seqlen).

    A sharded batch has them from the strategy; for whole sequences they are counted here.
    """
    if (position_ids := batch.get("position_ids")) is not None:
        return position_ids
    labels, cu_seqlens = batch["labels"], batch.get("cu_seqlens")
    index = torch.arange(labels.shape[1], device=labels.device)
    return index if cu_seqlens is None else document_positions(cu_seqlens, index)


def documents_of(batch: Mapping[str, Any]) -> rf.Documents | None:
    """Returns the documents packed into a batch's whole sequences, or None without "cu_seqlens".

    One row of bounds stands for all sequences if their bounds are equal.
    """
    if (cu_seqlens := batch.get("cu_seqlens")) is None:
        return None
    return rf.Documents(cu_seqlens[0] if bool((cu_seqlens == cu_seqlens[0]).all()) else cu_seqlens)


def check_tokens(batch: Mapping[str, Tensor], vocab_size: int) -> None:
    """Raises ArgumentError that names the first id outside the vocabulary.

    On a GPU such an id would end the process in a kernel, without naming its origin. For a batch on the CPU, as loaders
    yield it, this check waits for no device.
    """
    for name in ("input_ids", "labels"):
        ids = batch[name]
        outside = (ids < 0) | (ids >= vocab_size)
        if name == "labels":
            outside &= ids != IGNORE_INDEX
        if outside.any():
            first = tuple(outside.nonzero()[0].tolist())
            none = f", or {IGNORE_INDEX} for none" if name == "labels" else ""
            raise ArgumentError(
                f"batch[{name!r}]",
                expected=f"ids from 0 to {vocab_size - 1}{none}",
                got=f"{int(ids[first])} at {first}, {int(outside.sum())} such in all",
                remedy="Look at the tokenizer, or raise the model's vocab_size.",
            )


def agree_on_batch(
    batch: Any,
    group: dist.ProcessGroup,
    context_parallel_size: int,
    vocab_size: int | None = None,
    shard_keys: Sequence[str] = (),
    remedy: str = SAMPLER,
    place: Place | None = None,
) -> BatchAgreement:
    """Agrees on the micro-batch of all ranks with one small collective over `group`, which must serve CPU tensors.

    A group of GPUs would make the host wait for all work that its GPU has queued. For a batch on the CPU, as loaders
    yield it, nothing here waits for a GPU.

    Ranks are ordered data-parallel major: the group's ranks [i * context_parallel_size, (i + 1) *
    context_parallel_size) share sequences, which this function checks. A batch that is wrong on one rank raises on all
    ranks, so that none of them waits for it. Ids are compared with `vocab_size`, if it is known. `remedy` is what to do
    where ranks that share sequences hold different ones. `place` says which batch it is, and is compared first;
    None: any training batch.

    Raises:
        ArgumentError: on a rank with a batch that breaks the contract or has ids outside the vocabulary.
        PeerFailed: on the other ranks.
        RankMismatch: on all ranks, when ranks that share sequences hold different ones, or a rank is at another place
            in the run; the error has the remedy.
        GroupFailed: as `exchange`.
    """
    error: ArgumentError | None = None
    facts = [0] * 7
    try:
        check_batch(batch, context_parallel_size, shard_keys)
        if vocab_size is not None:
            check_tokens(batch, vocab_size)
        mixed = batch["input_ids"] * 2654435761 + batch["labels"] + 1
        tokens, ends = _checksum(mixed), batch.get("cu_seqlens")
        for name in shard_keys:
            tokens = (tokens * 31 + _checksum(batch[name].double().view(torch.int64))) % 2**62
        documents = [0, 0] if ends is None else [ends.shape[1], _checksum(ends)]
        facts = [1, *batch["input_ids"].shape, int(count_valid(batch["labels"])), tokens, *documents]
    except ArgumentError as raised:
        error = raised
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    rows = exchange(group, place or Place(Purpose.TRAINING_BATCH), *facts)
    if error is not None:
        raise error
    if failed := [r for r, row in enumerate(rows) if not row[0]]:
        raise PeerFailed(failed, ["its batch is not of the contract"] * len(failed), rank=rank)
    fields = "batch size", "seqlen", "valid tokens", "tokens (checksum)", "documents", "documents (checksum)"
    for index, field in enumerate(fields, 1):
        odd: list[int] = []
        for first in range(0, world_size, context_parallel_size):
            shared = [row[index] for row in rows[first : first + context_parallel_size]]
            usual = max(shared, key=shared.count)
            odd += [first + member for member, value in enumerate(shared) if value != usual]
        if odd:
            same = f"Ranks of a context-parallel group must load the same sequences in the same order. {remedy}"
            raise RankMismatch(field, [row[index] for row in rows], odd, rank=rank, remedy=same)
    groups = rows[::context_parallel_size]
    is_repeated = len(groups) > 1 and groups[0][3] > 0 and all(group == groups[0] for group in groups)
    return BatchAgreement(sum(row[3] for row in groups), is_repeated)


def _checksum(values: Tensor) -> int:
    values = values.flatten()
    weights = torch.arange(values.numel(), device=values.device) % CHECKSUM_PERIOD + 1
    return int((values * weights).sum())
