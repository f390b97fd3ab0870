"""Ranks that cut other token ids than the rest: an error in the first call of attention, and no later exchange."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash as rf
from ringflash.coordination.first_tokens import LAST_PASS
from ringflash.errors import RankMismatch
from tests.helpers.distributed import run_ranks

SEQLEN = 24


def _attend(context: rf.ContextParallel) -> Tensor:
    q = context.shard(torch.ones(1, SEQLEN, 2, 16))
    return rf.ring_attention(q, q, q, context, mask=rf.Causal())


def _ids(seed: int) -> Tensor:
    return torch.randint(0, 1000, (2, SEQLEN), generator=torch.Generator().manual_seed(seed))


def _text(context: rf.ContextParallel) -> str:
    with pytest.raises(RankMismatch) as raised:
        _attend(context)
    return str(raised.value)


def _mismatches() -> list[str]:
    rank, texts = dist.get_rank(), []
    for fixed_lengths in (False, True):
        context = rf.ContextParallel(dist.group.WORLD, fixed_lengths=fixed_lengths)
        context.shard(_ids(rank // 2))
        texts.append(_text(context))
        _attend(context)  # all ranks have raised together, and the ring works on
    late = rf.ContextParallel(dist.group.WORLD, "contiguous")
    _attend(late)
    late.shard(_ids(rank // 2))  # the second pass compares again
    return [*texts, _text(late)]


def test_an_error_names_the_ranks_and_the_remedy() -> None:
    for texts in run_ranks(3, _mismatches):
        for text in texts:
            assert "ranks disagree on the first token ids that were cut (checksum): rank 2 against the rest" in text
            assert "the number of ranks of the data-parallel dimension, not those of the world" in text


def _agreements() -> list[int]:
    """Returns how many passes compared tokens, by what was cut before them."""
    rank, counts = dist.get_rank(), []
    for case in ("alike", "ahead", "no integers", "one rank alone"):
        context = rf.ContextParallel(dist.group.WORLD, debug=case == "ahead")
        if case in ("alike", "ahead"):
            context.shard(_ids(0))
        if case == "ahead" and rank == 1:  # a loader that works ahead
            context.shard(_ids(1))
        if case == "no integers":
            context.shard(torch.full((1, SEQLEN), float(rank)))
            context.shard(torch.full((1, SEQLEN), rank == 0))
        if case == "one rank alone" and rank == 1:
            context.shard(_ids(1))
        with mock.patch.object(context.first_tokens, "compare", wraps=context.first_tokens.compare) as compare:
            for _ in range(9):
                _attend(context)
        counts.append(compare.call_count)
    return counts


def test_only_the_first_ones_are_compared_and_then_none() -> None:
    # Passes 1, 2, 4 and 8, as long as one rank has cut nothing.
    assert run_ranks(2, _agreements) == [[1, 1, 4, 4]] * 2


def _is_ended() -> bool:
    context = rf.ContextParallel(dist.group.WORLD)
    context.first_tokens.due = LAST_PASS
    context.first_tokens.compare(context._control)  # pyright: ignore[reportArgumentType, reportPrivateUsage]
    return context.first_tokens.due == 0


def test_programs_that_cut_nothing_stop_comparing() -> None:
    assert run_ranks(2, _is_ended) == [True, True]


def test_virtual_ranks_compare_nothing() -> None:
    context = rf.ContextParallel.local(2)
    context.shard(_ids(0))
    _attend(context)
    assert context.first_tokens.due == 0
