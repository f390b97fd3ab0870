"""Ranks in two dimensions: the groups that split heads, and the rows that each rank stores."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.layouts.grid import Grid, split_rows
from ringflash.layouts.layout import LAYOUTS, make_layout
from ringflash.masks import Full

grids = st.builds(lambda ring, heads: Grid.of(ring * heads, heads), st.integers(1, 4), st.integers(1, 4))


@given(grid=grids, name=st.sampled_from(LAYOUTS), extra=st.integers(0, 100))
def test_a_group_stores_a_shard_of_the_ring_in_its_order(grid: Grid, name: str, extra: int) -> None:
    world = len(grid.places)
    shards = make_layout(name, world + extra, grid.ring, rf.Causal())
    rows = split_rows(shards, grid)
    assert max(rows.lengths) - min(rows.lengths) <= 1
    assert min(rows.lengths) >= 1
    for rank, (ring, heads) in enumerate(grid.places):
        group = grid.group(rank)
        assert group[heads] == rank
        assert grid.ring_of(rank)[ring] == rank
        stored = [p for member in group for c in rows.chunks[member] for p in range(c.start, c.stop)]
        assert stored == [p for c in shards.chunks[ring] for p in range(c.start, c.stop)]


def test_neighbours_split_heads() -> None:
    grid = Grid.of(6, 2)
    assert [grid.group(rank) for rank in range(6)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert grid.ring_of(3) == (1, 3, 5)
    assert str(grid) == "ring 3 x heads 2"


@given(grid=grids, name=st.sampled_from(LAYOUTS), extra=st.integers(0, 60))
def test_shard_and_unshard_round_trip(grid: Grid, name: str, extra: int) -> None:
    context = rf.ContextParallel.local(len(grid.places), name, heads=grid.heads)
    x = torch.randn(2, context.world_size + extra, 3)
    mask = rf.Causal()
    assert torch.equal(context.unshard(context.shard(x, mask=mask), mask=mask), x)
    rows = context.shard(torch.arange(x.shape[1]), dim=0, mask=mask)
    assert torch.equal(rows, context.positions(x.shape[1], mask=mask))


def test_a_plan_is_that_of_the_ring() -> None:
    context, ring = rf.ContextParallel.local(6, heads=3), rf.ContextParallel.local(2)
    for rank in range(6):
        assert context.plan(rf.Causal(), 40, rank) == ring.plan(rf.Causal(), 40, rank // 3)
    assert len(rf.ContextParallel.local(4, heads=4).plan(Full(), 9).hops) == 1


@pytest.mark.parametrize("heads", [3, 8])
def test_ranks_that_are_no_whole_groups(heads: int) -> None:
    with pytest.raises(ArgumentError, match=f"heads: expected a divisor of 4 ranks, got {heads}"):
        rf.ContextParallel.local(4, heads=heads)


@pytest.mark.parametrize("heads", [0, -1, 2.0, True, "2"])
def test_heads_over_no_whole_number_of_ranks(heads: Any) -> None:
    with pytest.raises(ArgumentError, match=f"heads: expected a whole number, at least 1, got {heads!r}"):
        rf.ContextParallel.local(4, heads=heads)


def test_numbers_of_numpy() -> None:
    whole: Any = np.int64(4)
    context = rf.ContextParallel.local(whole, heads=whole // 2, inner_ring=whole // 4)
    assert context.plan(rf.Causal(), 16) == rf.ContextParallel.local(4, heads=2, inner_ring=1).plan(rf.Causal(), 16)


def test_fewer_tokens_than_ranks() -> None:
    with pytest.raises(
        ArgumentError, match=r"seqlen: expected at least one token a rank \(2 x 3 ranks\), got 5 tokens"
    ):
        rf.ContextParallel.local(6, heads=3).shard(torch.zeros(1, 5))
