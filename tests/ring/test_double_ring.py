"""A double ring: every pair is computed once, nothing useless moves, and messages may arrive when they are due."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Full, Mask
from ringflash.ops import ring_call
from ringflash.ring.plan import Kind, Plan
from ringflash.transport.base import FAR, Message
from ringflash.transport.local import LocalNetwork, LocalTransport
from tests.helpers.accuracy import Problem, assert_accurate
from tests.helpers.pairs import all_pairs
from tests.helpers.strategies import masks, modes
from tests.ring.test_planners import meets, transfer_at

SIZES = [(4, 2), (6, 2), (6, 3), (8, 4), (8, 2), (3, 1), (4, 4)]  # (ring, inner ring)
MASKS = {
    "full": Full(),
    "causal": rf.Causal(),
    "window": rf.SlidingWindow(9, 0),
    "documents": rf.Documents([0, 8, 20, 37]),
    "causal documents": rf.Causal() & rf.Documents([0, 20, 37]),
}

sizes, layouts = st.sampled_from(SIZES), st.sampled_from(LAYOUTS)


def plans_of(size: tuple[int, int], layout: str, mask: Mask, seqlen: int = 37) -> list[Plan]:
    context = rf.ContextParallel.local(size[0], layout, inner_ring=size[1])
    return [context.plan(mask, seqlen, rank) for rank in range(size[0])]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_plans(size: tuple[int, int], layout: str, mask: Mask) -> None:
    world, inner = size
    plans = plans_of(size, layout, mask)
    chunks = plans[0].layout.chunks
    computed = [(plan.rank, hop.owners[0]) for plan in plans for hop in plan.hops if hop.meets]
    assert sorted(computed) == [(q, k) for q in range(world) for k in range(world) if meets(mask, chunks[q], chunks[k])]

    for step in zip(*(plan.hops for plan in plans), strict=True):
        for plan, hop in zip(plans, step, strict=True):
            sent = transfer_at(plan, hop.index, Kind.KV, sends=True)
            next_rank = plan.rank // inner * inner + (plan.rank + 1) % inner
            assert (sent is None) == (transfer_at(plans[next_rank], hop.index, Kind.KV, sends=False) is None)
            if sent:
                assert sent.peer == next_rank
                assert plans[next_rank].hops[hop.index + 1].owners == hop.owners
                assert plans[next_rank].hops[hop.index + 1].rows
            far = transfer_at(plan, hop.index, Kind.FAR_KV, sends=True)
            if far:
                assert (far.peer - plan.rank) % world == inner
                received = transfer_at(plans[far.peer], hop.index, Kind.FAR_KV, sends=False)
                assert received is not None
                assert received.peer == plan.rank
                following = next(each for each in plans[far.peer].hops[hop.index + 1 :] if each.starts)
                assert (following.owners, following.revolution) == (hop.owners, hop.revolution + 1)
                assert following.rows
            for kind in (Kind.RETURN, Kind.FAR_RETURN):
                home = transfer_at(plan, hop.index, kind, sends=True)
                if home:
                    received = transfer_at(plans[hop.owners[0]], hop.index, kind, sends=False)
                    assert home.peer == hop.owners[0]
                    assert received is not None
                    assert received.peer == plan.rank
        for kind in (Kind.FAR_KV, Kind.RETURN, Kind.FAR_RETURN):
            ends = [
                [transfer_at(plan, hop.index, kind, sends=sends) for plan, hop in zip(plans, step, strict=True)]
                for sends in (True, False)
            ]
            assert len({sum(end is not None for end in of) for of in ends}) == 1
    for plan in plans:  # each inner pass in which KV is seen returns a gradient, except in the owner's own group
        groups = {q // inner for q in range(world) if meets(mask, chunks[q], chunks[plan.rank])}
        away = groups - {plan.rank // inner}
        returns = [transfer_at(plan, hop.index, Kind.FAR_RETURN, sends=False) for hop in plan.hops]
        assert sum(each is not None for each in returns) == len(away)


def test_far_links_carry_what_a_ring_of_groups_would() -> None:
    for plan in plans_of((8, 4), "zigzag", Full(), 64):
        kinds = [[transfer_at(plan, h, kind, sends=True) for h in range(8)] for kind in (Kind.KV, Kind.FAR_KV)]
        assert [h for h in range(8) if kinds[1][h]] == [0]
        assert len(plan.hops) == 8
        assert sum(sent is not None for sent in kinds[0]) == 2 * 3
        assert plan.rows_sent == 7 * 8


def test_a_plan_prints_its_hops() -> None:
    text = str(plans_of((4, 2), "contiguous", Full(), 8)[1])
    assert text.splitlines()[2:] == [
        "  hop 0: KV of rank 1 [2, 4): compute 4 pairs  send 2 -> 0  receive 2 <- 0  send far 2 -> 3  receive far <- 3",
        "  hop 1: KV of rank 0 [0, 2): compute 4 pairs",
        "  hop 2: KV of rank 3 [6, 8): compute 4 pairs  send 2 -> 0  receive 2 <- 0",
        "  hop 3: KV of rank 2 [4, 6): compute 4 pairs",
    ]


@pytest.mark.parametrize(
    ("size", "layout", "mask", "deterministic"), all_pairs(SIZES[:4], LAYOUTS, [*MASKS], [True, False])
)
def test_accuracy(size: tuple[int, int], layout: str, mask: str, deterministic: bool) -> None:
    given = Problem.random(seqlen=37, heads=(2, 1), headdim=16, dtype=torch.float64, mask=MASKS[mask], batch=1)
    context = rf.ContextParallel.local(size[0], layout, inner_ring=size[1])
    assert_accurate(given.ring(context, deterministic=deterministic), given)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), size=sizes, heads=st.sampled_from([1, 2]), layout=layouts, extra=st.integers(0, 40))
def test_any_mask_and_mode(data: Any, size: tuple[int, int], heads: int, layout: str, extra: int) -> None:
    context = rf.ContextParallel.local(size[0] * heads, layout, heads=heads, inner_ring=size[1])
    seqlen = context.world_size + extra
    mask, mode = data.draw(masks(seqlen)), data.draw(modes())
    given = Problem.random(seqlen=seqlen, heads=(4, 2), dtype=torch.float64, mask=mask, **mode)
    assert_accurate(given.ring(context, deterministic=data.draw(st.booleans())), given)


class _LateNetwork(LocalNetwork):
    """A network that delivers a message only when one of its ends waits for it, which exposes premature reads."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[tuple[int, int, int], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        self.open: set[tuple[tuple[int, int, int], int, bool]] = set()

    def transport(self, rank: int, members: Sequence[int] | None = None) -> LocalTransport:
        return _LateTransport(self, rank, members)

    def deliver(self) -> None:
        """Delivers nothing when all ranks have yielded; `settle` delivers."""

    def check_drained(self) -> None:
        assert not self.open, f"nobody waits for {self.open}"

    def settle(self, route: tuple[int, int, int], index: int, sends: bool) -> None:
        sent, awaited = self.routes[route]
        self.open.remove((route, index, sends))
        assert index < len(sent), f"{route} is waited for before it is sent"
        if sends:  # from now on the sender may overwrite its buffer
            sent[index] = sent[index].clone()
        else:
            awaited[index].copy_(sent[index])


