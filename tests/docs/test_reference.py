"""The reference is the formula: it agrees with torch's own attention and leaves fully masked rows at zero."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringflash as rf
from ringflash import reference


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch(causal: bool) -> None:
    q = torch.randn(2, 9, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, 9, 2, 16, dtype=torch.float64).unbind(0)
    out, _ = reference.attention(q, k, v, mask=rf.Causal() if causal else None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


def test_rows_that_see_nothing() -> None:
    q, k = torch.randn(1, 5, 1, 16), torch.randn(1, 3, 1, 16, requires_grad=True)
    out, lse = reference.attention(q, k, k, mask=rf.Causal())
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert (lse[..., :2] == -math.inf).all()
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert torch.isfinite(grad).all()
