"""Hops gathered into one: exact under every mask and mode, with keys sent directly from owners to their readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError, RankMismatch
from ringflash.kernels.eager.backend import EagerBackend
from ringflash.layouts.layout import LAYOUTS, Chunk
from ringflash.masks import Full, Mask
from ringflash.ops.ring_call import _row_bytes
from ringflash.ring.gathered_plan import receives_at_most
from ringflash.ring.plan import Plan, Transfer
from ringflash.transport.base import Message, Slot, Span
from ringflash.transport.local import LocalTransport
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate
from tests.helpers.distributed import run_ranks
from tests.helpers.faults import Outcome, call_ring, outcome_of, planted, raise_out_of_memory
from tests.helpers.pairs import all_pairs
from tests.helpers.strategies import block_sparse, masks, modes

SEQLEN = 61
MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": rf.Causal(),
    "window": rf.Causal() & rf.SlidingWindow(9),
    "documents": rf.Causal() & rf.Documents([0, 5, 5, 20, 44, 61]),
    "prefix": rf.PrefixLM([30, 3]),
    "padding": rf.Causal() & rf.KeyPadding([61, 17]),
    "nothing": rf.KeyPadding([0, 0]),
    "sparse": block_sparse(SEQLEN, 8, seed=0, density=0.3),
    "tree": rf.Causal() & rf.Tree([-1, 0, 1, 1, 2, 2, 3, 3, 4], start=52),
}

ON_PROCESSES = ("causal", "window", "sparse", "nothing")


def context_of(world: int, layout: str = "zigzag", **options: Any) -> rf.ContextParallel:
    return rf.ContextParallel.local(world, layout, hops="grouped", **options)


@pytest.mark.parametrize(
    ("mask", "layout", "world", "deterministic"), all_pairs([*MASKS], LAYOUTS, [1, 2, 3, 4, 5], [True, False])
)
def test_every_mask_in_every_layout(mask: str, layout: str, world: int, deterministic: bool) -> None:
    problem = Problem.random(seqlen=SEQLEN, dtype=torch.float64, headdim=(16, 24), mask=MASKS[mask])
    assert_accurate(problem.ring(context_of(world, layout), deterministic=deterministic), problem)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    grid=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2)]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    layout=st.sampled_from(LAYOUTS),
    extra=st.integers(0, 40),
)
def test_any_mask_and_mode(data: Any, grid: tuple[int, int], heads: tuple[int, int], layout: str, extra: int) -> None:
    context = context_of(grid[0] * grid[1], layout, heads=grid[1])
    seqlen = context.world_size + extra
    mask, mode = data.draw(masks(seqlen)), data.draw(modes())
    given = Problem.random(seqlen=seqlen, heads=heads, dtype=torch.float64, mask=mask, **mode)
    assert_accurate(given.ring(context, deterministic=data.draw(st.booleans())), given)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accuracy(dtype: torch.dtype, heads: int) -> None:
    problem = Problem.random(seqlen=203, heads=(8, 1), dtype=dtype, mask=rf.Causal())
    for layout in LAYOUTS:
        assert_accurate(problem.ring(context_of(4, layout, heads=heads)), problem)


@pytest.mark.parametrize("mask", [rf.Causal(), Full()])
def test_float32_beside_the_ring(mask: Mask) -> None:
    problem = Problem.random(seqlen=203, mask=mask)
    rings = problem.ring(rf.ContextParallel.local(4))
    for a, b in zip(problem.ring(context_of(4)), rings, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_gradcheck() -> None:
    q = torch.randn(1, 7, 2, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 7, 1, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = rf.AttentionOptions(return_lse=True)
    call = lambda q, k, v: rf.ring_attention(q, k, v, context_of(3), mask=rf.Causal(), options=options)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


def test_repeats_are_bitwise_equal() -> None:
    problem, context = Problem.random(seqlen=101, mask=rf.Causal()), context_of(3)
    first = problem.ring(context, deterministic=True)
    for _ in range(5):
        assert all(map(torch.equal, problem.ring(context, deterministic=True), first))


@pytest.mark.parametrize("hops", ["grouped", "auto"])
def test_where_nothing_travels_it_is_the_ring_bitwise(hops: str) -> None:
    """Checks a world of one rank, and documents that each lie on a single rank."""
    problem = Problem.random(seqlen=150, mask=rf.Causal())
    got = problem.ring(rf.ContextParallel.local(1, hops=hops))
    assert all(map(torch.equal, got, problem.flash()))
    problem = Problem.random(seqlen=60, mask=rf.Documents([0, 20, 40, 60]))
    alone = problem.ring(rf.ContextParallel.local(3, "contiguous"))
    assert all(map(torch.equal, problem.ring(rf.ContextParallel.local(3, "contiguous", hops=hops)), alone))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uninitialised_buffers_do_not_leak(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(seqlen=SEQLEN, headdim=16, mask=MASKS["sparse"])
    expected = problem.ring(context_of(4, layout))
    original = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *a, **kw: original(x, *a, **kw).fill_(math.nan))
    assert all(map(torch.equal, problem.ring(context_of(4, layout)), expected))


def test_one_exchange_and_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a pass sends one batch of messages each way, from equal memory on all ranks, and computes once."""
    batches: list[Sequence[Message]] = []
    launches: list[str] = []
    memory: dict[int, list[Slot]] = {}
    start, allocate = LocalTransport.start, LocalTransport.allocate

    def started(self: LocalTransport, messages: Sequence[Message]) -> None:
        for message in messages:
            if not message.sends:
                assert message.mirror is not None
                assert message.mirror.numel == message.span.numel
        batches.append(messages)
        start(self, messages)

    def allocated(self: LocalTransport, slot: tuple[int, int], *given: Any) -> Slot:
        memory.setdefault(slot[0], []).append(allocate(self, slot, *given))
        return memory[slot[0]][-1]

    monkeypatch.setattr(LocalTransport, "start", started)
    monkeypatch.setattr(LocalTransport, "allocate", allocated)
    for name in ("forward", "backward_dq", "backward_dkdv"):
        original = getattr(EagerBackend, name)
        counted = lambda *a, name=name, original=original, **kw: (launches.append(name), original(*a, **kw))  # noqa: E731
        monkeypatch.setattr(EagerBackend, name, staticmethod(counted))
    problem = Problem.random(seqlen=SEQLEN, headdim=16, mask=MASKS["sparse"])
    problem.ring(context_of(4, "contiguous"), deterministic=True)
    assert len(batches) == 4 * 3
    assert sorted(launches) == ["backward_dkdv"] * 4 + ["backward_dq"] * 4 + ["forward"] * 4
    assert [len({x.memory.numel() for x in of}) for of in memory.values()] == [1, 1]
    # The mirror of a receiver has the same offset as the buffer in the sender's memory.
    for batch, owners in ((batches[:4], memory[0][:4]), (batches[8:], memory[1])):
        offsets = [
            {(r, m.peer) if m.sends else (m.peer, r): _offset(m.span if m.sends else m.mirror, owners[r].memory)}
            for r, messages in enumerate(batch)
            for m in messages
        ]
        told: dict[tuple[int, int], set[int]] = {}
        for ends in offsets:
            for route, offset in ends.items():
                told.setdefault(route, set()).add(offset)
        assert told
        assert all(len(each) == 1 for each in told.values())


