"""Mask tables of the Hopper kernels, compared with the dense masks."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.kernels.hopper.mask_tables import Intervals, are_ascending, intervals
from ringflash.layouts.layout import LAYOUTS, Chunk, make_layout, positions
from ringflash.masks import Full, Mask
from tests.helpers.strategies import masks

SEQLEN = 203
CPU = torch.device("cpu")
Hop = tuple[tuple[Chunk, ...], tuple[Chunk, ...]]

WHOLE = (Chunk(0, SEQLEN),)
ZIGZAG = [make_layout("zigzag", SEQLEN, 3).chunks[rank] for rank in range(3)]
HOPS: dict[str, Hop] = {
    "whole": (WHOLE, WHOLE),
    "fewer queries": ((Chunk(SEQLEN - 37, 37),), WHOLE),
    "more queries": ((Chunk(-90, SEQLEN + 90),), WHOLE),
    "one query": ((Chunk(SEQLEN - 1, 1),), WHOLE),
    "one key": ((Chunk(1 - 99, 99),), (Chunk(0, 1),)),
    "a rank's own": (ZIGZAG[1], ZIGZAG[1]),
    "keys of the rank before": (ZIGZAG[1], ZIGZAG[0]),
    "keys of the rank after": (ZIGZAG[0], ZIGZAG[2]),
    "all before": ((Chunk(100, 103),), (Chunk(0, 100),)),
    "all after": ((Chunk(0, 100),), (Chunk(100, 103),)),
}
MASKS: list[Mask] = [
    Full(),
    rf.Causal(),
    rf.SlidingWindow(40, 0),
    rf.SlidingWindow(0, 70),
    rf.SlidingWindow(100, 13),
    rf.SlidingWindow(None, None),
    rf.Documents([0, 0, 1, 2, 2, 64, 65, 130, SEQLEN, SEQLEN]),
    rf.KeyPadding([SEQLEN, 0, 64, 131]),
    rf.PrefixLM([0, 1, 90, SEQLEN]),
    rf.Causal() & rf.Documents([0, 1, 40, 40, 190, SEQLEN]),
    rf.Documents([0, 64, SEQLEN]) & rf.KeyPadding([20, 150, SEQLEN]),
    rf.PrefixLM([100, 3]) & rf.SlidingWindow(70, 30) & rf.KeyPadding([190, 140]),
]

interval_masks = masks(SEQLEN).filter(lambda mask: mask.bitmap() is None)


# Strategies are made once, as in `tests.helpers.strategies`.
layouts, ranks = st.sampled_from(LAYOUTS), [st.integers(0, world - 1) for world in range(1, 5)]


@cache
@st.composite
def hops(draw: st.DrawFn) -> Hop:
    """Draws a hop of a ring, or a call on one device with more or fewer queries than keys."""
    if draw(st.booleans()):
        seqlen_q = draw(st.integers(1, SEQLEN + 150))
        return (Chunk(SEQLEN - seqlen_q, seqlen_q),), WHOLE
    world = draw(st.integers(1, 4))
    chunks = make_layout(draw(layouts), SEQLEN, world, draw(masks(SEQLEN))).chunks
    return chunks[draw(ranks[world - 1])], chunks[draw(ranks[world - 1])]


def seen_by_own(mask: Mask, hop: Hop, by_keys: bool) -> Tensor:
    """Returns the visible pairs, bool (batch, own rows, other rows)."""
    seen = mask.dense(*(positions(chunks) for chunks in hop))
    seen = seen.expand(mask.batch, -1, -1)
    return seen.transpose(1, 2) if by_keys else seen


def check_bounds(got: Intervals, seen: Tensor) -> None:
    nrows, nothers = seen.shape[1:]
    assert got.bounds.dtype == torch.int32
    assert got.bounds.is_contiguous()
    assert got.bounds.shape[1:] == (nrows, 2)
    assert got.bounds_stride == (2 * nrows if len(got.bounds) > 1 else 0)
    first, stop = (x[..., None] for x in got.bounds.unbind(-1))
    others = torch.arange(nothers)
    assert torch.equal(((others >= first) & (others < stop)).expand_as(seen), seen)
    assert int(stop.max()) <= nothers  # no row past the end is visible


def check_tiles(got: Intervals, seen: Tensor, own_block: int, block: int, by_keys: bool) -> None:
    nrows, nothers = seen.shape[1:]
    ntiles = -(-nrows // own_block)
    assert got.tiles.dtype == torch.int32
    assert got.tiles.is_contiguous()
    assert got.tiles.shape[1:] == (ntiles, 4)
    assert got.tiles_stride == (4 * ntiles if len(got.tiles) > 1 else 0)
    masked = by_keys and nrows % own_block > 0  # no query sees keys past the end
    for rows_seen, tiles in zip(seen, got.tiles.expand(len(seen), -1, -1).tolist(), strict=True):
        for own, (begin, full_begin, full_end, end) in zip(rows_seen.split(own_block), tiles, strict=True):
            assert 0 <= begin <= full_begin <= full_end <= end <= -(-nothers // block)
            visited = torch.zeros(nothers, dtype=torch.bool)
            visited[begin * block : end * block] = True
            assert not (own.any(0) & ~visited).any()
            assert full_begin == full_end or full_end * block <= nothers
            assert own[:, full_begin * block : full_end * block].all()
            if not own.any():
                assert begin == end
            masked |= begin < full_begin or full_end < end
    assert got.masked == masked


def check_order(got: Intervals) -> None:
    assert got.order.dtype == torch.int32
    order = got.order.long()
    assert torch.equal(order.sort().values, torch.arange(got.tiles.shape[1]))
    visits = (got.tiles[..., 3] - got.tiles[..., 0]).sum(0)[order]
    assert (visits.diff() <= 0).all()


def check_turns(got: Intervals, nothers: int) -> None:
    """Checks that owned tiles add to a tile in launch order, counted from 0, and that the table has the total count."""
    assert got.turns is not None
    assert got.turns.dtype == torch.int32
    ntiles = got.tiles.shape[1]
    assert got.turns.shape == (len(got.tiles), ntiles + 2 * nothers)
    assert got.turns_stride == (ntiles + 2 * nothers if len(got.turns) > 1 else 0)
    assert torch.equal(got.order, torch.arange(ntiles, dtype=torch.int32))
    for tiles, turns in zip(got.tiles.tolist(), got.turns.tolist(), strict=True):
        before, (first, count) = turns[:ntiles], (turns[ntiles + i :: 2] for i in range(2))
        taken = [0] * nothers
        for n, (begin, _, _, end) in enumerate(tiles):
            for other in range(begin, end):
                assert before[n] - first[other] == taken[other]
                taken[other] += 1
        assert taken == count


def check(mask: Mask, hop: Hop, own_block: int, block: int, by_keys: bool) -> None:
    got = intervals(mask, *hop, own_block, block, CPU, by_keys)
    seen = seen_by_own(mask, hop, by_keys)
    check_bounds(got, seen)
    check_tiles(got, seen, own_block, block, by_keys)
    check_order(got)
    assert got.turns is None
    ordered = intervals(mask, *hop, own_block, block, CPU, by_keys, ordered=True)
    assert torch.equal(ordered.tiles, got.tiles)
    check_turns(ordered, -(-seen.shape[2] // block))


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("hop", HOPS)
def test_agree_with_the_dense_mask(hop: str, by_keys: bool) -> None:
    for mask in MASKS:
        for own_block, block in ((64, 32), (32, 64), (192, 128)):
            check(mask, HOPS[hop], own_block, block, by_keys)


@settings(deadline=None, max_examples=150)
@given(
    mask=interval_masks,
    hop=hops(),
    own_block=st.sampled_from([1, 16, 64, 192]),
    block=st.sampled_from([1, 16, 32, 128]),
    by_keys=st.booleans(),
)
def test_drawn_ones_agree_with_the_dense_mask(mask: Mask, hop: Hop, own_block: int, block: int, by_keys: bool) -> None:
    check(mask, hop, own_block, block, by_keys)


def test_tiles_of_a_causal_mask() -> None:
    """Checks that tiles on the diagonal are masked, earlier tiles are full, and the longest rows come first."""
    chunks = (Chunk(0, 256),)
    got = intervals(rf.Causal(), chunks, chunks, 64, 32, CPU, False)
    assert got.tiles.tolist() == [[[0, 0, 0, 2], [0, 0, 2, 4], [0, 0, 4, 6], [0, 0, 6, 8]]]
    assert got.order.tolist() == [3, 2, 1, 0]
    got = intervals(rf.Causal(), chunks, chunks, 64, 32, CPU, True)
    assert got.tiles.tolist() == [[[0, 2, 8, 8], [2, 4, 8, 8], [4, 6, 8, 8], [6, 8, 8, 8]]]
    assert got.order.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("mask", "hop", "masked"),
    [
        (Full(), ((Chunk(0, 100),), (Chunk(0, 128),)), False),  # results of queries past the end are dropped
        (Full(), ((Chunk(0, 128),), (Chunk(0, 100),)), True),  # keys past the end are masked
        (rf.Causal(), ((Chunk(128, 128),), (Chunk(0, 128),)), False),
        (rf.Causal(), ((Chunk(0, 128),), (Chunk(128, 128),)), False),  # no tile is processed
        (rf.Causal(), ((Chunk(0, 128),), (Chunk(0, 128),)), True),
        (rf.KeyPadding([128, 64]), ((Chunk(0, 128),), (Chunk(0, 128),)), False),  # ends at a tile's border
        (rf.KeyPadding([128, 63]), ((Chunk(0, 128),), (Chunk(0, 128),)), True),
    ],
)
def test_masked_is_whether_a_visited_tile_needs_a_mask(mask: Mask, hop: Hop, masked: bool) -> None:
    assert intervals(mask, *hop, 64, 32, CPU, False).masked == masked


def test_tiles_may_cross_a_chunks_border() -> None:
    """Checks two chunks in one tile: rows from 40 on have positions from 160 on and see all earlier rows in storage."""
    chunks = Chunk(0, 40), Chunk(160, 40)
    got = intervals(rf.Causal(), chunks, chunks, 64, 16, CPU, False)
    assert got.tiles.tolist() == [[[0, 0, 0, 4], [0, 0, 4, 5]]]
    window = intervals(rf.SlidingWindow(10, 10), chunks, chunks, 80, 16, CPU, False)
    assert window.bounds[0, 39].tolist() == [29, 40]
    assert window.bounds[0, 40].tolist() == [40, 51]


def test_are_ascending() -> None:
    assert are_ascending(())
    assert are_ascending((Chunk(-5, 12),))
    assert are_ascending((Chunk(0, 5), Chunk(5, 5), Chunk(20, 1)))
    assert not are_ascending((Chunk(5, 5), Chunk(0, 5)))
    assert not are_ascending((Chunk(0, 5), Chunk(4, 5)))
    mask = rf.Causal() & rf.Documents([0, 9, SEQLEN])
    for layout in LAYOUTS:
        assert all(map(are_ascending, make_layout(layout, SEQLEN, 4, mask).chunks))


@pytest.mark.parametrize("by_keys", [True, False])
def test_skew(by_keys: bool) -> None:
    """Checks that skew is taken from the sequence that processes the most tiles, however few the others process."""

    def skew(mask: Mask) -> float:
        chunks = (Chunk(0, 4096),)
        return intervals(mask, chunks, chunks, 128, 128, CPU, by_keys).skew

    causal = skew(rf.Causal())
    assert skew(Full()) == 1
    assert causal == pytest.approx(32 / 16.5)
    assert skew(rf.Causal() & rf.KeyPadding([4096, 100, 100])) == pytest.approx(causal)
    assert skew(rf.Causal() & rf.Documents(range(0, 4097, 512))) == pytest.approx(4 / 2.5)
    assert skew(rf.Causal() & rf.Documents([0, 2048, *range(2176, 4097, 128)])) > 1.5 * causal
    assert skew(rf.KeyPadding([0])) == 1