class _LateTransport(LocalTransport):
    def start(self, messages: Sequence[Message]) -> Any:
        network, handle = self._network, []
        assert isinstance(network, _LateNetwork)
        assert len({message.channel >= FAR for message in messages}) <= 1
        for message in messages:
            peer = message.peer if self._members is None else self._members[message.peer]
            route = (self._rank, peer, message.channel) if message.sends else (peer, self._rank, message.channel)
            if not message.sends:
                message.span.vector.fill_(torch.nan)
            ends = network.routes[route][0 if message.sends else 1]
            ends.append(message.span.vector)
            handle.append((route, len(ends) - 1, message.sends))
        network.open |= set(handle)
        return handle

    def finish(self, handle: Any) -> None:
        network = self._network
        assert isinstance(network, _LateNetwork)
        for end in handle:
            network.settle(*end)


@pytest.mark.parametrize(
    ("hops", "size", "mask", "deterministic"),
    [
        *(("ring", *rest) for rest in all_pairs([*SIZES, (4, None)], [*MASKS], [True, False])),
        *(("grouped", *rest) for rest in all_pairs([(n, None) for n in (3, 4, 6, 8)], [*MASKS], [True, False])),
    ],
)
def test_messages_may_arrive_as_late_as_they_are_due(
    hops: str, size: tuple[int, int | None], mask: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Problem.random(seqlen=37, heads=(2, 1), headdim=16, dtype=torch.float64, mask=MASKS[mask], batch=1)
    context = rf.ContextParallel.local(size[0], inner_ring=size[1], hops=hops)
    expected = given.ring(context, deterministic=deterministic)
    monkeypatch.setattr(ring_call, "LocalNetwork", _LateNetwork)
    got = given.ring(context, deterministic=deterministic)
    assert all(map(torch.equal, got, expected))


def test_repeats_are_bitwise_equal() -> None:
    given = Problem.random(seqlen=70, mask=rf.Causal())
    context = rf.ContextParallel.local(6, inner_ring=3)
    first = given.ring(context, deterministic=True)
    for _ in range(5):
        assert all(map(torch.equal, given.ring(context, deterministic=True), first))


@pytest.mark.parametrize("inner", [3, 8])
def test_a_ring_that_is_no_multiple(inner: int) -> None:
    with pytest.raises(ArgumentError, match=f"inner_ring: expected a divisor of the ring's 4 ranks, got {inner}"):
        rf.ContextParallel.local(8, heads=2, inner_ring=inner)


@pytest.mark.parametrize("inner", [0, -2, 2.0, True, "2"])
def test_an_inner_ring_of_no_whole_number(inner: Any) -> None:
    with pytest.raises(ArgumentError, match=f"inner_ring: expected a whole number, at least 1, got {inner!r}"):
        rf.ContextParallel.local(4, inner_ring=inner)
