"""linear_token_loss against PyTorch's linear layer and cross entropy in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.train.models import linear_loss
from ringflash.train.models.linear_loss import chunk_rows, linear_token_loss
from ringflash.train.models.loss import token_losses
from tests.helpers.accuracy import rms_of

VOCAB, DIM = 19, 8

# torch 2.11 warns when its compiler is imported, and about GPUs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="products that widen are CUDA's")


def example(dtype: torch.dtype, seqlen: int = 37, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, seqlen, DIM, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, DIM, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (2, seqlen), generator=generator)
    labels[0, seqlen // 4 : seqlen // 2] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).flatten(0, 1)
    flat = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=-100)
    return flat.view(labels.shape)


def in_chunks_of(rows: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear_loss, "CHUNK_BYTES", 4 * VOCAB * rows)
    patch.setattr(linear_loss, "ROW_MULTIPLE", 1)


@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 90), seqlen=st.integers(1, 40), trains_head=st.booleans())
def test_tokens_of_different_weights(rows: int, seqlen: int, trains_head: bool) -> None:
    hidden, weight, labels = example(torch.float64, seqlen)
    weight.requires_grad_(trains_head)
    inputs = (hidden, weight) if trains_head else (hidden,)
    scales = torch.linspace(-1, 2, labels.numel(), dtype=torch.float64).view(labels.shape)
    expected = reference(hidden, weight, labels)
    with pytest.MonkeyPatch.context() as patch:
        in_chunks_of(rows, patch)
        total, tokens = linear_token_loss(hidden, weight, labels, each=True)
        gradients = torch.autograd.grad((tokens * scales).sum(), inputs)
    torch.testing.assert_close(tokens, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(total, expected.sum(), atol=1e-11, rtol=0)
    logits = torch.nn.functional.linear(hidden, weight)
    whole = token_losses(logits, labels, each=True).tokens
    for made in (gradients, torch.autograd.grad((whole * scales).sum(), inputs, retain_graph=True)):
        wanted = torch.autograd.grad((expected * scales).sum(), inputs, retain_graph=True)
        for actual, each in zip(made, wanted, strict=True):
            torch.testing.assert_close(actual, each, atol=1e-11, rtol=0)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 90), seqlen=st.integers(1, 40), seed=st.integers(0, 1000))
def test_values_and_gradients_in_chunks_of_any_size(rows: int, seqlen: int, seed: int) -> None:
    hidden, weight, labels = example(torch.float64, seqlen, seed)
    with pytest.MonkeyPatch.context() as patch:
        in_chunks_of(rows, patch)
        total, tokens = linear_token_loss(hidden, weight, labels)
    expected = reference(hidden, weight, labels)
    torch.testing.assert_close(tokens, expected.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(total, expected.sum(), atol=1e-11, rtol=0)
    for actual, wanted in zip(
        torch.autograd.grad(3 * total, (hidden, weight)),
        torch.autograd.grad(3 * expected.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-11, rtol=0)


def test_gradcheck() -> None:
    hidden, weight, labels = example(torch.float64, seqlen=4)
    assert torch.autograd.gradcheck(lambda h, w: linear_token_loss(h, w, labels).total, (hidden, weight))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_low_precision_is_summed_in_float32(
    dtype: torch.dtype, bar: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(64, monkeypatch)
    hidden, weight, labels = (x.detach().to(device) for x in example(dtype, seqlen=500))
    inputs = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = reference(inputs[0], inputs[1], labels)
    wanted = torch.autograd.grad(expected.sum() / 1e4, inputs)
    total, tokens = linear_token_loss(hidden.requires_grad_(), weight.requires_grad_(), labels)
    assert total.dtype == tokens.dtype == torch.float32
    # The logits are not rounded to the dtype, so the only error is float32's.
    torch.testing.assert_close(tokens.double(), expected.detach(), atol=1e-5, rtol=0)
    for actual, exact in zip(torch.autograd.grad(total / 1e4, (hidden, weight)), wanted, strict=True):
        assert actual.dtype == dtype
        assert rms_of(actual - exact) <= bar * rms_of(exact)


def test_autocast_computes_in_its_dtype() -> None:
    hidden, weight, labels = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_token_loss(hidden, weight, labels)
    low = linear_token_loss(hidden.bfloat16(), weight.bfloat16(), labels).total
    assert total.item() == low.item()
    dweight = torch.autograd.grad(total, weight)[0]
    assert dweight.dtype == torch.float32


def test_large_logits() -> None:
    hidden, weight, labels = example(torch.float32)
    total = linear_token_loss(hidden * 1e4, weight, labels).total
    assert total.item() == pytest.approx(reference(hidden.double() * 1e4, weight.double(), labels).sum().item(), 1e-6)


def test_no_valid_token() -> None:
    hidden, weight, labels = example(torch.float32)
    total, tokens = linear_token_loss(hidden, weight, labels.fill_(-100))
    assert total.item() == 0
    assert not tokens.any()
    for gradient in torch.autograd.grad(total, (hidden, weight)):
        assert not gradient.any()


def test_garbage_at_ignored_tokens_does_not_leak_into_the_loss() -> None:
    hidden, weight, labels = example(torch.float32)
    expected = linear_token_loss(hidden, weight, labels)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    total, tokens = linear_token_loss(hidden, weight, labels)
    assert total.item() == expected.total.item()
    assert torch.equal(tokens, expected.tokens)


def test_without_gradient_nothing_is_computed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_add_product", None)  # a call of it would raise
    hidden, weight, labels = example(torch.float32)
    with torch.no_grad():
        total, _ = linear_token_loss(hidden, weight, labels)
    assert not total.requires_grad
    assert total.item() == pytest.approx(reference(hidden, weight, labels).sum().item(), rel=1e-6)


def test_logits_are_never_whole() -> None:
    assert chunk_rows(128256) == 2048
    assert chunk_rows(10**9) == 128
    assert chunk_rows(257) * 257 * 4 <= linear_loss.CHUNK_BYTES


def test_shapes_that_do_not_fit() -> None:
    hidden, weight, labels = example(torch.float32)
    for arguments in ((hidden, weight, labels[:, 1:]), (hidden[..., 1:], weight, labels)):
        with pytest.raises(ArgumentError, match="hidden: expected labels' shape"):
            linear_token_loss(*arguments)
