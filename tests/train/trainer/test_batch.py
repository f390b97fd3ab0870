"""Batches of collators become whole sequences with shifted labels, or raise with the entry's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringflash.errors import ArgumentError
from ringflash.train.trainer.batch import whole_sequences

IDS = torch.tensor([[5, 6, 7, 8, 9, 4], [4, 3, 2, 1, 1, 1]])


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "labels": IDS.clone()} | changes


def test_labels_are_shifted() -> None:
    whole = whole_sequences(batch(attention_mask=torch.ones_like(IDS)), 2)
    assert set(whole) == {"input_ids", "labels"}
    assert whole["labels"].tolist() == [[6, 7, 8, 9, 4, -100], [3, 2, 1, 1, 1, -100]]


def test_padding_at_the_end_is_left_in() -> None:
    labels, mask = IDS.clone(), torch.ones_like(IDS)
    labels[1, 3:], mask[1, 3:] = -100, 0
    whole = whole_sequences(batch(labels=labels, attention_mask=mask), 2)
    assert whole["labels"][1].tolist() == [3, 2, -100, -100, -100, -100]
    assert torch.equal(whole["input_ids"], IDS)


def test_packed_documents_are_found() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 1]])
    assert whole_sequences(batch(position_ids=positions), 2)["cu_seqlens"].tolist() == [[0, 3, 6, 6], [0, 2, 4, 6]]
    assert "cu_seqlens" not in whole_sequences(batch(position_ids=torch.arange(6)[None]), 2)
    one = {"input_ids": IDS[:1], "labels": IDS[:1], "max_length_q": 4}
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    assert whole_sequences({**one, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}, 2)["cu_seqlens"].tolist() == [
        [0, 4, 6]
    ]


def test_positions_of_padding_do_not_matter() -> None:
    labels, mask = IDS.clone(), torch.ones_like(IDS)
    labels[1, 4:], mask[1, 4:] = -100, 0
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 0]])
    whole = whole_sequences(batch(labels=labels, attention_mask=mask, position_ids=positions), 2)
    assert whole["cu_seqlens"].tolist() == [[0, 3, 6], [0, 6, 6]]


def test_short_sequences_are_padded() -> None:
    whole = whole_sequences(batch(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]])), 8)
    assert whole["input_ids"].shape == whole["labels"].shape == (2, 8)
    assert whole["labels"][:, 5:].eq(-100).all()
    assert whole["cu_seqlens"].tolist() == [[0, 4, 6, 8], [0, 4, 6, 8]]


LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "batch: expected a mapping, got list"),
        ({"labels": IDS}, r"batch\['input_ids'\]: expected an int64 tensor .* got NoneType"),
        ({"input_ids": IDS}, r"batch\['labels'\]: expected an int64 tensor .* got NoneType"),
        (batch(labels=IDS[:, 1:]), r"batch\['labels'\]: .* got torch.int64 \(2, 5\)"),
        (batch(input_ids=IDS.float()), r"batch\['input_ids'\]: .* got torch.float32"),
        (batch(token_type_ids=IDS), r"batch\['token_type_ids'\]: expected only entries named input_ids"),
        (batch(attention_mask=LEFT), r"batch\['attention_mask'\]: .* got zeros before or between ones"),
        (batch(attention_mask=LEFT[0]), r"batch\['attention_mask'\]: .* got \(6,\)"),
        (batch(attention_mask=1 - LEFT.flip(0)), r"batch\['attention_mask'\]|batch\['labels'\]"),
        (batch(attention_mask=LEFT.flip(1)), r"batch\['labels'\]: expected -100 at padding, got 1 other labels"),
        (batch(position_ids=torch.arange(1, 7)[None]), r"batch\['position_ids'\]: expected runs 0, 1, 2"),
        (batch(position_ids=torch.arange(6)), r"batch\['position_ids'\]: expected runs 0, 1, 2"),
        (
            {"input_ids": IDS[:1], "labels": IDS[:1], "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
            | {"cu_seq_lens_q": torch.tensor([0, 3, 6])},
            r"batch\['cu_seq_lens_q'\]: expected \[0, 2, 6\], as position_ids, got \[0, 3, 6\]",
        ),
    ],
)
def test_what_cannot_be_honoured_raises(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        whole_sequences(given, 2)
