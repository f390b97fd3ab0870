"""ring_attention on virtual ranks gives the single-device result for every layout, mask and world size."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError, RankMismatch
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Mask
from ringflash.ring import buffers
from ringflash.transport.base import Slot
from tests.helpers.accuracy import NAMES, Problem, as_tensor, assert_accurate, rms_of
from tests.helpers.distributed import run_ranks
from tests.helpers.pairs import all_pairs
from tests.helpers.strategies import block_sparse

MASKS = [None, rf.Causal()]
SEQLEN = 61
ALL_MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": rf.Causal(),
    "window": rf.Causal() & rf.SlidingWindow(9),
    "documents": rf.Documents([0, 5, 5, 20, 44, 61]),
    "causal documents": rf.Causal() & rf.Documents([0, 5, 5, 20, 44, 61]),
    "prefix": rf.PrefixLM([30, 3]),
    "padding": rf.Causal() & rf.KeyPadding([61, 17]),
    "sparse": block_sparse(SEQLEN, 8, seed=0, density=0.3),
    "tree": rf.Causal() & rf.Tree([-1, 0, 1, 1, 2, 2, 3, 3, 4], start=52),
}
ZIGZAG = LAYOUTS.index("zigzag")
# Cases that tests/planted_bugs.py names, as indices: float16 on two ranks, and two masks on two ranks.
PLANTED = [(3, 1, ZIGZAG, 0)]
PLANTED_MASKS = [(mask, ZIGZAG, 1) for mask in (0, 2)]


@pytest.mark.parametrize(
    ("dtype", "world", "layout", "mask"),
    all_pairs(["float64", "float32", "bfloat16", "float16"], [1, 2, 3, 4], LAYOUTS, ["full", "causal"], first=PLANTED),
)
def test_accuracy(dtype: str, world: int, layout: str, mask: str) -> None:
    problem = Problem.random(seqlen=203, dtype=getattr(torch, dtype), mask=ALL_MASKS[mask])
    assert_accurate(problem.ring(rf.ContextParallel.local(world, layout)), problem)


@settings(deadline=None, max_examples=40)
@given(world=st.integers(1, 6), extra=st.integers(0, 40), layout=st.sampled_from(LAYOUTS), mask=st.sampled_from(MASKS))
def test_any_length(world: int, extra: int, layout: str, mask: rf.Causal | None) -> None:
    problem = Problem.random(seqlen=world + extra, dtype=torch.float64, batch=1, headdim=16, mask=mask)
    assert_accurate(problem.ring(rf.ContextParallel.local(world, layout)), problem)


@pytest.mark.parametrize("mask", MASKS)
def test_a_world_of_one_is_the_single_device_bitwise(mask: rf.Causal | None) -> None:
    problem = Problem.random(seqlen=150, mask=mask)
    for a, b in zip(problem.ring(rf.ContextParallel.local(1)), problem.flash(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 5])
def test_accuracy_of_the_deterministic_backward(world: int, dtype: torch.dtype) -> None:
    problem = Problem.random(seqlen=203, dtype=dtype, mask=rf.Causal())
    assert_accurate(problem.ring(rf.ContextParallel.local(world), deterministic=True), problem)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_does_not_grow_with_the_world(dtype: torch.dtype, deterministic: bool) -> None:
    problem = Problem.random(seqlen=512, dtype=dtype, mask=rf.Causal())
    errors = {}
    for world in (1, 2, 4, 16):
        got = problem.ring(rf.ContextParallel.local(world), deterministic=deterministic)
        errors[world] = [rms_of(g.double() - e) for g, e in zip(got, problem.exact, strict=True)]
    for world, error in errors.items():
        for name, got, alone in zip(NAMES, error, errors[1], strict=False):
            assert got <= 1.03 * alone, f"{name} at world {world}: {got:.3g} against {alone:.3g}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeats_are_bitwise_equal(layout: str) -> None:
    problem = Problem.random(seqlen=101, mask=rf.Causal())
    context = rf.ContextParallel.local(3, layout)
    first = problem.ring(context)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(problem.ring(context), first, strict=True))


@pytest.mark.parametrize(
    ("mask", "layout", "world"),
    all_pairs([*ALL_MASKS], LAYOUTS, [1, 2, 3, 4, 5], first=PLANTED_MASKS),
)
def test_every_mask_in_every_layout(mask: str, layout: str, world: int) -> None:
    problem = Problem.random(seqlen=SEQLEN, dtype=torch.float64, headdim=16, mask=ALL_MASKS[mask])
    assert_accurate(problem.ring(rf.ContextParallel.local(world, layout)), problem)


def _on_processes() -> list[list[Tensor]]:
    """Returns out, dq, dk and dv of every layout and mask; all ranks have equal leaves, so gradients are averaged."""
    results = []
    for layout in LAYOUTS:
        context = rf.ContextParallel(dist.group.WORLD, layout)
        for mask in ALL_MASKS.values():
            problem = Problem.random(seqlen=SEQLEN, dtype=torch.float64, headdim=16, mask=mask)
            out, *grads = problem.ring(context)
            for grad in grads:
                dist.all_reduce(grad)
            results.append([out, *(grad / context.world_size for grad in grads)])
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_every_mask_in_every_layout_on_processes(world: int) -> None:
    problems = [Problem.random(seqlen=SEQLEN, dtype=torch.float64, headdim=16, mask=m) for m in ALL_MASKS.values()]
    for results in run_ranks(world, _on_processes):
        for got, problem in zip(results, problems * len(LAYOUTS), strict=True):
            assert_accurate(got, problem)


def _balanced_misuse() -> list[str]:
    """Returns the errors of unsharding with masks that differ by rank, without a mask, and with one that cannot fit."""
    context = rf.ContextParallel(dist.group.WORLD, "balanced")
    shard = context.shard(torch.zeros(1, 20), mask=rf.Causal())
    with pytest.raises(RankMismatch) as differ:
        context.unshard(shard, mask=rf.SlidingWindow(3 + context.rank))
    with pytest.raises(ArgumentError) as missing:
        context.unshard(shard)
    with pytest.raises(ArgumentError) as another:
        context.unshard(shard, mask=rf.Documents([0, 19]))
    return [str(caught.value) for caught in (differ, missing, another)]


def test_balanced_misuse() -> None:
    for differ, missing, another in run_ranks(2, _balanced_misuse):
        assert differ.startswith("ranks disagree on mask")
        assert missing.startswith('mask: expected the mask that layout "balanced" follows')
        assert another.startswith("cu_seqlens: expected lengths that sum to the sequence's 20 keys")


def test_gradcheck() -> None:
    context = rf.ContextParallel.local(3)
    q = torch.randn(1, 7, 2, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 7, 1, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = rf.AttentionOptions(return_lse=True)
    call = lambda q, k, v: rf.ring_attention(q, k, v, context, mask=rf.Causal(), options=options)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uninitialised_buffers_do_not_leak(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.random(seqlen=41, mask=rf.Causal())
    context = rf.ContextParallel.local(4, layout)
    expected = problem.ring(context)

    original = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **kw: original(x, *a, **kw).fill_(math.nan))
    assert all(torch.equal(a, b) for a, b in zip(problem.ring(context), expected, strict=True))


def test_a_rank_holds_two_buffers_whatever_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a rank's buffers do not grow with the world size."""
    allocated: list[int] = []
    original = buffers.RingBuffers._allocate

    def counting(self: buffers.RingBuffers, slot: int, rows: int) -> Slot:
        allocated.append(rows)
        return original(self, slot, rows)

    monkeypatch.setattr(buffers.RingBuffers, "_allocate", counting)
    problem = Problem.random(seqlen=64, mask=rf.Causal())
    problem.ring(rf.ContextParallel.local(8))
    per_rank = 2 + 2 + 2 + 1  # KV forward, KV backward, travelling gradients, own gradient on return
    assert allocated == [8] * len(allocated)
    assert len(allocated) == 8 * per_rank


