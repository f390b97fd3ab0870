"""Layers of transformers models in training: the same gradients, each ring run once, one graph per kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ringflash as rf
from ringflash.errors import ArgumentError, ConfigError
from ringflash.ring import schedule
from ringflash.train.lightning.transformers_layers import TrainedLayer, layers_of
from ringflash.train.models import activations
from ringflash.train.models.activations import HostMemory, Packed

transformers = pytest.importorskip("transformers")

SEQLEN, LAYERS = 24, 4
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.1,
    "sliding_window": 7,
}
# torch 2.11 warns when its compiler is imported, and when the compiler inspects the input of the second block.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def model_of(family: str, dropout: float = 0.0) -> Any:
    rf.hf.register()
    config = getattr(transformers, f"{family}Config")(**SHAPE, attention_dropout=dropout)
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=rf.hf.NAME)
    return model.double().train()


def replaced(model: nn.Module, mode: Any) -> list[TrainedLayer]:
    memory = HostMemory()
    trained = [TrainedLayer(layer, mode, memory) for layer in layers_of(model)]
    for layer in trained:
        layer.layer.forward = layer  # type: ignore[method-assign]
    return trained


def gradients(model: Any, *, seqlen: int = SEQLEN, seed: int = 5) -> tuple[float, list[Tensor]]:
    context = rf.ContextParallel.local(2)
    given = {"ring_context": context, "ring_documents": rf.Documents([0, 5, seqlen]), "ring_dropout_seed": seed}
    model.zero_grad()
    positions = context.positions(seqlen)[None]
    loss = model(positions * 7 % 61, position_ids=positions, use_cache=False, **given).logits.square().sum()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def assert_same(actual: tuple[float, list[Tensor]], expected: tuple[float, list[Tensor]]) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-13)
    for a, b in zip(actual[1], expected[1], strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("mode", "offload"), [("none", False), ("block", False), ("block", True)])
def test_gradients_are_the_same_and_no_ring_runs_twice(
    mode: Any, offload: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("Qwen3")
    expected, packed, rings = gradients(model), [], []
    forward, pack = schedule.forward, HostMemory.pack

    def counted_pack(memory: HostMemory, x: Tensor) -> Tensor | Packed:
        result = pack(memory, x)
        if isinstance(result, Packed):
            packed.append(x.nbytes)
        return result

    monkeypatch.setattr(activations, "MIN_OFFLOADED_BYTES", 1000)
    monkeypatch.setattr(HostMemory, "pack", counted_pack)
    monkeypatch.setattr(schedule, "forward", lambda *args: (rings.append(1), forward(*args))[1])
    frames = CompileCounterWithBackend("aot_eager")
    layers = replaced(model, "host" if offload else mode)
    if compiled:
        torch._dynamo.reset()
        for layer in layers:
            layer.compile(frames)
    assert_same(gradients(model), expected)
    assert frames.frame_count == compiled  # one graph serves all layers
    assert len(rings) == 2 * LAYERS  # two virtual ranks
    # The input and out of each layer go to the host, 24 x 32 float64 each. lse is too small to pay; weights, cosines
    # and sines stay.
    assert packed == ([SEQLEN * 32 * 8] * 2 * LAYERS if offload else [])


@pytest.mark.parametrize(("family", "kinds"), [("Llama", 1), ("Mistral", 1), ("Gemma2", 2)])
def test_each_kind_of_layer_is_compiled_once(family: str, kinds: int) -> None:
    torch._dynamo.reset()
    frames, model, calls = CompileCounterWithBackend("aot_eager"), model_of(family), [(24, 5), (24, 6), (30, 5)]
    expected = [gradients(model, seqlen=n, seed=seed) for n, seed in calls]
    for layer in replaced(model, "block"):
        layer.compile(frames)
    for (n, seed), before in zip(calls, expected, strict=True):
        assert_same(gradients(model, seqlen=n, seed=seed), before)
    assert frames.frame_count == 2 * kinds  # one graph for a fixed length, one for any length


def test_compiled_dropout_is_that_of_each_layer_and_step() -> None:
    torch._dynamo.reset()
    frames, model = CompileCounterWithBackend("aot_eager"), model_of("Llama", dropout=0.3)
    expected = [gradients(model, seed=seed) for seed in (5, 6)]
    assert expected[0][0] != expected[1][0]
    for layer in replaced(model, "block"):
        layer.compile(frames)
    for seed, before in zip((5, 6), expected, strict=True):
        assert_same(gradients(model, seed=seed), before)
    assert frames.frame_count == 1


def test_compiled_layers_say_what_is_wrong_with_positions() -> None:
    model, positions = model_of("Llama"), torch.arange(SEQLEN)[None]
    for layer in replaced(model, "block"):
        layer.compile("aot_eager")
    with pytest.raises(ArgumentError, match="position_ids: expected those of the zigzag shard"):
        model(positions, position_ids=positions + 3, use_cache=False, ring_context=rf.ContextParallel.local(2))


def test_without_gradients_layers_run_as_they_are() -> None:
    frames, model, x = CompileCounterWithBackend("aot_eager"), model_of("Llama"), torch.arange(SEQLEN)[None]
    with torch.no_grad():
        expected = model(x).logits
        for layer in replaced(model, "host"):
            layer.compile(frames)
        assert torch.equal(model(x).logits, expected)
    assert frames.frame_count == 0


def test_a_model_without_layers() -> None:
    with pytest.raises(ConfigError, match="model: expected layers of transformers"):
        layers_of(nn.Linear(2, 2))
