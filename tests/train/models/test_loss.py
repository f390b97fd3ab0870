"""token_losses against PyTorch's cross entropy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringflash.train.models import loss as loss_file
from ringflash.train.models.loss import count_valid, token_losses


def example(dtype: torch.dtype, seqlen: int = 37, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(2, seqlen, 19, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, 19, (2, seqlen), generator=generator)
    labels[0, 5:20] = -100
    return logits.requires_grad_(), labels


def reference(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1024])
def test_value_and_gradient(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_file, "CHUNK_TOKENS", chunk)
    logits, labels = example(torch.float64)
    expected = reference(logits, labels)
    actual = token_losses(logits, labels).total
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    (dlogits,) = torch.autograd.grad(3 * actual, logits)
    (expected_dlogits,) = torch.autograd.grad(3 * expected, logits)
    torch.testing.assert_close(dlogits, expected_dlogits, atol=1e-14, rtol=0)


def test_gradcheck() -> None:
    logits, labels = example(torch.float64, seqlen=5)
    assert torch.autograd.gradcheck(lambda x: token_losses(x, labels).total, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = example(dtype, seqlen=500)
    actual = token_losses(logits, labels).total
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(reference(logits.double(), labels).item(), rel=1e-6)
    (dlogits,) = torch.autograd.grad(actual, logits)
    assert dlogits.dtype == dtype


def test_large_logits() -> None:
    logits, labels = example(torch.float32, scale=1e4)
    assert token_losses(logits, labels).total.item() == pytest.approx(reference(logits, labels).item(), rel=1e-6)


def test_no_valid_token() -> None:
    logits, labels = example(torch.float32)
    with torch.no_grad():
        logits[0, 0] = torch.nan
    labels.fill_(-100)
    loss = token_losses(logits, labels).total
    assert loss.item() == 0
    assert count_valid(labels).item() == 0
    (dlogits,) = torch.autograd.grad(loss, logits)
    assert (dlogits == 0).all()


def test_garbage_at_ignored_tokens_does_not_leak() -> None:
    logits, labels = example(torch.float32)
    expected = token_losses(logits, labels).total.item()
    with torch.no_grad():
        logits[0, 5:20] = torch.inf
    loss = token_losses(logits, labels).total
    assert loss.item() == expected
    (dlogits,) = torch.autograd.grad(loss, logits)
    assert dlogits.isfinite().all()
    assert (dlogits[0, 5:20] == 0).all()


def test_a_label_outside_the_vocabulary() -> None:
    logits, labels = example(torch.float32)
    labels[0, 0] = -1
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_losses(logits, labels)
