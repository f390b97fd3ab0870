"""Batches of transformers' collators as whole sequences with shifted labels and packed documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringflash.errors import ArgumentError
from ringflash.train.models.loss import IGNORE_INDEX

ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
IMPLIED = ("max_length_q", "max_length_k", "seq_idx")  # what collators of packed documents add beside `ENDS`
KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", *ENDS, *IMPLIED)


def whole_sequences(batch: Any, least: int) -> dict[str, Tensor]:
    """Returns "input_ids" and shifted "labels" of a batch, on the CPU, and "cu_seqlens" where documents are packed.

    These are the batches that `ringflash.train.lightning.batch.check_batch` describes. Padding at the end of sequences
    is left in: a causal mask hides it from all tokens before it. Sequences of fewer than `least` tokens are padded.

    Args:
        batch: what a collator of transformers makes for a causal language model; labels[:, i] is input_ids[:, i] or
            -100. Packed documents have position_ids that begin with 0 again, or cu_seq_lens_q.
        least: smallest length of a sequence.

    Raises:
        ArgumentError: no labels, padding that is not at the end or has labels, position_ids that are no runs from 0,
            or entries that nobody cuts.
    """
    if not isinstance(batch, Mapping):
        remedy = "Let the collator return a dictionary."
        raise ArgumentError("batch", expected="a mapping", got=type(batch).__name__, remedy=remedy)
    given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items() if x is not None}
    if others := [name for name in given if name not in KNOWN]:
        raise ArgumentError(
            f"batch[{others[0]!r}]",
            expected=f"only entries named {', '.join(KNOWN)}",
            got=", ".join(others),
            remedy="Leave it out of the collator's result: on a ring nobody would cut it along the sequence.",
        )
    for name in ("input_ids", "labels"):
        value = given.get(name)
        is_tensor = isinstance(value, Tensor) and value.ndim == 2 and value.dtype == torch.int64
        if not is_tensor or value.shape != given["input_ids"].shape:  # pyright: ignore[reportOptionalMemberAccess]
            raise ArgumentError(
                f"batch[{name!r}]",
                expected="an int64 tensor (batch, seqlen), labels in the shape of input_ids",
                got=f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__,
                remedy="Use a collator for causal language models, with labels that equal input_ids or are -100.",
            )
    input_ids, labels = given["input_ids"], shifted(given["labels"])
    real = _real_tokens(given.get("attention_mask"), labels)
    documents = _documents(given, input_ids, real)
    if (missing := least - input_ids.shape[1]) > 0:
        input_ids, labels = pad(input_ids, (0, missing)), pad(labels, (0, missing), value=IGNORE_INDEX)
        documents = None if documents is None else pad(documents, (0, 1), value=least)
    whole = {"input_ids": input_ids, "labels": labels}
    return whole if documents is None else {**whole, "cu_seqlens": documents}


def shifted(labels: Tensor) -> Tensor:
    """Returns labels (batch, seqlen) that are the token after each position, -100 at the last one."""
    return pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _real_tokens(mask: Any, labels: Tensor) -> Tensor:
    """Returns a bool tensor, False for padding; `labels` are shifted."""
    real = torch.ones_like(labels, dtype=torch.bool)
    if mask is None:
        return real
    expected, got = f"a mask {tuple(labels.shape)}, zero only at the end of sequences", "zeros before or between ones"
    remedy = 'Pad at the right: tokenizer.padding_side = "right". Or pack documents, with position_ids.'
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ArgumentError("batch['attention_mask']", expected=expected, got=got, remedy=remedy)
    real = mask != 0
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ArgumentError("batch['attention_mask']", expected=expected, got=got, remedy=remedy)
    if stray := int(((labels != IGNORE_INDEX) & ~real).sum()):
        raise ArgumentError(
            "batch['labels']",
            expected="-100 at padding",
            got=f"{stray} other labels after padding",
            remedy="Let the collator give padding the label -100, as DataCollatorForLanguageModeling does.",
        )
    return real


def _documents(given: Mapping[str, Any], input_ids: Tensor, real: Tensor) -> Tensor | None:
    """Returns bounds of documents, (batch, ndocuments + 1), or None if each sequence is one document."""
    batch, seqlen = input_ids.shape
    positions, ends = given.get("position_ids"), given.get(ENDS[0])
    if positions is not None and not isinstance(positions, Tensor):
        expected, remedy = f"a tensor {(batch, seqlen)}", "Convert them in the collator."
        raise ArgumentError("batch['position_ids']", expected=expected, got=type(positions).__name__, remedy=remedy)
    if positions is None and ends is None:
        return None
    if positions is None:
        return torch.as_tensor(ends).long().reshape(1, -1).expand(batch, -1).contiguous()
    index = torch.arange(seqlen).expand(batch, -1)
    if positions.ndim != 2 or positions.shape[1] != seqlen or positions.shape[0] not in (1, batch):
        positions = torch.full_like(index, -1)
    starts = (positions == 0) & real
    begins = torch.where(starts, index, 0).cummax(dim=1).values
    if bool(((positions != index - begins) & real).any()):
        raise ArgumentError(
            "batch['position_ids']",
            expected=f"runs 0, 1, 2, ..., one for each document, {(batch, seqlen)}",
            got=f"{given['position_ids'].flatten()[:8].tolist()}, ...",
            remedy="Leave them out where sequences are not packed: each rank gets the positions of its shard.",
        )
    rows = [row.nonzero().flatten().tolist() for row in starts]
    most = max(map(len, rows))
    found = torch.tensor([[*row, *[seqlen] * (most + 1 - len(row))] for row in rows])
    found[:, 0] = 0  # a sequence of padding alone is one document too
    if ends is not None and found.shape[0] == 1 and found[0].tolist() != torch.as_tensor(ends).flatten().tolist():
        expected, got = f"{found[0].tolist()}, as position_ids", torch.as_tensor(ends).tolist()
        raise ArgumentError(f"batch[{ENDS[0]!r}]", expected=expected, got=got, remedy="Pass one of the two.")
    return found if most > 1 else None
