"""What a batch must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.errors import ArgumentError, RingflashError
from ringflash.train.batch import agree_on_batch, check_batch, check_tokens, document_positions
from tests.distributed import run_ranks


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": ids(2, 8), "labels": torch.ones(2, 8, dtype=torch.int64)} | changes


def test_a_good_batch() -> None:
    check_batch(batch(documents=None), 8)
    check_batch(batch(cu_seqlens=torch.tensor([[0, 3, 3, 8], [0, 8, 8, 8]])), 8)


def test_positions_restart_at_documents() -> None:
    ends = torch.tensor([[0, 3, 3, 8], [0, 0, 8, 8]])
    assert document_positions(ends, torch.arange(8)).tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [*range(8)]]
    assert document_positions(ends, torch.tensor([6, 2])).tolist() == [[3, 2], [6, 2]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 8), "batch: expected a mapping"),
        ({"input_ids": batch()["input_ids"]}, "batch['labels']: expected an int64 tensor (batch, seqlen), got no such"),
        (batch(input_ids=[1, 2]), "batch['input_ids']: expected an int64 tensor (batch, seqlen), got list"),
        (batch(input_ids=ids(8)), "got torch.int64 (8,)"),
        (batch(labels=torch.zeros(2, 8)), "got torch.float32 (2, 8)"),
        (batch(labels=ids(2, 7)), "the shape of input_ids, (2, 8), got (2, 7)"),
        (
            batch(input_ids=ids(2, 3), labels=ids(2, 3)),
            "4 tokens",
        ),
        (batch(position_ids=ids(8)), "batch['position_ids']: expected no such key, got one of the dataset's own"),
        (batch(num_valid_tokens=7), "batch['num_valid_tokens']: expected no such key"),
        (batch(input_ids=ids(0, 8), labels=ids(0, 8)), "one seq"),
        (batch(cu_seqlens=[[0, 8]]), "batch['cu_seqlens']: expected (2, ndocuments + 1) int64, each row from 0 to 8"),
        (batch(cu_seqlens=torch.tensor([[0, 8]])), "got torch.int64 (1, 2)"),
        (batch(cu_seqlens=torch.tensor([[0, 8]] * 2, dtype=torch.int32)), "got torch.int32 (2, 2)"),
        (batch(cu_seqlens=torch.tensor([[0, 2, 8], [0, 2, 7]])), "got [0, 2, 7]"),
        (batch(cu_seqlens=torch.tensor([[0, 9, 8], [0, 2, 8]])), "got [0, 9, 8]"),
        (batch(cu_seqlens=torch.tensor([[0, 8], [1, 8]])), "got [1, 8]"),
        (batch(cu_seqlens=ids(2, 1)), "got [0]"),
    ],
)
def test_bad_batches(value: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        check_batch(value, 4)
    assert text in str(raised.value)


def test_tokens_of_the_vocabulary() -> None:
    labels = torch.tensor([[-100, 0, 60], [3, -100, 60]])
    check_tokens({"input_ids": labels.clamp(min=0), "labels": labels}, 61)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("labels", 61, "batch['labels']: expected ids from 0 to 60, or -100 for none, got 61 at (1, 5), 1 such in all"),
        ("labels", -1, "got -1 at (1, 5)"),
        ("input_ids", -100, "batch['input_ids']: expected ids from 0 to 60, got -100 at (1, 5)"),
        ("input_ids", 2**40, f"got {2**40} at (1, 5)"),
    ],
)
def test_tokens_outside_the_vocabulary(name: str, value: int, text: str) -> None:
    bad = batch()
    bad[name][1, 5] = value
    with pytest.raises(ArgumentError) as raised:
        check_tokens(bad, 61)
    assert text in str(raised.value)


def _agree(context_parallel_size: int) -> list[Any]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None

    def ask(value: Any) -> Any:
        try:
            return agree_on_batch(value, group, context_parallel_size, torch.device("cpu"), vocab_size=61)
        except RingflashError as error:
            return type(error).__name__, str(error).splitlines()[0]

    labels: Tensor = torch.full((1, 8), -100)
    labels[0, : rank + 1] = 3
    swapped = torch.arange(8)[None] if rank else torch.arange(8).flip(0)[None]
    return [
        ask(batch(labels=labels, input_ids=labels.clamp(min=0))),
        ask(batch(input_ids=swapped, labels=torch.ones_like(swapped))),
        ask(batch() if rank == 0 else {"input_ids": 1}),
        ask(batch()),
        ask(batch(cu_seqlens=torch.tensor([[0, 3, 8], [0, 4 + rank, 8]]))),
        ask(batch() if rank else batch(cu_seqlens=torch.tensor([[0, 8], [0, 8]]))),
        ask(batch() if rank == 0 else batch(labels=torch.full((2, 8), 61))),
    ]


def test_ranks_of_one_sequence() -> None:
    first, second = run_ranks(2, _agree, 2)
    assert first[0][0] == second[0][0] == "RankMismatch"
    assert "ranks disagree on valid tokens" in first[0][1]
    assert first[1][0] == second[1][0] == "RankMismatch"
    assert "tokens (checksum)" in first[1][1]
    assert first[2][0] == "PeerFailed"
    assert second[2][0] == "ArgumentError"
    assert first[3] == second[3] == 16
    assert first[4][0] == second[4][0] == first[5][0] == second[5][0] == "RankMismatch"
    assert "ranks disagree on documents (checksum)" in first[4][1]
    assert "ranks disagree on documents:" in first[5][1]
    assert first[6][0] == "PeerFailed"
    assert "got 61 at (0, 0)" in second[6][1]


def test_ranks_of_different_sequences() -> None:
    first, second = run_ranks(2, _agree, 1)
    assert first[0] == second[0] == 3
    assert first[1] == second[1] == 16
    assert first[3] == second[3] == first[4] == second[4] == first[5] == 32
