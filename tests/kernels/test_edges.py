"""Regression tests of cases at the edges of the kernels."""

import math
from dataclasses import replace

import pytest
import torch

import ringflash as rf
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.helpers.strategies import block_sparse
from tests.kernels.backends import DTYPE_OF, GPU_BACKENDS
from tests.kernels.triton.test_backend import DEVICE, ROUNDING
from tests.ops.test_decode import Decoding


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, in Triton's interpreter
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", [None, rf.Causal()])
@pytest.mark.parametrize("seqlen_q", [33, 128])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_short_tile_of_keys_under_very_negative_scores(
    backend: str, seqlen_q: int, mask: rf.Causal | None, deterministic: bool
) -> None:
    """Checks that keys past the end get no weight: their score of 0 against scores of -200 would weigh infinitely."""
    dtype = DTYPE_OF[backend]
    given = Problem.random(seqlen=(seqlen_q, 33), heads=(2, 1), headdim=16, dtype=dtype, mask=mask, device=DEVICE)
    given.q.abs_().mul_(10)
    given.k.abs_().mul_(-10)
    tolerance = 1e-3 if dtype == torch.float32 else 0.2
    for got, exact in zip(given.flash(backend=backend, deterministic=deterministic), given.exact, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_sink_without_weight_in_a_row_that_sees_nothing(backend: str) -> None:
    q, k, v = (torch.randn(1, 20, 2, 16, device=DEVICE) for _ in range(3))
    sinks = torch.tensor([-math.inf, 0.0], device=DEVICE)
    options = rf.AttentionOptions(sinks=sinks, return_lse=True, backend=backend)
    out, lse = rf.flash_attention(q, k, v, mask=rf.Documents([0, 10, 20]) & rf.KeyPadding([10]), options=options)
    assert torch.equal(out[:, 10:], torch.zeros_like(out[:, 10:]))
    assert (lse[..., 10:] == -math.inf).all()
    assert torch.isfinite(out).all()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, in Triton's interpreter
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", ["eager", *GPU_BACKENDS])
def test_a_nan_that_a_row_sees_reaches_lse_and_every_gradient(backend: str, world: int) -> None:
    dtype = DTYPE_OF.get(backend, torch.float32)
    given = Problem.random(seqlen=70, heads=(2, 1), batch=1, dtype=dtype, mask=rf.Causal(), device=DEVICE)
    given.k[:, 10] = math.nan
    inputs = q, k, v = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    options = rf.AttentionOptions(backend=backend, return_lse=True)
    if world == 1:
        out, lse = rf.flash_attention(q, k, v, mask=given.mask, options=options)
    else:
        context = rf.ContextParallel.local(world, "contiguous")
        out, lse = rf.ring_attention(q, k, v, context, mask=given.mask, options=options)
    assert torch.isnan(lse[..., 10:]).all()
    assert torch.isfinite(lse[..., :10]).all()
    dq, dk, dv = torch.autograd.grad(out, inputs, given.dout)
    for x in (out[:, 10:], dq[:, 10:], dk, dv):
        assert torch.isnan(x).all()


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_nan_that_a_row_sees_reaches_a_decoded_lse(backend: str, sinks: bool, splits: int) -> None:
    logits = torch.zeros(4, device=DEVICE) if sinks else None
    given = replace(Decoding.random(dtype=torch.float32, device=DEVICE), sinks=logits)
    given.k[1, 3] = math.nan
    for x in given.decode(backend=backend, splits=splits):
        assert torch.isfinite(x[0]).all()
        assert torch.isnan(x[1]).all()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", [None, block_sparse(90, 16, seed=0, density=0.5)])
def test_equal_float32_scores_of_1e4(mask: Mask | None, deterministic: bool) -> None:
    """Checks the precision of lse: products of whole numbers are exact in any order, so only lse can cause an error."""
    given = Problem.random(seqlen=90, batch=1, heads=(2, 1), headdim=16, softmax_scale=1 / 64, mask=mask, device=DEVICE)
    q, k = ((x * 150).round() for x in (given.q, given.k))
    given = replace(given, q=q, k=k[:, :1].expand_as(k).contiguous())
    assert_accurate(given.flash(backend="triton", deterministic=deterministic), given, rounding=ROUNDING)
