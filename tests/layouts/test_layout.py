"""Layouts cut and join sequences exactly, at any length."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.layouts.layout import LAYOUTS, MOST_STRIPES, STRIPE, Chunk, make_layout
from ringflash.masks import Full, Mask
from tests.helpers.strategies import masks

layouts = st.sampled_from(LAYOUTS)


@st.composite
def cases(draw: st.DrawFn, most: int = 60) -> tuple[str, int, int, Mask]:
    """Draws a layout's name, a sequence length, a number of ranks, and a mask that fits."""
    world = draw(st.integers(1, 9))
    seqlen = world + draw(st.integers(0, most))
    return draw(layouts), seqlen, world, draw(masks(seqlen))


@settings(deadline=None)
@given(case=cases(most=200))
def test_every_token_lives_on_one_rank(case: tuple[str, int, int, Mask]) -> None:
    name, seqlen, world, mask = case
    cut = make_layout(name, seqlen, world, mask)
    owned = sorted(position for rank in cut.chunks for chunk in rank for position in range(chunk.start, chunk.stop))
    assert owned == list(range(seqlen))
    assert max(cut.lengths) - min(cut.lengths) <= 1
    assert min(cut.lengths) == cut.least_length >= 1


@settings(deadline=None)
@given(case=cases(most=200))
def test_chunks_rise_and_do_not_touch(case: tuple[str, int, int, Mask]) -> None:
    """Checks that positions rise through storage, as interval kernels need, in the fewest possible chunks."""
    for chunks in make_layout(*case).chunks:
        assert all(chunk.length > 0 for chunk in chunks)
        assert all(before.stop < after.start for before, after in pairwise(chunks))


def test_zigzag_gives_a_rank_an_early_and_a_late_chunk() -> None:
    assert make_layout("zigzag", 16, 2).chunks == ((Chunk(0, 4), Chunk(12, 4)), (Chunk(4, 8),))


def test_contiguous_chunks_differ_by_one() -> None:
    assert make_layout("contiguous", 7, 3).chunks == ((Chunk(0, 3),), (Chunk(3, 2),), (Chunk(5, 2),))


def test_stripes_go_forwards_and_backwards() -> None:
    """Deals 16 of 17 tokens in four rounds of stripes; the fifth round gives the last token to the first rank."""
    assert make_layout("striped", 17, 2).chunks == (
        (Chunk(0, 2), Chunk(6, 4), Chunk(14, 3)),
        (Chunk(2, 4), Chunk(10, 4)),
    )


@pytest.mark.parametrize("seqlen", [4096, 8192, 10000, 131072, 2**20, 2**20 + 77])
def test_stripes_are_whole_tiles(seqlen: int) -> None:
    for chunks in make_layout("striped", seqlen, 4).chunks:
        assert len(chunks) <= MOST_STRIPES + 1
        assert all(chunk.length % STRIPE == 0 for chunk in chunks[:-1])


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["zigzag", "striped"])
def test_causal_work_is_even(name: str, world: int) -> None:
    assert rf.ContextParallel.local(world, name).plan(rf.Causal(), 60000).balance < 1.01


@settings(deadline=None)
@given(case=cases(), dim=st.integers(-2, 2))
def test_shard_and_unshard_round_trip(case: tuple[str, int, int, Mask], dim: int) -> None:
    name, seqlen, world, mask = case
    context = rf.ContextParallel.local(world, name)
    x = torch.randn([seqlen if d == dim % 3 else 2 for d in range(3)])
    assert torch.equal(context.unshard(context.shard(x, dim, mask=mask), dim, mask=mask), x)


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_say_what_shard_took(name: str) -> None:
    context, mask = rf.ContextParallel.local(3, name), rf.Causal()
    assert torch.equal(context.shard(torch.arange(17), dim=0, mask=mask), context.positions(17, mask=mask))
    assert context.positions(17, mask=mask).dtype == torch.int64


