"""Heads split over ranks, with and without a ring: the single-device result for every mask, mode and ratio of heads."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.dropout import kept
from ringflash.errors import ArgumentError
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Mask
from ringflash.ring.ulysses import HeadSplit
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate, rms_of
from tests.helpers.strategies import masks, modes

GRIDS = [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (1, 4), (2, 4)]  # ring x heads
HEADS = [(12, 12), (12, 6), (12, 4), (12, 3), (12, 2), (12, 1)]

grids = st.sampled_from(GRIDS)


def context_of(grid: tuple[int, int], layout: str = "zigzag") -> rf.ContextParallel:
    return rf.ContextParallel.local(grid[0] * grid[1], layout, heads=grid[1])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("grid", GRIDS)
def test_any_ratio_of_heads(grid: tuple[int, int], heads: tuple[int, int]) -> None:
    given = Problem.random(seqlen=61, heads=heads, headdim=(16, 24), dtype=torch.float64, mask=rf.Causal(), batch=1)
    assert_accurate(given.ring(context_of(grid)), given)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(), grid=grids, heads=st.sampled_from(HEADS), layout=st.sampled_from(LAYOUTS), extra=st.integers(0, 60)
)
def test_any_mask_and_mode(data: Any, grid: tuple[int, int], heads: tuple[int, int], layout: str, extra: int) -> None:
    context = context_of(grid, layout)
    seqlen = context.world_size + extra
    mask, mode = data.draw(masks(seqlen)), data.draw(modes())
    given = Problem.random(seqlen=seqlen, heads=heads, dtype=torch.float64, mask=mask, **mode)
    assert_accurate(given.ring(context, deterministic=data.draw(st.booleans())), given)


@pytest.mark.parametrize("heads", [(8, 4), (8, 1)])
@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accuracy(dtype: torch.dtype, grid: tuple[int, int], heads: tuple[int, int]) -> None:
    given = Problem.random(seqlen=203, heads=heads, dtype=dtype, mask=rf.Causal())
    assert_accurate(given.ring(context_of(grid)), given)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("grid", [(1, 4), (2, 4)])
def test_gradients_of_a_shared_head_are_rounded_once(grid: tuple[int, int], deterministic: bool) -> None:
    """Checks that four ranks' shares of a head's gradient are summed before rounding: bfloat16 sums would err more."""
    given = Problem.random(seqlen=160, heads=(16, 2), dtype=torch.bfloat16)
    alone = given.flash(deterministic=deterministic)
    split = given.ring(context_of(grid), deterministic=deterministic)
    for a, b, exact in zip(alone, split, given.exact, strict=True):
        assert rms_of(b.double() - exact) <= 1.01 * rms_of(a.double() - exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", GRIDS)
def test_what_is_dropped_goes_by_the_head_among_all(grid: tuple[int, int], layout: str) -> None:
    context = context_of(grid, layout)
    q, k = torch.randn(2, 53, 12, 16, dtype=torch.float64), torch.randn(2, 53, 2, 16, dtype=torch.float64)
    v = torch.eye(53, dtype=torch.float64)[None, :, None].expand(2, -1, 2, -1)
    mask = rf.Causal()
    q, k, v = (context.shard(x, mask=mask) for x in (q, k, v))
    out = as_tensor(rf.ring_attention(q, k, v, context, mask=mask, dropout=rf.Dropout(0.35, seed=99)))
    out = context.unshard(out, mask=mask)
    stays = kept(0.35, 99, 2, 12, torch.arange(53), torch.arange(53))
    assert torch.equal(out.transpose(1, 2) > 0, stays & torch.ones(53, 53, dtype=torch.bool).tril())


@pytest.mark.parametrize("grid", [(1, 2), (1, 4)])
def test_without_a_ring_a_rank_computes_its_heads_as_one_device_would(grid: tuple[int, int]) -> None:
    given = Problem.random(seqlen=150, heads=(8, 4), mask=rf.Causal(), alibi=1, sinks=True)
    out, *grads = given.ring(context_of(grid))
    expected, *expected_grads = given.flash()
    assert torch.equal(out, expected)
    for a, b in zip(grads[:3], expected_grads[:3], strict=True):
        assert torch.equal(a, b)


def test_one_rank_a_group_is_the_ring_bitwise() -> None:
    given = Problem.random(seqlen=90, mask=rf.Causal())
    for a, b in zip(given.ring(context_of((3, 1))), given.ring(rf.ContextParallel.local(3)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lse_comes_back_in_the_callers_rows(layout: str) -> None:
    context = context_of((2, 2), layout)
    given = Problem.random(seqlen=37, heads=(4, 1), dtype=torch.float64, mask=rf.Causal(), sinks=True)
    given.q.requires_grad_()
    results = []
    for split in (False, True):
        options = rf.AttentionOptions(return_lse=True, sinks=given.sinks)
        q, k, v = (context.shard(x, mask=given.mask) if split else x for x in (given.q, given.k, given.v))
        if split:
            out, lse = rf.ring_attention(q, k, v, context, mask=given.mask, options=options)
            out, lse = context.unshard(out, mask=given.mask), context.unshard(lse, 2, mask=given.mask)
        else:
            out, lse = rf.flash_attention(q, k, v, mask=given.mask, options=options)
        loss = (out * given.dout).sum() + (lse * lse.detach().sin()).sum()
        results.append([out, lse, *torch.autograd.grad(loss, given.q)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    context = context_of((2, 2))
    q = torch.randn(1, 9, 4, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 9, 1, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = rf.AttentionOptions(return_lse=True)
    call = lambda q, k, v: rf.ring_attention(q, k, v, context, mask=rf.Causal(), options=options)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("mask", [rf.Causal(), rf.Documents([0, 9, 30, 70])])
def test_repeats_are_bitwise_equal(mask: Mask) -> None:
    given = Problem.random(seqlen=70, heads=(6, 2), mask=mask)
    context = context_of((2, 3))
    first = given.ring(context, deterministic=True)
    for _ in range(5):
        assert all(map(torch.equal, given.ring(context, deterministic=True), first))


def test_uninitialised_buffers_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Problem.random(seqlen=41, heads=(4, 2), mask=rf.Causal())
    context = context_of((2, 4))
    expected = given.ring(context)
    original = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *a, **kw: original(x, *a, **kw).fill_(math.nan))
    assert all(map(torch.equal, given.ring(context), expected))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    context = context_of((2, 2))

    def attention(q: Tensor) -> Tensor:
        q = context.shard(q)
        return context.unshard(as_tensor(rf.ring_attention(q, q, q, context, mask=rf.Causal())))

    torch._dynamo.reset()
    q = torch.randn(1, 24, 2, 16, requires_grad=True)
    grads = []
    for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        grads += torch.autograd.grad(call(q).square().sum(), q)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-6)


def test_operator() -> None:
    q, k, v = (torch.randn(1, 6, n, width, requires_grad=True) for n, width in ((4, 24), (1, 24), (1, 16)))
    name = context_of((2, 2)).name
    values = (None, None, None, name, "causal", [], 0.25, 0.0, 0.0, "auto", True)
    torch.library.opcheck(torch.ops.ringflash.attention_with_gradients.default, (q, k, v, *values))


@pytest.mark.parametrize("nheads", [2, 3, 6])
def test_heads_that_cannot_be_split(nheads: int) -> None:
    q = torch.zeros(1, 8, nheads, 16)
    with pytest.raises(ArgumentError, match=f"nheads: expected a multiple of the 4 ranks .* got {nheads}. Split them"):
        rf.ring_attention(q, q[:, :, :1], q[:, :, :1], context_of((2, 4)))


@given(ranks=st.integers(1, 8), multiple=st.integers(1, 6), data=st.data())
def test_every_query_head_meets_its_own_keys(ranks: int, multiple: int, data: Any) -> None:
    nheads = ranks * multiple
    nheads_kv = data.draw(st.sampled_from([n for n in range(1, nheads + 1) if nheads % n == 0]))
    split = HeadSplit(nheads, nheads_kv, ranks)
    assert [head for rank in range(ranks) for head in split.queries(rank)] == list(range(nheads))
    for rank in range(ranks):
        needed = [head * nheads_kv // nheads for head in split.queries(rank)]
        stored = [head for head, count in zip(split.keys(rank), split.copies(rank), strict=True) for _ in range(count)]
        group = multiple // len(stored)
        assert [stored[i // group] for i in range(multiple)] == needed
        assert set(split.keys(rank)) == set(needed)
    if nheads_kv % ranks == 0:
        assert not split.shares_keys
    elif ranks % nheads_kv == 0:
        assert all(split.copies(rank) == [1] for rank in range(ranks))