@pytest.mark.parametrize("hops", ["ring", "grouped"])
def test_kept_memory_serves_calls_of_other_shapes(hops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks calls on memory that a transport keeps, as the symmetric one does: views of a call fit no other shape."""
    kept: dict[tuple[Any, ...], Slot] = {}
    allocate = LocalTransport.allocate

    def allocated(self: LocalTransport, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Slot:
        return kept.setdefault((self._rank, slot, numel, dtype), allocate(self, slot, numel, like, dtype))

    shapes: list[dict[str, Any]] = [{"heads": (4, 2), "headdim": 16}, {"heads": (2, 1), "headdim": 32}]
    problems = [Problem.random(seqlen=SEQLEN, mask=MASKS["sparse"], **shape) for shape in shapes * 2]
    expected = [problem.ring(rf.ContextParallel.local(4, hops=hops)) for problem in problems]
    monkeypatch.setattr(LocalTransport, "allocate", allocated)
    for problem, results in zip(problems, expected, strict=True):
        assert all(map(torch.equal, problem.ring(rf.ContextParallel.local(4, hops=hops)), results))
    assert any(len(slot.views) > 1 for slot in kept.values())


def _offset(span: Span | None, memory: Tensor) -> int:
    assert span is not None
    return (span.address - memory.data_ptr()) // memory.itemsize


def plans_of(world: int, layout: str, mask: Mask, seqlen: int = SEQLEN) -> list[Plan]:
    context = context_of(world, layout)
    return [context.plan(mask, seqlen, rank) for rank in range(world)]


@settings(deadline=None)
@given(layout=st.sampled_from(LAYOUTS), mask=masks(SEQLEN), world=st.integers(1, 7))
def test_only_those_who_see_keys_receive_them(layout: str, mask: Mask, world: int) -> None:
    plans = plans_of(world, layout, mask)
    pairs, chunks = plans[0].pairs, plans[0].layout.chunks
    assert len({plan.grouped for plan in plans}) == 1
    if not plans[0].grouped:
        assert not any(pairs[q][k] for q in range(world) for k in range(world) if q != k)
        return
    sent, received = zip(*map(exchange_of, plans), strict=True)
    own = plans[0].layout.lengths
    rows_received = [sum(len(part.rows) for part in of) for of in received]
    assert {plan.slot_rows for plan in plans} == {max(map(sum, zip(own, rows_received, strict=True)))}
    most = max(rows_received)
    assert receives_at_most(plans[0].layout, mask, most)
    assert not receives_at_most(plans[0].layout, mask, most - 1)
    seen = mask.dense(torch.arange(SEQLEN), torch.arange(SEQLEN)).expand(mask.batch, SEQLEN, SEQLEN).any(0)
    for rank, plan in enumerate(plans):
        (hop,) = plan.hops
        assert hop.pairs == sum(pairs[rank])
        assert [part.peer for part in received[rank]] == [k for k in range(world) if k != rank and pairs[rank][k]]
        assert [part.peer for part in sent[rank]] == [q for q in range(world) if q != rank and pairs[q][rank]]
        assert plan.rows_sent == sum(len(part.rows) for part in sent[rank])
        assert plan.gradient_rows_sent == rows_received[rank]
        for part in sent[rank]:
            there = next(each for each in received[part.peer] if each.peer == rank)
            assert (there.mirror, len(there.rows)) == ((0, part.rows.start), len(part.rows))
            assert 0 <= part.rows.start < part.rows.stop <= own[rank]
        held = rows_of(hop.held)
        assert len(held) == len(set(held)) == rows_received[rank] + (own[rank] if pairs[rank][rank] else 0)
        assert rows_of(hop.chunks) == sorted(held)
        assert all(a.stop < b.start for a, b in zip(hop.chunks, hop.chunks[1:], strict=False))
        wanted = seen[rows_of(chunks[rank])].any(0).nonzero()[:, 0].tolist()
        assert set(wanted) <= set(held)
        assert plan.rows_passed_on == 0
    assert sum(plan.rows_sent for plan in plans) <= sum(
        rf.ContextParallel.local(world, layout).plan(mask, SEQLEN, rank).rows_sent for rank in range(world)
    )


def exchange_of(plan: Plan) -> tuple[list[Transfer], list[Transfer]]:
    """Returns what a rank sends and receives of KV."""
    (batch,) = plan.steps[0].kv
    sent, received = ([each for each in batch.transfers if each.sends == sends] for sends in (True, False))
    return sent, received


def rows_of(chunks: Sequence[Chunk]) -> list[int]:
    return [row for chunk in chunks for row in range(chunk.start, chunk.stop)]


def test_a_window_moves_the_keys_that_it_shows() -> None:
    """Checks 4096 tokens on four ranks: a rank gets the 64 keys before its chunk, or before each chunk of a zigzag."""
    mask = rf.Causal() & rf.SlidingWindow(64)
    contiguous, zigzag = (plans_of(4, layout, mask, 4096) for layout in ("contiguous", "zigzag"))
    assert [plan.rows_sent for plan in contiguous] == [64, 64, 64, 0]
    assert [plan.rows_sent for plan in zigzag] == [128 - 64, 128, 128, 128 - 64]
    assert "KV of ranks 0, 1 [960, 2048): compute" in str(contiguous[1])
    padded = mask & rf.KeyPadding([4096, 100])  # one sequence ends within the first rank's rows
    for layout, plans in (("contiguous", contiguous), ("zigzag", zigzag)):
        sent = [plan.rows_sent for plan in plans_of(4, layout, padded, 4096)]
        assert sent == [plan.rows_sent for plan in plans]


def test_a_plan_prints_who_sends_what_to_whom() -> None:
    plan = plans_of(3, "contiguous", rf.Causal(), seqlen=12)[1]
    assert str(plan).splitlines() == [
        "rank 1 of 3, contiguous, Causal(), 12 tokens",
        "  26 visible pairs, 33.3% of all; the busiest rank has 1.62 of the mean; sends 4 rows, and 4 of gradients",
        "  hop 0: KV of ranks 0, 1 [0, 8): compute 26 pairs  send 4 -> 2  receive 4 <- 0",
    ]
    row = 2 * 8 * 128
    assert plan.bytes_sent(1, 8, 128, itemsize=2) == 4 * row * 2
    assert plan.bytes_sent_backward(1, 8, 128, itemsize=2) == 4 * row * 2 + 4 * row * 4
    assert plan.critical_path == plan.balance
    assert plan.meetings(plan.hops[0]) == ((plan.q_chunks[0], plan.hops[0].chunks[0]),)
    plans = plans_of(2, "contiguous", rf.KeyPadding([2, 2]), seqlen=8)
    assert "KV of rank 0 [0, 2): compute 16 pairs  receive 2 <- 0" in str(plans[1])
    plans = plans_of(2, "contiguous", rf.BlockSparse([[False, False], [True, False]], 4), seqlen=8)
    assert "KV of nobody: idle  send 4 -> 1" in str(plans[0])


def test_auto_goes_by_the_bytes_that_a_rank_receives() -> None:
    one, two = (rf.ContextParallel.local(world, heads=heads) for world, heads in ((4, 1), (8, 2)))
    row, window = 8 * (128 + 128) * 2, rf.Causal() & rf.SlidingWindow(4096)
    for context, row_bytes in ((one, row), (two, row // 2)):
        longest = 2**25 // row_bytes  # a rank receives the KV of the three other ranks
        assert context.plan(rf.Causal(), longest, row_bytes=row_bytes).grouped
        assert not context.plan(rf.Causal(), longest + 8, row_bytes=row_bytes).grouped
        assert context.plan(window, 2**20, row_bytes=row_bytes).grouped
        assert not context.plan(rf.Causal(), 64).grouped  # on a CPU
    assert not rf.ContextParallel.local(4, hops="ring").plan(rf.Causal(), 64, row_bytes=row).grouped
    assert not rf.ContextParallel.local(4, inner_ring=2).plan(rf.Causal(), 64, row_bytes=row).grouped
    with pytest.raises(ArgumentError, match="row_bytes: expected a whole number, at least 1, got 0"):
        one.plan(rf.Causal(), 64, row_bytes=0)


@pytest.mark.parametrize(("heads", "ranks", "most"), [((8, 2), 1, 2), ((8, 2), 2, 1), ((8, 2), 4, 1), ((12, 3), 4, 2)])
def test_auto_goes_by_the_kv_heads_that_a_rank_has(heads: tuple[int, int], ranks: int, most: int) -> None:
    q, k, v = (
        torch.zeros(3, 1, n, d, dtype=torch.bfloat16) for n, d in ((heads[0], 16), (heads[1], 16), (heads[1], 24))
    )
    assert _row_bytes(q, k, v, ranks) == 3 * most * (16 + 24) * 2


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="hops: expected one of .*'grouped', 'auto'.*, got 'all'"):
        rf.ContextParallel.local(2, hops="all")
    with pytest.raises(ArgumentError, match="hops: expected no inner_ring with grouped hops, got 2"):
        rf.ContextParallel.local(4, inner_ring=2, hops="grouped")


class _KeptMemory:
    """Memory of the virtual ranks that lasts from pass to pass with the views of it, as the symmetric transport's."""

    def __init__(self) -> None:
        self._regions: dict[Any, tuple[Tensor, dict[Any, Slot]]] = {}

    def allocate(
        self, transport: LocalTransport, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype
    ) -> Slot:
        new = torch.empty(2**16, dtype=torch.uint8), dict[Any, Slot]()
        memory, slots = self._regions.setdefault((transport._rank, slot), new)
        made = Slot(memory[: numel * dtype.itemsize].view(dtype), {})
        return slots.setdefault((numel, dtype), made)


def test_memory_that_is_kept_serves_a_ring_and_then_grouped_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses slots of one size in both: the longest shard has 34 rows, and a grouped buffer 33 and one of a neighbour."""
    kept = _KeptMemory()
    monkeypatch.setattr(LocalTransport, "allocate", lambda *args: kept.allocate(*args))
    for hops, mask in (("ring", rf.Causal()), ("grouped", rf.Causal() & rf.SlidingWindow(1)), ("ring", rf.Causal())):
        problem = Problem.random(seqlen=100, dtype=torch.float64, headdim=(16, 24), mask=mask)
        context = rf.ContextParallel.local(3, "contiguous", hops=hops)
        assert_accurate(problem.ring(context), problem)


def _on_processes() -> tuple[list[Tensor], str, list[Outcome]]:
    """Returns shards of results, the error of ranks that disagree on hops, and outcomes of a failure in an exchange."""
    results: list[Tensor] = []
    for layout in LAYOUTS:
        context = rf.ContextParallel(dist.group.WORLD, layout, hops="grouped", debug=layout == "zigzag")
        for mask in map(MASKS.get, ON_PROCESSES):
            problem = Problem.random(seqlen=SEQLEN, headdim=16, mask=mask)
            q, k, v = (
                context.shard(x, mask=mask or Full()).requires_grad_() for x in (problem.q, problem.k, problem.v)
            )
            out = as_tensor(rf.ring_attention(q, k, v, context, mask=mask))
            dout = context.shard(problem.dout, mask=mask or Full())
            results += [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    context = rf.ContextParallel(dist.group.WORLD, hops="grouped" if dist.get_rank() == 1 else "ring")
    with pytest.raises(RankMismatch) as caught:
        call_ring(context)
    outcomes = []
    for step in (0, 1):  # in the forward, in the backward
        context = rf.ContextParallel(dist.group.WORLD, timeout=20.0, hops="grouped")
        with planted(step, raise_out_of_memory):
            outcomes.append(outcome_of(call_ring, context))
        call_ring(rf.ContextParallel(dist.group.WORLD, timeout=20.0, hops="grouped"))
    return results, str(caught.value), outcomes


def test_on_processes() -> None:
    """Checks for the same bits as on virtual ranks, and for named errors."""
    by_rank = run_ranks(3, _on_processes)
    shards = [iter(results) for results, _, _ in by_rank]
    for layout in LAYOUTS:
        context = context_of(3, layout)
        for mask in map(MASKS.get, ON_PROCESSES):
            problem = Problem.random(seqlen=SEQLEN, headdim=16, mask=mask)
            for whole in problem.ring(context):
                parts = torch.cat([next(of_rank) for of_rank in shards], dim=1)
                assert torch.equal(context.unshard(parts, mask=mask or Full()), whole)
    for _, text, _ in by_rank:
        assert "ranks disagree on layout: rank 1 against the rest" in text
        assert "zigzag hops grouped" in text
    for case in zip(*(outcomes for _, _, outcomes in by_rank), strict=True):
        assert [outcome.kind for outcome in case] == ["PeerFailed", "OutOfMemoryError", "PeerFailed"]
        assert all(outcome.fields["ranks"] == [1] for outcome in (case[0], case[2]))
        assert all(outcome.seconds < 2 for outcome in case)
