"""Counts of visible pairs equal the counts in the dense mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.masks import Mask
from tests.helpers.strategies import block_sparse, masks

SEQLEN = 60


@settings(deadline=None)
@given(mask=masks(SEQLEN), seqlen_q=st.integers(1, SEQLEN + 10))
def test_pairs_of_each_query(mask: Mask, seqlen_q: int) -> None:
    rows, keys = torch.arange(SEQLEN - seqlen_q, SEQLEN), torch.arange(SEQLEN)
    dense = mask.dense(rows, keys)
    assert torch.equal(mask.area(seqlen_q, SEQLEN).row_pairs, dense.sum((0, 2)))


@settings(deadline=None)
@given(mask=masks(SEQLEN), owners=st.lists(st.integers(0, 3), min_size=SEQLEN, max_size=SEQLEN))
def test_pairs_between_ranks(mask: Mask, owners: list[int]) -> None:
    """Checks the counts between ranks for any assignment of tokens to ranks."""
    cut = [[(i, i + 1) for i in range(SEQLEN) if owners[i] == rank] for rank in range(4)]
    held = torch.nn.functional.one_hot(torch.tensor(owners), 4)
    positions = torch.arange(SEQLEN)
    dense = mask.dense(positions, positions).sum(0)
    assert torch.equal(mask.area(SEQLEN, SEQLEN).between(cut), held.T @ dense @ held)


@settings(deadline=None)
@given(mask=masks(SEQLEN), start=st.integers(0, SEQLEN - 1), edges=st.sets(st.integers(0, SEQLEN), min_size=2))
def test_pairs_between_edges(mask: Mask, start: int, edges: set[int]) -> None:
    rising = sorted(edges)
    seen = mask.area(SEQLEN, SEQLEN).seen([(start, SEQLEN)], torch.tensor(rising))
    sums = torch.nn.functional.pad(mask.dense(torch.arange(start, SEQLEN), torch.arange(SEQLEN)).sum((0, 1)), (1, 0))
    assert torch.equal(seen, sums.cumsum(0)[rising].diff())


@settings(deadline=None)
@given(mask=masks(SEQLEN))
def test_components_see_nothing_of_each_other(mask: Mask) -> None:
    edges = mask.area(SEQLEN, SEQLEN).components.tolist()
    assert edges[0] == 0
    assert edges[-1] == SEQLEN
    assert edges == sorted(set(edges))
    for middle in edges[1:-1]:
        for a, b in (((0, middle), (middle, SEQLEN)), ((middle, SEQLEN), (0, middle))):
            assert not mask.dense(torch.arange(*a), torch.arange(*b)).any()


def test_documents_are_components() -> None:
    assert (rf.Causal() & rf.Documents([0, 20, 20, 50, 60])).area(60, 60).components.tolist() == [0, 20, 50, 60]
    assert rf.SlidingWindow(5, 0).area(60, 60).components.tolist() == [0, 60]
    assert rf.BlockSparse(torch.eye(3, dtype=torch.bool), 20).area(60, 60).components.tolist() == [0, 20, 40, 60]


@pytest.mark.parametrize("mask", [rf.SlidingWindow(4096, 0), rf.Causal() & block_sparse(2**20, 4096, 0, 0.1)])
def test_a_million_tokens(mask: Mask) -> None:
    """Checks a length whose square would not fit into memory."""
    quarter = 2**18
    cut = [[(rank * quarter, (rank + 1) * quarter)] for rank in range(4)]
    pairs = mask.area(2**20, 2**20).between(cut)
    assert int(pairs.sum()) == int(mask.area(2**20, 2**20).row_pairs.sum())
    assert int(pairs[0, 1]) == 0


@pytest.mark.parametrize("causal", [rf.Causal(), rf.Causal() & rf.KeyPadding([2**20, 2**20])])
def test_many_stripes_of_many_ranks(causal: Mask) -> None:
    """Checks 4096 stripes dealt round-robin: queries see all keys of earlier stripes, and half of their own stripe."""
    world, stripe, count = 256, 256, 4096
    cut = [[(i * stripe, (i + 1) * stripe) for i in range(rank, count, world)] for rank in range(world)]
    pairs = causal.area(count * stripe, count * stripe).between(cut)
    rounds, ranks = count // world, torch.arange(world)
    before = rounds * (rounds - 1) // 2 + rounds * (ranks < ranks[:, None]).long()
    own = rounds * stripe * (stripe + 1) // 2 * torch.eye(world, dtype=torch.int64)
    assert torch.equal(pairs, (before * stripe**2 + own) * causal.batch)
