"""The state is a commutative monoid, exactly or to the last bits."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash import reference
from ringflash.state import LOG2E

BATCH, SEQLEN, HEADS, HEADDIM = 2, 5, 3, 16


def state_over(q: Tensor, k: Tensor, v: Tensor) -> rf.AttentionState:
    """Returns the state over the keys `k`, computed by its definition."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (LOG2E / math.sqrt(q.shape[-1]))
    m = s.amax(-1)
    p = torch.exp2(s - m[..., None])
    return rf.AttentionState(m, p.sum(-1), torch.einsum("bhqk,bkhd->bqhd", p, v))


def random_states(count: int, dtype: torch.dtype = torch.float32) -> tuple[list[rf.AttentionState], Tensor]:
    q = torch.randn(BATCH, SEQLEN, HEADS, HEADDIM, dtype=dtype)
    k, v = torch.randn(2, BATCH, 7 * count, HEADS, HEADDIM, dtype=dtype).unbind(0)
    pairs = zip(k.chunk(count, 1), v.chunk(count, 1), strict=True)
    return [state_over(q, *pair) for pair in pairs], reference.attention(q, k, v)[0]


def identity() -> rf.AttentionState:
    return rf.AttentionState.empty(BATCH, SEQLEN, HEADS, HEADDIM)


def parts(state: rf.AttentionState) -> tuple[Tensor, Tensor, Tensor]:
    return state.m, state.l, state.o


def test_identity_is_exact() -> None:
    (state,), _ = random_states(1)
    for merged in (state.merge(identity()), identity().merge(state)):
        assert all(torch.equal(a, b) for a, b in zip(parts(merged), parts(state), strict=True))


def test_identity_meets_identity_without_nan() -> None:
    merged = identity().merge(identity())
    assert all(torch.equal(a, b) for a, b in zip(parts(merged), parts(identity()), strict=True))
    out, lse = merged.finalize()
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -math.inf).all()


def test_commutativity_is_exact() -> None:
    (a, b), _ = random_states(2)
    assert all(torch.equal(x, y) for x, y in zip(parts(a.merge(b)), parts(b.merge(a)), strict=True))


def test_associativity_within_4_ulp() -> None:
    (a, b, c), _ = random_states(3)
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert torch.equal(left.m, right.m)
    ulp = torch.finfo(torch.float32).eps
    assert ((left.l - right.l).abs() <= 4 * ulp * right.l).all()
    size = right.o.abs().amax(-1, keepdim=True)  # largest of a row, because single entries may cancel to almost 0
    assert ((left.o - right.o).abs() <= 4 * ulp * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_arrival_order_gives_attention(dtype: torch.dtype) -> None:
    states, expected = random_states(4, dtype)
    for order in permutations(states):
        merged = rf.AttentionState.empty(BATCH, SEQLEN, HEADS, HEADDIM, dtype=dtype)
        for state in order:
            merged = merged.merge(state)
        out, _ = merged.finalize()
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-14)


def test_large_scores_do_not_overflow() -> None:
    (a, b), _ = random_states(2)
    shifted = rf.AttentionState(a.m + 1e4, a.l, a.o).merge(rf.AttentionState(b.m - 1e4, b.l, b.o))
    out, lse = shifted.finalize()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def test_lse_is_the_natural_logarithm() -> None:
    q = torch.randn(BATCH, SEQLEN, HEADS, HEADDIM, dtype=torch.float64)
    state = state_over(q, q, q)
    torch.testing.assert_close(state.finalize()[1], reference.attention(q, q, q)[1])


def test_finalize_rounds_once() -> None:
    (state,), _ = random_states(1)
    assert torch.equal(state.finalize(torch.bfloat16)[0], state.finalize()[0].bfloat16())


def test_finalize_keeps_a_nan() -> None:
    (state,), _ = random_states(1)
    state.l[0, 0, 0] = torch.nan
    out, lse = state.finalize()
    assert torch.isnan(lse[0, 0, 0])
    assert torch.isnan(out[0, 0, 0]).all()
    assert torch.isnan(lse).sum() == 1
