"""Balanced layouts: even work, equal tokens, and no more movement of keys than these need."""

import random
from itertools import accumulate

import pytest
import torch

import ringflash as rf
from ringflash.layouts.balance import EVEN, balanced, critical_path, reaches
from ringflash.layouts.cuts import joined
from ringflash.masks import Full, Mask
from ringflash.ring.plan import Plan
from tests.helpers.strategies import block_sparse

SEQLEN = 32768
ALL_MOVE = 1.0  # fraction `moved` when every key moves to every other rank


def documents(*lengths: int) -> rf.Documents:
    return rf.Documents([0, *accumulate(lengths)])


def mixed(count: int, seed: int) -> rf.Documents:
    """Returns a few long documents and many short ones, as in real corpora."""
    draw = random.Random(seed)
    sizes = [draw.paretovariate(1.2) for _ in range(count)]
    lengths = [int(size / sum(sizes) * SEQLEN) for size in sizes]
    lengths[0] += SEQLEN - sum(lengths)
    return documents(*lengths)


def plans(mask: Mask, world: int, layout: str = "balanced") -> list[Plan]:
    context = rf.ContextParallel.local(world, layout)
    return [context.plan(mask, SEQLEN, rank) for rank in range(world)]


def moved(of: list[Plan]) -> float:
    """Returns the rows sent as a fraction of a ring's rows in which all keys reach all ranks."""
    return sum(plan.rows_sent for plan in of) / (SEQLEN * (len(of) - 1))


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (Full(), ALL_MOVE),
        (rf.Causal(), ALL_MOVE),
        (rf.Causal() & rf.SlidingWindow(512), 0.5),
        (rf.SlidingWindow(300, 300), 1.0),
        (rf.PrefixLM([SEQLEN // 3]), ALL_MOVE),
        (rf.Causal() & rf.KeyPadding([SEQLEN, SEQLEN // 2]), ALL_MOVE),
        (block_sparse(SEQLEN, 512, seed=0, density=0.2), ALL_MOVE),
        (rf.Causal() & block_sparse(SEQLEN, 512, seed=0, density=0.2), ALL_MOVE),
        (rf.Causal() & mixed(16, 0), 0.9),
        (rf.Causal() & mixed(16, 1), 0.9),
        (rf.Causal() & mixed(100, 2), 0.9),
        (mixed(16, 3), ALL_MOVE),
        (rf.Causal() & rf.SlidingWindow(512) & mixed(16, 1), 0.5),
    ],
    ids=repr,
)
def test_work_is_even(mask: Mask, most: float, world: int) -> None:
    made = plans(mask, world)
    assert made[0].balance <= EVEN
    assert max(made[0].layout.lengths) - min(made[0].layout.lengths) <= 1
    if world > 2:
        assert moved(made) <= most


@pytest.mark.parametrize("world", [4, 8])
def test_sixteen_documents_of_mixed_length(world: int) -> None:
    """Checks even work with about half the rows moved on average; only a dominant document makes a layout move more."""
    sent = []
    for seed in range(20):
        made = plans(rf.Causal() & mixed(16, seed), world)
        assert made[0].balance <= EVEN
        sent.append(moved(made))
    assert sum(sent) / len(sent) <= 0.55


def test_documents_that_fit_stay_on_one_rank() -> None:
    """Checks that ranks get whole documents, whatever their order, so that nothing moves."""
    lengths = [SEQLEN // 8, SEQLEN // 16, SEQLEN // 16] * 4
    random.Random(0).shuffle(lengths)
    for world in (2, 4):
        made = plans(rf.Causal() & documents(*lengths), world)
        assert moved(made) == 0
        assert [len(plan.hops) for plan in made] == [1] * world
        assert made[0].balance <= EVEN


def test_a_window_is_cut_in_a_row() -> None:
    """Checks for the contiguous layout: all rows see equally many keys, and ranks need only their neighbours' keys."""
    made = plans(rf.Causal() & rf.SlidingWindow(512), 4)
    assert made[0].layout.chunks == plans(Full(), 4, "contiguous")[0].layout.chunks
    assert [len(plan.hops) for plan in made] == [2] * 4
    assert [plan.rows_sent > 0 for plan in made] == [True, True, True, False]


def test_causal_is_as_zigzag() -> None:
    assert plans(rf.Causal(), 4)[0].layout.chunks == plans(rf.Causal(), 4, "zigzag")[0].layout.chunks


def test_a_long_document_among_short_ones() -> None:
    """Checks a layout that spreads the long document over all ranks and evens out the tokens with the short ones."""
    mask = rf.Causal() & documents(SEQLEN // 2, *[SEQLEN // 32] * 16)
    made = plans(mask, 4)
    assert made[0].balance <= EVEN
    assert moved(made) < 0.7
    assert plans(mask, 4, "contiguous")[0].balance > 2


def test_nothing_is_seen() -> None:
    made = plans(rf.BlockSparse(torch.zeros(1, 1, dtype=torch.bool), SEQLEN), 4)
    assert made[0].balance == 1
    assert moved(made) == 0


def test_a_few_rows_do_all_the_work() -> None:
    """Checks blocks that only one run of queries sees: only dealing small pieces to the ranks spreads their work."""
    blocks = torch.zeros(256, 256, dtype=torch.bool)
    blocks[100:132] = True
    assert plans(rf.BlockSparse(blocks, SEQLEN // 256), 4)[0].balance <= EVEN


def test_ranks_are_numbered_in_the_order_that_keys_take() -> None:
    """Checks a cut into four chunks under a window, numbered so that keys would pass through many ranks."""
    mask, quarter = rf.Causal() & rf.SlidingWindow(512), SEQLEN // 4
    cut = tuple(((index * quarter, (index + 1) * quarter),) for index in (2, 0, 3, 1))
    area = mask.area(SEQLEN, SEQLEN)
    assert reaches(area.between(cut) > 0).tolist() == [2, 2, 0, 1]
    assert sorted(reaches(area.between(balanced(area, 4, [cut])) > 0).tolist()) == [0, 1, 1, 1]


def test_a_ring_waits_where_hops_are_uneven() -> None:
    """Checks that no rank waits if each hop is even, or if ranks have equal work at different hops."""
    assert critical_path(torch.full((3, 3), 5)) == pytest.approx(1)
    assert critical_path(torch.zeros(2, 2, dtype=torch.int64)) == 1
    assert critical_path(torch.tensor([[9, 1], [1, 9]])) == pytest.approx(1)
    # Rank 1 has work only at hop 2, with keys that rank 0 passes on. Rank 1 waits until rank 0 has finished hop 0, so
    # the ring takes 100 + 99, against a mean of 199 / 3.
    assert critical_path(torch.tensor([[100, 0, 0], [0, 0, 99], [0, 0, 0]])) == pytest.approx(3)


def test_long_documents_are_even_at_every_hop() -> None:
    """Checks that ranks wait at most 10% of the mean work for each other, whatever the lengths."""
    for seed in range(10):
        made = plans(rf.Causal() & mixed(16, seed), 4)
        assert made[0].critical_path <= 1.1


def test_reaches() -> None:
    meets = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    assert reaches(meets).tolist() == [1, 0, 1]


def test_joined() -> None:
    assert joined([(7, 9), (0, 3), (5, 5), (3, 4)]) == ((0, 4), (7, 9))