def test_extreme_scores() -> None:
    problem = Problem.random(seqlen=50, dtype=torch.float64, mask=rf.Causal())
    large = Problem(problem.q * 1e4, problem.k, problem.v, problem.dout, problem.mask)
    for a, b in zip(large.ring(rf.ContextParallel.local(4)), large.exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_what_is_no_context() -> None:
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ArgumentError, match="context: expected a rf.ContextParallel, got 'zigzag'"):
        rf.ring_attention(q, q, q, "zigzag")  # type: ignore[arg-type]


def test_queries_and_keys_of_different_lengths() -> None:
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 6, 1, 16)
    with pytest.raises(ArgumentError, match="k: expected as many local keys as queries, got 4 and 6"):
        rf.ring_attention(q, k, k, rf.ContextParallel.local(2))


def test_heads_in_the_place_of_rows() -> None:
    context = rf.ContextParallel.local(2)
    x = context.shard(torch.randn(1, 24, 2, 16))
    rf.ring_attention(x, x, x, context)
    with pytest.raises(ArgumentError, match=r"q, k, v: .*got \(1, 2, 24, 16\), with the 24 rows of the .*transpose"):
        rf.ring_attention(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), context)


def test_fewer_rows_than_heads_may_be_right(caplog: pytest.LogCaptureFixture) -> None:
    context = rf.ContextParallel.local(2)
    context.shard(torch.randn(1, 8, 5))
    q, few = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 2, 16)
    rf.ring_attention(q, few, few, context)  # tensors with heads first would have equal third dimensions
    assert caplog.records == []
    for mask in (None, rf.Causal()):
        exact = rf.flash_attention(q, q, q, mask=mask)
        pooled = context.shard(q, mask=mask)
        context.shard(torch.randn(1, 8, 5))
        torch.testing.assert_close(
            context.unshard(rf.ring_attention(pooled, pooled, pooled, context, mask=mask)), exact
        )
    (record,) = caplog.records
    assert "(1, 4, 8, 16), with the 8 rows of the shard in the place of heads" in record.getMessage()
    assert "fewer rows than heads" in record.getMessage()


