"""Models with logits that are only the product of the head: their loss and gradients equal those of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ringflash as rf
from ringflash.train.models import linear_loss
from ringflash.train.models.loss import token_losses

transformers = pytest.importorskip("transformers")

from ringflash.train.lightning.transformers_head import states_loss, why_whole_logits  # noqa: E402

SEQLEN = 300
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen 3, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma 1": ("Gemma", {}),
    "granite with a scale of 1": ("Granite", {"logits_scaling": 1.0}),
    "gemma 2 without a cap": ("Gemma2", {"final_logit_softcapping": None}),
}
AFTER, BETWEEN = "changes its logits after its head", "gives its head something else than its last hidden state"
OTHER: dict[str, tuple[str, dict[str, Any], str]] = {
    "a cap": ("Gemma2", {"final_logit_softcapping": 30.0}, AFTER),
    "division": ("Granite", {"logits_scaling": 8.0}, AFTER),
    "a factor": ("Cohere", {"logit_scale": 0.0625}, AFTER),
    "final states scaled": ("MiniCPM3", {}, BETWEEN),
    "a bias": ("Phi", {}, "has a head that is more than a matrix"),
}


def model_of(name: str, options: dict[str, Any]) -> Any:
    rf.hf.register()
    config = getattr(transformers, f"{name}Config")(**(SHAPE | options))
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=rf.hf.NAME)
    return model.double().train()


def batch() -> tuple[Tensor, Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    input_ids, labels = torch.randint(0, SHAPE["vocab_size"], (2, 1, SEQLEN), generator=generator)
    labels[:, ::5] = -100
    return input_ids, labels, {"position_ids": torch.arange(SEQLEN)[None], "use_cache": False}


def gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", PLAIN)
def test_loss_and_gradients_are_those_of_whole_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 1)  # chunks of 128 tokens
    model, (input_ids, labels, given) = model_of(*PLAIN[name]), batch()
    assert why_whole_logits(model) is None
    whole = token_losses(model(input_ids, **given).logits, labels)
    expected = gradients(model, whole.total)
    chunked = states_loss(model, input_ids, labels, **given)
    actual = gradients(model, chunked.total)
    torch.testing.assert_close(chunked.total, whole.total, rtol=1e-14, atol=0)
    torch.testing.assert_close(chunked.tokens, whole.tokens, rtol=1e-12, atol=1e-13)
    assert actual.keys() == expected.keys()
    for n, gradient in expected.items():
        assert (actual[n] - gradient).norm() <= 1e-12 * gradient.norm(), n


@pytest.mark.parametrize("name", OTHER)
def test_what_else_models_do_is_noticed(name: str) -> None:
    family, options, why = OTHER[name]
    assert why_whole_logits(model_of(family, options)) == why


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_weights_that_are_small_hide_nothing(scale: float) -> None:
    model = model_of("Gemma2", {"final_logit_softcapping": 30.0})
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    assert why_whole_logits(model) == AFTER


def test_what_is_done_in_place_or_in_training_alone_is_noticed() -> None:
    def halve(_module: nn.Module, _args: Any, output: Any) -> None:
        output.logits.div_(2)

    def drop(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (nn.functional.dropout(args[0], training=module.training),)

    model = model_of("Llama", {})
    model.register_forward_hook(halve)
    assert why_whole_logits(model) == AFTER
    model = model_of("Llama", {})
    model.lm_head.register_forward_pre_hook(drop)
    assert why_whole_logits(model) == BETWEEN


def test_looking_leaves_nothing_behind() -> None:
    model = model_of("Llama", {})
    state = torch.random.get_rng_state()
    assert why_whole_logits(model) is None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


class Largest(TorchDispatchMode):
    """Records the largest number of elements of all tensors with the vocabulary as last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (SHAPE["vocab_size"],):
            self.numel = max(self.numel, result.numel())
        return result


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 1)
    model, (input_ids, labels, given) = model_of("Llama", {}), batch()
    with Largest() as largest:
        states_loss(model, input_ids, labels, **given).total.backward()
    assert largest.numel == linear_loss.ROW_MULTIPLE * SHAPE["vocab_size"]
    with Largest() as largest:
        token_losses(model(input_ids, **given).logits, labels).total.backward()
    assert largest.numel == SEQLEN * SHAPE["vocab_size"]
