"""Softcap, which bounds scores by softcap * tanh(scores / softcap): forward and backward, in both backends."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringflash as rf
from ringflash import reference
from ringflash.errors import ArgumentError
from tests.helpers.accuracy import Problem, assert_accurate
from tests.kernels.triton.test_backend import DEVICE, DTYPES, ROUNDING

MASKS = [None, rf.Causal() & rf.SlidingWindow(60)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_eager(dtype: torch.dtype, softcap: float, mask: rf.Causal | None) -> None:
    problem = Problem.random(seqlen=203, dtype=dtype, softcap=softcap, mask=mask)
    assert_accurate(problem.flash(), problem)


@pytest.mark.parametrize("softcap", [3.0, 50.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton(dtype: torch.dtype, softcap: float) -> None:
    problem = Problem.random(seqlen=203, heads=(2, 1), dtype=dtype, softcap=softcap, mask=rf.Causal(), device=DEVICE)
    assert_accurate(problem.flash(backend="triton"), problem, rounding=ROUNDING)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_rings(backend: str) -> None:
    problem = Problem.random(seqlen=150, heads=(2, 1), softcap=2.0, mask=rf.Causal(), device=DEVICE)
    assert_accurate(problem.ring(rf.ContextParallel.local(3), backend=backend), problem, rounding=ROUNDING)


def test_gradcheck() -> None:
    q, k, v = (torch.randn(1, 5, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda q, k, v: rf.flash_attention(q, k, v, softcap=0.7), (q, k, v))


def test_a_large_softcap_is_none() -> None:
    problem = Problem.random(seqlen=12, heads=(2, 2), dtype=torch.float64)
    out, _ = reference.attention(problem.q, problem.k, problem.v, softcap=1e6)
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v).transpose(1, 2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("softcap", [-1.0, math.inf, math.nan])
def test_bad_softcap(softcap: float) -> None:
    q = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ArgumentError, match="softcap: expected 0 or positive, and finite"):
        rf.flash_attention(q, q, q, softcap=softcap)