def _between_nans(x: Tensor) -> Tensor:
    storage = torch.full((*x.shape, 2), math.nan, dtype=x.dtype)
    storage[..., 1] = x
    return storage[..., 1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_strides_do_not_matter(deterministic: bool) -> None:
    context, options = rf.ContextParallel.local(2), rf.AttentionOptions(deterministic=deterministic)
    problem = Problem.random(seqlen=20, mask=rf.Causal()).mapped(context.shard)
    transposed = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    ring = lambda q, k, v: as_tensor(rf.ring_attention(q, k, v, context, mask=problem.mask, options=options))  # noqa: E731
    expected = problem.run(ring)
    for change in (_between_nans, transposed):
        assert all(map(torch.equal, problem.mapped(change).run(ring), expected))


def test_expanded_keys_and_values() -> None:
    context = rf.ContextParallel.local(3)
    problem = Problem.random(seqlen=21, heads=(4, 1), mask=rf.Causal()).mapped(context.shard)
    k, v = (x.expand(-1, -1, 4, -1) for x in (problem.k, problem.v))
    outs = [rf.ring_attention(problem.q, *kv, context, mask=rf.Causal()) for kv in ((k, v), (k.clone(), v.clone()))]
    assert torch.equal(as_tensor(outs[0]), as_tensor(outs[1]))


def test_an_input_changed_after_the_forward_is_noticed() -> None:
    q, k = torch.randn(1, 8, 1, 16, requires_grad=True), torch.randn(1, 8, 1, 16)
    out = as_tensor(rf.ring_attention(q, k, k.clone(), rf.ContextParallel.local(2)))
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_dead_context_in_the_backward_is_none() -> None:
    """Checks that the context may go out of scope between forward and backward."""
    q = torch.randn(1, 8, 1, 16, requires_grad=True)
    out = as_tensor(rf.ring_attention(q, q, q, rf.ContextParallel.local(2), mask=rf.Causal()))
    out.sum().backward()
    assert q.grad is not None
