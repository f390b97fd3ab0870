"""Layouts cut and join exactly, at any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.layout import LAYOUTS, Chunk, make_layout

layouts = st.sampled_from(LAYOUTS)


@given(name=layouts, world=st.integers(1, 9), extra=st.integers(0, 200))
def test_every_token_lives_on_one_rank(name: str, world: int, extra: int) -> None:
    cut = make_layout(name, world + extra, world)
    owned = sorted(position for rank in cut.chunks for chunk in rank for position in range(chunk.start, chunk.stop))
    assert owned == list(range(world + extra))
    assert max(cut.lengths) - min(cut.lengths) <= 1
    assert min(cut.lengths) >= 1


def test_zigzag_gives_a_rank_an_early_and_a_late_chunk() -> None:
    assert make_layout("zigzag", 16, 2).chunks == ((Chunk(0, 4), Chunk(12, 4)), (Chunk(4, 8),))


def test_contiguous_chunks_differ_by_one() -> None:
    assert make_layout("contiguous", 7, 3).chunks == ((Chunk(0, 3),), (Chunk(3, 2),), (Chunk(5, 2),))


@settings(deadline=None)
@given(name=layouts, world=st.integers(1, 9), extra=st.integers(0, 60), dim=st.integers(-2, 2))
def test_shard_and_unshard_round_trip(name: str, world: int, extra: int, dim: int) -> None:
    context = rf.ContextParallel.local(world, name)
    x = torch.randn([world + extra if d == dim % 3 else 2 for d in range(3)])
    assert torch.equal(context.unshard(context.shard(x, dim), dim), x)


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_say_what_shard_took(name: str) -> None:
    context = rf.ContextParallel.local(3, name)
    assert torch.equal(context.shard(torch.arange(17), dim=0), context.positions(17))
    assert context.positions(17).dtype == torch.int64


def test_a_shard_owns_its_storage() -> None:
    x = torch.randn(2, 6, 3)
    shard = rf.ContextParallel.local(1).shard(x)
    shard.zero_()
    assert x.abs().sum() > 0


def test_fewer_tokens_than_ranks() -> None:
    with pytest.raises(ArgumentError, match=r"seqlen: expected at least one token a rank \(4 ranks\), got 3 tokens"):
        rf.ContextParallel.local(4).shard(torch.zeros(1, 3))


def test_unknown_layout() -> None:
    with pytest.raises(ArgumentError, match="layout: expected one of .*'zigzag'.*got 'spiral'"):
        rf.ContextParallel.local(2, "spiral")


def test_no_virtual_ranks() -> None:
    with pytest.raises(ArgumentError, match="world_size: expected at least 1, got 0"):
        rf.ContextParallel.local(0)
