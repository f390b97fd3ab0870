"""What once went wrong at the edges of the kernels."""

import math

import pytest
import torch

import ringflash as rf
from tests.accuracy import Problem
from tests.kernels.backends import DTYPE_OF, GPU_BACKENDS
from tests.kernels.test_portable import DEVICE


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, in Triton's interpreter
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", [None, rf.Causal()])
@pytest.mark.parametrize("seqlen_q", [33, 128])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_short_tile_of_keys_under_very_negative_scores(
    backend: str, seqlen_q: int, mask: rf.Causal | None, deterministic: bool
) -> None:
    """Keys past the end score 0, which beside scores of -200 would be an infinite weight."""
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
