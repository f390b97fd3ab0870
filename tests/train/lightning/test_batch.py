"""Requirements on a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.errors import ArgumentError, RingflashError
from ringflash.train.lightning.batch import agree_on_batch, check_batch, check_tokens, cut_keys, document_positions
from tests.helpers.distributed import run_ranks


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


COUNTED = torch.arange(16).view(2, 8)


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": ids(2, 8), "labels": torch.ones(2, 8, dtype=torch.int64)} | changes


def test_a_good_batch() -> None:
    check_batch(batch(documents=None), 8)
    check_batch(batch(cu_seqlens=torch.tensor([[0, 3, 3, 8], [0, 8, 8, 8]])), 8)


def test_labels_that_equal_their_input_by_nature() -> None:
    same = torch.full((2, 8), 7)
    check_batch({"input_ids": same, "labels": same.clone()}, 4)  # shifted labels of a single repeated token
    single = torch.full((2, 16), -100)
    single[:, 3:6] = torch.arange(3, 6)
    check_batch({"input_ids": torch.arange(16).repeat(2, 1), "labels": single}, 4)  # too few labels to judge
    shifted = torch.arange(1, 17).repeat(2, 1)
    check_batch({"input_ids": shifted - 1, "labels": shifted}, 4)


def test_further_entries() -> None:
    entries = {"loss_mask": torch.ones(2, 8), "attention_mask": ids(2, 8) + 1, "weight": torch.ones(2), "name": "a"}
    good = batch(**entries)
    check_batch(good, 4, ("loss_mask",))
    check_batch(good, 1)  # one rank cuts nothing
    assert cut_keys(good, ("loss_mask",)) == ("input_ids", "labels", "attention_mask", "loss_mask")
    with pytest.raises(ArgumentError, match=r"batch\['scores'\]: expected a tensor \(2, 8\).*got no such key"):
        check_batch(good, 4, ("scores",))
    with pytest.raises(ArgumentError, match=r"batch\['weight'\]: expected a tensor .*got \(2,\)"):
        check_batch(good, 4, ("weight",))


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
        (batch(attention_mask=torch.tensor([[1] * 8, [1] * 6 + [0] * 2])), "['attention_mask']: expected none, or one"),
        (batch(attention_mask=torch.ones(2, 1, 8, 8).tril()), "got 56 zeros. Leave it out, and label padding -100"),
        (batch(loss_mask=torch.ones(2, 8)), "Name it in RingAttentionStrategy(shard_keys=('loss_mask',))"),
        (batch(token_type_ids=ids(2, 8, 3)), "got (2, 8, 3), which would stay whole beside shards of input_ids"),
        ({"input_ids": COUNTED, "labels": COUNTED.clone()}, "copies its input. Shift them: labels = torch.cat(["),
        (
            {"input_ids": COUNTED, "labels": COUNTED.masked_fill(COUNTED % 8 < 3, -100)},
            "batch['labels']: expected the token after each position",
        ),
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
            shard_keys = ("weights",) if "weights" in value else ()
            agreed = agree_on_batch(value, group, context_parallel_size, 61, shard_keys)
            return (agreed.num_valid, "repeated") if agreed.is_repeated else agreed.num_valid
        except RingflashError as error:
            return type(error).__name__, str(error).splitlines()[0], str(error).splitlines()[-1]

    labels: Tensor = torch.full((1, 8), -100)
    labels[0, : rank + 1] = 3
    swapped = torch.arange(8)[None] if rank else torch.arange(8).flip(0)[None]
    return [
        ask(batch(labels=labels, input_ids=torch.full_like(labels, 5))),
        ask(batch(input_ids=swapped, labels=torch.ones_like(swapped))),
        ask(batch() if rank == 0 else {"input_ids": 1}),
        ask(batch()),
        ask(batch(cu_seqlens=torch.tensor([[0, 3, 8], [0, 4 + rank, 8]]))),
        ask(batch() if rank else batch(cu_seqlens=torch.tensor([[0, 8], [0, 8]]))),
        ask(batch() if rank == 0 else batch(labels=torch.full((2, 8), 61))),
        ask(batch(weights=torch.full((2, 8), 0.5 + rank))),
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
    assert first[7][0] == second[7][0] == "RankMismatch"
    for rank in (first, second):
        assert "shuffle=True" in rank[1][2]
        assert "use_distributed_sampler=True" in rank[1][2]
        assert "DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs)" in rank[1][2]


def test_ranks_of_different_sequences() -> None:
    first, second = run_ranks(2, _agree, 1)
    assert first[0] == second[0] == 3
    assert first[1] == second[1] == 16
    assert first[4] == second[4] == first[5] == first[7] == 32
    assert first[3] == second[3] == (32, "repeated")