def test_a_shard_owns_its_storage() -> None:
    x = torch.randn(2, 6, 3)
    shard = rf.ContextParallel.local(1).shard(x)
    shard.zero_()
    assert x.abs().sum() > 0


def test_layouts_are_values() -> None:
    """Checks that a layout is made only once: an equal new mask gives the same object."""
    for name in LAYOUTS:
        first, second = (make_layout(name, 50, 3, rf.Causal() & rf.Documents([0, 9, 50])) for _ in range(2))
        assert first is second
    assert make_layout("zigzag", 50, 3, Full()) is make_layout("zigzag", 50, 3)


def test_fewer_tokens_than_ranks() -> None:
    with pytest.raises(ArgumentError, match=r"seqlen: expected at least one token a rank \(4 ranks\), got 3 tokens"):
        rf.ContextParallel.local(4).shard(torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.positions(12.5), "seqlen: expected a whole number, at least 1, got 12.5"),
        (lambda c: c.plan(None, 12.5), "seqlen: expected a whole number, at least 1, got 12.5"),
        (lambda c: c.plan(None, 12, 9), "rank: expected one of the 4 ranks, counted from 0, got 9"),
        (lambda c: c.plan(None, 12, -1), "rank: expected one of the 4 ranks, counted from 0, got -1"),
        (lambda c: c.plan(None, 12, 1.0), "rank: expected one of the 4 ranks, counted from 0, got 1.0"),
        (
            lambda c: c.shard(torch.zeros(1, 8), dim=9),
            r"dim: expected a dimension of a tensor of shape \(1, 8\), got 9",
        ),
        (lambda c: c.shard(torch.zeros(())), r"dim: expected a dimension of a tensor of shape \(\), got 1"),
        (lambda c: c.unshard(torch.zeros(1, 8), dim=-3), "dim: expected a dimension of .*got -3"),
        (lambda c: c.shard(torch.zeros(1, 8), dim=1.0), "dim: expected a dimension of .*got 1.0"),
        (lambda c: c.shard([1, 2, 3]), "x: expected a tensor, got list"),
        (lambda c: c.unshard(None), "x: expected a tensor, got NoneType"),
    ],
)
def test_arguments_that_name_nothing(call: Callable[[rf.ContextParallel], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(rf.ContextParallel.local(4))


def test_dimensions_are_counted_from_the_end_too() -> None:
    context, x = rf.ContextParallel.local(4), torch.arange(24.0).reshape(2, 12)
    assert torch.equal(context.shard(x, dim=-1), context.shard(x))
    assert torch.equal(context.unshard(context.shard(x, -1), dim=-1), x)


def test_unknown_layout() -> None:
    with pytest.raises(ArgumentError, match="layout: expected one of .*'zigzag'.*got 'spiral'"):
        rf.ContextParallel.local(2, "spiral")


def test_balanced_without_a_mask() -> None:
    context, x = rf.ContextParallel.local(2, "balanced"), torch.zeros(1, 8)
    for call in (lambda: context.shard(x), lambda: context.unshard(x), lambda: context.positions(8)):
        with pytest.raises(
            ArgumentError, match='mask: expected the mask that layout "balanced" follows, got None. Pass'
        ):
            call()


def test_balanced_under_a_mask_of_another_sequence() -> None:
    context = rf.ContextParallel.local(2, "balanced")
    with pytest.raises(ArgumentError, match="cu_seqlens: expected lengths that sum to the sequence's 8 keys"):
        context.shard(torch.zeros(1, 8), mask=rf.Causal() & rf.Documents([0, 7]))
    with pytest.raises(ArgumentError, match="mask: expected None or a mask such as rf.Causal"):
        context.shard(torch.zeros(1, 8), mask="causal")  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [0, 2.5, "2", True])
def test_no_virtual_ranks(world_size: Any) -> None:
    with pytest.raises(ArgumentError, match=f"world_size: expected a whole number, at least 1, got {world_size!r}"):
        rf.ContextParallel.local(world_size)
