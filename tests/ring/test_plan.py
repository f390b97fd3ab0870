"""Plans: every visible pair is computed once, sends match receives, nothing useless moves, counts are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Full, Mask
from ringflash.ring.plan import Kind, Plan
from tests.helpers.strategies import block_sparse, masks
from tests.ring.test_planners import meets, transfer_at

SEQLEN = 37
MASKS = [
    Full(),
    rf.Causal(),
    rf.Causal() & rf.SlidingWindow(5),
    rf.Causal() & rf.Documents([0, 3, 20, 29, 37]),
    rf.Documents([0, 20, 20, 37]),
    block_sparse(37, 7, seed=1, density=0.3),
]
everywhere = pytest.mark.parametrize(("layout", "mask"), [(layout, mask) for layout in LAYOUTS for mask in MASKS])


def plans_of(world: int, layout: str, mask: Mask, seqlen: int = SEQLEN) -> list[Plan]:
    context = rf.ContextParallel.local(world, layout)
    return [context.plan(mask, seqlen, rank) for rank in range(world)]


@everywhere
@pytest.mark.parametrize("world", range(1, 8))
def test_every_pair_that_meets_is_computed_once(world: int, layout: str, mask: Mask) -> None:
    plans = plans_of(world, layout, mask)
    computed = [(plan.rank, hop.owners[0]) for plan in plans for hop in plan.hops if hop.meets]
    chunks = plans[0].layout.chunks
    needed = [(q, k) for q in range(world) for k in range(world) if meets(mask, chunks[q], chunks[k])]
    assert sorted(computed) == needed


@everywhere
@pytest.mark.parametrize("world", range(1, 8))
def test_sends_match_receives(world: int, layout: str, mask: Mask) -> None:
    plans = plans_of(world, layout, mask)
    assert len({len(plan.hops) for plan in plans}) == 1
    for step in zip(*(plan.hops for plan in plans), strict=True):
        home: list[list[tuple[int, int]]] = [[], []]
        for rank, hop in enumerate(step):
            sent = transfer_at(plans[rank], hop.index, Kind.KV, sends=True)
            assert (sent is None) == (transfer_at(plans[(rank + 1) % world], hop.index, Kind.KV, sends=False) is None)
            if transfer_at(plans[rank], hop.index, Kind.KV, sends=False):
                before = plans[(rank - 1) % world]
                assert len(plans[rank].hops[hop.index + 1].rows) == before.rows_sent_at(before.hops[hop.index])
            for ends, sends in zip(home, (True, False), strict=True):
                transfer = transfer_at(plans[rank], hop.index, Kind.RETURN, sends=sends)
                if transfer:
                    ends.append((rank, transfer.peer) if sends else (transfer.peer, rank))
                    assert not sends or transfer.peer == hop.owners[0]
        assert sorted(home[0]) == sorted(home[1])


@settings(deadline=None)
@given(layout=st.sampled_from(LAYOUTS), mask=masks(SEQLEN), world=st.integers(1, 7))
def test_the_last_stop_of_keys_reads_them(layout: str, mask: Mask, world: int) -> None:
    """Checks that KV reaches every rank up to the last rank that sees some of it, and no rank beyond."""
    plans = plans_of(world, layout, mask)
    for owner in range(world):
        stops = [plans[(owner + h) % world].hops[h] for h in range(len(plans[0].hops))]
        assert all(hop.owners == (owner,) for hop in stops)
        last = max((hop.index for hop in stops if hop.meets), default=0)
        assert [bool(hop.rows) for hop in stops] == [h <= last for h in range(len(stops))]
        sends = [transfer_at(plans[(owner + h) % world], h, Kind.KV, sends=True) for h in range(len(stops))]
        assert [sent is not None for sent in sends] == [h < last for h in range(len(stops))]
        assert [hop.passes_on for hop in stops] == [0 < h < last and not hop.meets for h, hop in enumerate(stops)]


@settings(deadline=None)
@given(layout=st.sampled_from(LAYOUTS), mask=masks(SEQLEN), world=st.integers(1, 7))
def test_pairs_are_counted_exactly(layout: str, mask: Mask, world: int) -> None:
    context = rf.ContextParallel.local(world, layout)
    plans = plans_of(world, layout, mask)
    positions = context.positions(SEQLEN, mask=mask).split(list(plans[0].layout.lengths))
    dense = mask.dense(torch.arange(SEQLEN), torch.arange(SEQLEN)).sum(0)
    for plan in plans:
        for hop in plan.hops:
            assert hop.pairs == int(dense[positions[plan.rank]][:, positions[hop.owners[0]]].sum())
            met = [(q, k) for q in plan.q_chunks for k in hop.chunks if dense[q.start : q.stop, k.start : k.stop].any()]
            assert plan.meetings(hop) == tuple(met)
        assert sum(hop.pairs for hop in plan.hops) == sum(plan.pairs[plan.rank])


def test_kv_goes_no_further_than_it_is_needed() -> None:
    for world in range(2, 8):
        causal = plans_of(world, "contiguous", rf.Causal())
        assert not any(transfer_at(causal[-1], hop.index, Kind.KV, sends=True) for hop in causal[-1].hops)
        sent = sum(plan.rows_sent for plan in causal)
        assert sent < sum(plan.rows_sent for plan in plans_of(world, "contiguous", Full()))


def test_windows_and_documents_cut_hops_short() -> None:
    window = plans_of(4, "contiguous", rf.Causal() & rf.SlidingWindow(8), seqlen=64)
    assert [len(plan.hops) for plan in window] == [2] * 4
    assert [plan.rows_sent for plan in window] == [16, 16, 16, 0]
    documents = plans_of(4, "contiguous", rf.Causal() & rf.Documents([0, 16, 48, 64]), seqlen=64)
    assert [plan.hops[1].meets for plan in documents] == [False, False, True, False]
    assert [plan.rows_sent for plan in documents] == [0, 16, 0, 0]
    assert all(plan.rows_passed_on == 0 for plan in documents)


def test_keys_pass_through_ranks_that_see_none_of_them() -> None:
    """Lets rows 48 to 63 see the first 16 keys besides their own: these keys pass through ranks 1 and 2."""
    blocks = torch.eye(4, dtype=torch.bool)
    blocks[3, 0] = True
    plans = plans_of(4, "contiguous", rf.BlockSparse(blocks, 16), seqlen=64)
    assert [plan.rows_passed_on for plan in plans] == [0, 16, 16, 0]
    assert [plan.rows_sent for plan in plans] == [16, 16, 16, 0]


def test_bytes_count_keys_and_values() -> None:
    plan = plans_of(4, "zigzag", rf.Causal(), seqlen=64)[0]
    assert plan.rows_sent == 48
    assert plan.bytes_sent(batch=2, nheads_kv=8, headdim=128, itemsize=2) == 2 * 2 * 48 * 8 * 128 * 2


def test_gradients_follow_their_keys_and_return_home() -> None:
    """Counts the rows of three transfers of a gradient along the ring, and of one return to the owner."""
    plan = plans_of(4, "zigzag", rf.Causal(), seqlen=64)[0]
    assert plan.gradient_rows_sent == 48 + 16
    row = 2 * 8 * 128
    assert plan.bytes_sent_backward(1, 8, 128, itemsize=2) == row * (48 * 2 + 64 * 4)
    assert plan.bytes_sent_backward(1, 8, 128, itemsize=8, gradient_itemsize=8) == row * (48 + 64) * 8


def test_flops_are_those_of_visible_pairs() -> None:
    plan, *_ = plans = plans_of(4, "contiguous", rf.Causal(), seqlen=64)
    assert plan.flops(batch=2, nheads=3, headdim=16) == 4 * 136 * 2 * 3 * 16
    assert plan.flops(batch=2, nheads=3, headdim=16, backward=True) == 10 * 136 * 2 * 3 * 16
    assert [plans[3].flops(1, 1, 1, hop=hop) for hop in plans[3].hops] == [4 * 136, 4 * 256, 4 * 256, 4 * 256]
    assert plan.share == 136 / (64 * 65 / 2)
    assert plan.balance == pytest.approx(4 * (136 + 3 * 256) / (64 * 65 / 2))


def test_flops_of_a_mask_of_several_sequences_are_theirs() -> None:
    plan = plans_of(2, "contiguous", rf.KeyPadding([64, 10]), seqlen=64)[0]
    assert plan.flops(batch=2, nheads=1, headdim=1) == 4 * 32 * (64 + 10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_seen(layout: str) -> None:
    for plan in plans_of(3, layout, rf.KeyPadding([0, 0])):
        assert (plan.rows_sent, plan.balance, plan.share, plan.flops(2, 1, 1)) == (0, 1, 1 / 3, 0)
        assert [hop.meets for hop in plan.hops] == [False]


@pytest.mark.parametrize(
    "mask", [rf.Documents([0, 5]), rf.KeyPadding([38]), block_sparse(64, 8, seed=0, density=1.0), rf.Tree([-1] * 38)]
)
def test_a_mask_of_another_sequence(mask: Mask) -> None:
    with pytest.raises(ArgumentError, match="37"):
        rf.ContextParallel.local(2).plan(mask, SEQLEN)


def test_a_plan_prints_its_hops() -> None:
    text = str(plans_of(3, "contiguous", rf.Causal(), seqlen=12)[1])
    assert text.splitlines() == [
        "rank 1 of 3, contiguous, Causal(), 12 tokens",
        "  26 visible pairs, 33.3% of all; the busiest rank has 1.62 of the mean; sends 8 rows, and 8 of gradients",
        "  hop 0: KV of rank 1 [4, 8): compute 10 pairs  send 4 -> 2  receive 4 <- 0",
        "  hop 1: KV of rank 0 [0, 4): compute 16 pairs  send 4 -> 2",
        "  hop 2: KV of rank 2 [8, 12): idle",
    ]
    text = str(plans_of(3, "striped", Full(), 30)[0])
    assert "KV of rank 1 [2, 4), [8, 10), [14, 16), [20, 22), ... 5 in all: compute 100 pairs" in text
