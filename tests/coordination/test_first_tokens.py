"""Ranks that cut other token ids than the rest: an error in the first call of attention, and no later comparison."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.coordination.first_tokens import FirstTokens
from ringflash.errors import PeerFailed, RankMismatch
from tests.helpers.distributed import run_ranks

SEQLEN = 24


def _attend(context: rf.ContextParallel) -> Tensor:
    q = context.shard(torch.ones(1, SEQLEN, 2, 16))
    return rf.ring_attention(q, q, q, context, mask=rf.Causal())


def _ids(seed: int) -> Tensor:
    return torch.randint(0, 1000, (2, SEQLEN), generator=torch.Generator().manual_seed(seed))


def _mismatches() -> list[str]:
    rank, texts = dist.get_rank(), []
    for fixed_lengths in (False, True):
        for calls_before in (0, 2):
            context = rf.ContextParallel(dist.group.WORLD, fixed_lengths=fixed_lengths)
            for _ in range(calls_before):  # such as the check of a model of transformers
                _attend(context)
            context.shard(_ids(rank // 2))
            for _ in range(2):  # an error does not end with the first call
                with pytest.raises(RankMismatch) as raised:
                    _attend(context)
                texts.append(str(raised.value))
    return texts


def test_an_error_names_the_ranks_and_the_remedy() -> None:
    for texts in run_ranks(3, _mismatches):
        assert len(texts) == 8
        for text in texts:
            assert "ranks disagree on first token ids (checksum): rank 2 against the rest" in text
            assert "the number of ranks of the data-parallel dimension, not those of the world" in text


def _without_errors() -> list[int]:
    """Returns how many checksums this rank has made, case by case."""
    rank, counts = dist.get_rank(), []
    for case in ("alike", "ahead", "no integers", "one rank alone", "one after another", "after a failure"):
        for fixed_lengths in (False, True):
            context = rf.ContextParallel(dist.group.WORLD, fixed_lengths=fixed_lengths)
            with mock.patch.object(FirstTokens, "field", autospec=True, side_effect=FirstTokens.field) as made:
                if case in ("alike", "ahead", "after a failure"):
                    context.shard(_ids(0))
                if case == "ahead" and rank == 1:  # a loader that works ahead
                    context.shard(_ids(1))
                if case == "no integers":
                    context.shard(torch.full((1, SEQLEN), float(rank)))
                    context.shard(torch.full((1, SEQLEN), rank == 0))
                    context.shard(torch.arange(rank, SEQLEN + rank), 0)  # no token ids, as they have no batch
                    context.shard(torch.full((1, SEQLEN), rank, dtype=torch.uint8))
                if case == "one rank alone" and rank == 1:
                    context.shard(_ids(1))
                if case == "after a failure" and not fixed_lengths:
                    if rank == 0:
                        context.announce_failure(ValueError("of rank 0 alone, before its call"))
                    else:
                        with pytest.raises(PeerFailed):
                            _attend(context)
                for call in range(4):
                    if case == "one after another" and call == rank:
                        context.shard(_ids(0))
                    _attend(context)
            counts.append(made.call_count)
    return counts


def test_only_the_first_ones_are_compared_and_only_once() -> None:
    first, second = run_ranks(2, _without_errors)
    assert first == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert second == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]


def test_virtual_ranks_keep_nothing() -> None:
    context = rf.ContextParallel.local(2)
    context.shard(_ids(0))
    assert context._first_tokens.pending is None  # pyright: ignore[reportPrivateUsage]
    _attend(context)


def test_checksums_depend_on_values_and_their_places() -> None:
    def checksum(x: Tensor) -> int | None:
        tokens = FirstTokens(compares=True)
        tokens.note(x, 1)
        return tokens.field()

    ids = _ids(0)
    others = [ids.flip(1), ids + 1, ids.roll(1, 0), torch.zeros_like(ids)]
    assert checksum(ids) == checksum(ids.int())
    assert len({checksum(each) for each in (ids, *others)}) == 5
    assert checksum(torch.zeros_like(ids)) == 0
    others = [ids[:, :1], ids[0], ids.double(), ids > 5, ids.to(torch.complex64), ids.to("meta")]
    assert {checksum(each) for each in others} == {None}
