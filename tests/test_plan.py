"""Plans: every pair that meets is computed once, sends match receives, nothing useless moves."""

import pytest

import ringflash as rf
from ringflash.layout import LAYOUTS
from ringflash.masks import Full, Mask
from ringflash.plan import Plan, single_device_plan

MASKS = [Full(), rf.Causal()]


def plans_of(world: int, layout: str, mask: Mask, seqlen: int = 37) -> list[Plan]:
    context = rf.ContextParallel.local(world, layout)
    return [context.plan(mask, seqlen, rank) for rank in range(world)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", range(1, 8))
def test_every_pair_that_meets_is_computed_once(world: int, layout: str, mask: Mask) -> None:
    plans = plans_of(world, layout, mask)
    computed = [(plan.rank, hop.owner) for plan in plans for hop in plan.hops if hop.meets]
    chunks = plans[0].layout.chunks
    needed = [(q, k) for q in range(world) for k in range(world) if mask.meets(chunks[q], chunks[k])]
    assert sorted(computed) == needed


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", range(1, 8))
def test_sends_match_receives(world: int, layout: str, mask: Mask) -> None:
    plans = plans_of(world, layout, mask)
    assert len({len(plan.hops) for plan in plans}) == 1
    for step in zip(*(plan.hops for plan in plans), strict=True):
        for rank, hop in enumerate(step):
            assert hop.send_kv == step[(rank + 1) % world].receive_kv
            if hop.send_grad_home:
                assert step[hop.owner].grad_comes_home == rank
        assert sum(hop.send_grad_home for hop in step) == sum(hop.grad_comes_home is not None for hop in step)


@pytest.mark.parametrize("world", range(2, 8))
def test_kv_goes_no_further_than_it_is_needed(world: int) -> None:
    for plan in plans_of(world, "contiguous", rf.Causal()):
        assert not (plan.rank == world - 1 and any(hop.send_kv for hop in plan.hops))
    sent = sum(plan.rows_sent for plan in plans_of(world, "contiguous", rf.Causal()))
    assert sent < sum(plan.rows_sent for plan in plans_of(world, "contiguous", Full()))


def test_bytes_count_keys_and_values() -> None:
    plan = plans_of(4, "zigzag", rf.Causal(), seqlen=64)[0]
    assert plan.rows_sent == 48
    assert plan.bytes_sent(batch=2, nheads_kv=8, headdim=128, itemsize=2) == 2 * 2 * 48 * 8 * 128 * 2


def test_a_plan_prints_its_hops() -> None:
    text = str(plans_of(3, "contiguous", rf.Causal(), seqlen=12)[1])
    assert text.splitlines() == [
        "rank 1 of 3, contiguous, Causal(), 12 tokens",
        "  hop 0: KV of rank 1 [4, 8): compute  send -> 2  receive <- 0",
        "  hop 1: KV of rank 0 [0, 4): compute  send -> 2",
        "  hop 2: KV of rank 2 [8, 12): idle",
    ]


def test_a_single_device_is_a_ring_of_one() -> None:
    plan = single_device_plan(3, 8, rf.Causal())
    assert plan.q_chunks[0].start == 5
    assert [hop.meets for hop in plan.hops] == [True]
