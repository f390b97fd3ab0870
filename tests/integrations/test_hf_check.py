"""The check of a transformers model before its first forward on a ring: it refuses wrong models and alters no other."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringflash as rf
from ringflash.errors import ArgumentError
from tests.integrations.hf_families import model_of
from tests.integrations.test_hf import FAMILIES, by_name, tokens

transformers = pytest.importorskip("transformers")

LLAMA = FAMILIES["llama"]


def first_forward(model: Any) -> Tensor:
    """Runs the model on a ring of two virtual ranks, without an earlier check."""
    context, ids = rf.ContextParallel.local(2), tokens()
    positions = context.positions(ids.shape[1])[None]
    return model(
        input_ids=context.shard(ids), position_ids=positions, ring_context=context, use_cache=False
    ).logits.detach()


IGNORED = ["bart", "blenderbot", "mbart", "marian", "pegasus", "plbart", "bigbird_pegasus"]
FROM_PADDING = ["roberta", "xlm-roberta", "camembert", "data2vec-text"]


@pytest.mark.parametrize("family", IGNORED)
def test_decoders_that_ignore_positions_are_refused_at_their_first_forward(family: str) -> None:
    with pytest.raises(ArgumentError, match=r"model: expected a model that uses position_ids, got \w+ForCausalLM"):
        first_forward(model_of(family))


@pytest.mark.parametrize("family", FROM_PADDING)
def test_positions_that_begin_behind_the_padding_are_refused_at_the_first_forward(family: str) -> None:
    with pytest.raises(ArgumentError, match=r"model: expected a model that counts positions from 0, got \w+ForCausal"):
        first_forward(model_of(family))


class Mixing(nn.Module):
    """A module that adds each row to the next one, like a convolution over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.roll(1, dims=1)


def test_layers_that_mix_tokens_outside_of_attention_are_refused() -> None:
    model = by_name(LLAMA.build())
    model.model.layers[0].post_attention_layernorm = Mixing()
    with pytest.raises(ArgumentError, match="tokens meet in attention alone, .* got LlamaForCausalLM, in which"):
        first_forward(model)


def test_a_model_with_another_attention_is_refused_on_a_ring() -> None:
    with pytest.raises(ArgumentError, match="attn_implementation: expected ring_attention, got sdpa"):
        first_forward(LLAMA.build())


def test_results_that_are_no_rows_are_refused() -> None:
    config = LLAMA.build().config
    config.pad_token_id = 0
    model = transformers.LlamaForSequenceClassification._from_config(config, attn_implementation=rf.hf.NAME)
    with pytest.raises(ArgumentError, match=r"returns a row for each of 16 tokens, got LlamaForSequenceClassification"):
        rf.hf.check_model(model.eval())


def test_a_model_of_several_text_models_is_refused() -> None:
    model = by_name(LLAMA.build())

    def several() -> Any:
        raise ValueError("Multiple valid text configs were found in the model config")

    model.config.get_text_config = several
    with pytest.raises(ArgumentError, match="model: expected a model with one text model, got LlamaForCausalLM"):
        rf.hf.check_model(model)


def test_gradients_of_an_earlier_forward_outlive_the_check() -> None:
    model, ids = by_name(LLAMA.build()), tokens()
    scale = torch.full((64,), 2.0, dtype=torch.float64)
    model.model.norm.register_buffer("scale", scale)
    model.model.norm.register_forward_hook(lambda module, _args, output: output * module.scale * module.weight)
    logits = model(input_ids=ids, use_cache=False).logits
    first_forward(model)
    logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_a_model_that_cannot_run_gets_its_own_error_as_the_cause() -> None:
    model = by_name(LLAMA.build())
    model.model.norm = nn.LayerNorm(7)
    with pytest.raises(ArgumentError, match=r"whose forward raised RuntimeError: .*\. Repair the model or") as raised:
        first_forward(model)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_the_check_runs_once_a_model() -> None:
    model, heads = by_name(LLAMA.build()), list[int]()
    model.lm_head.register_forward_hook(lambda _module, args, _output: heads.append(args[0].shape[1]))
    first_forward(model)
    assert heads == [16, 16, 16, tokens().shape[1]]
    first_forward(model)
    model.model(input_ids=tokens()[:, :5], ring_context=None, use_cache=False)
    assert len(heads) == 5


def test_a_part_of_a_checked_model_is_not_checked_again() -> None:
    model = by_name(LLAMA.build())
    rf.hf.check_model(model)
    calls: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _module, args, _output: calls.append(args[0].shape[1]))
    context, ids = rf.ContextParallel.local(2), tokens()
    model.model(
        input_ids=context.shard(ids),
        position_ids=context.positions(ids.shape[1])[None],
        ring_context=context,
        use_cache=False,
    )
    assert calls == [ids.shape[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_low_precision_is_no_difference(dtype: torch.dtype) -> None:
    rf.hf.check_model(by_name(FAMILIES["mistral"].build()).to(dtype))


def test_training_state_stays_as_it_was() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = by_name(LLAMA.build(attention_dropout=0.4, max_position_embeddings=12, rope_parameters=rope)).train()
    model.model.layers[0].mlp.eval()
    model.model.layers[1].self_attn.register_buffer("counts", torch.zeros(3))

    def count(module: Any, _args: Any) -> None:
        module.self_attn.counts += 1

    model.model.layers[1].register_forward_pre_hook(count)
    long = torch.arange(40)[None]
    model(input_ids=long, position_ids=long, use_cache=False)  # RoPE caches its frequencies for 40 tokens
    before = {name: value.clone() for name, value in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    attributes = dict(vars(model.model.rotary_emb))
    state = torch.get_rng_state()
    rf.hf.check_model(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert before["model.layers.1.self_attn.counts"].tolist() == [1, 1, 1]
    assert [module.training for module in model.modules()] == modes
    assert {name: value.tolist() for name, value in model.named_buffers()} == {n: x.tolist() for n, x in before.items()}
    assert vars(model.model.rotary_emb).keys() == attributes.keys()
    assert model.model.rotary_emb.max_seq_len_cached == attributes["max_seq_len_cached"]
    assert all(p.grad is None for p in model.parameters())


def test_gradients_under_autocast_are_there_after_the_check() -> None:
    model = by_name(FAMILIES["qwen3"].build()).float()
    context, ids = rf.ContextParallel.local(2), tokens()
    positions = context.positions(ids.shape[1])[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(
            input_ids=context.shard(ids), position_ids=positions, ring_context=context, use_cache=False
        ).logits.float().square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_on_the_meta_device_is_checked_later(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(LLAMA.build().config, attn_implementation=rf.hf.NAME)
    with caplog.at_level(logging.WARNING):
        rf.hf.check_model(model)
    assert "LlamaForCausalLM is on the meta device" in caplog.text
    assert not hasattr(model, rf.hf.CHECKED)


def test_compiled_models_run_on_one_device_and_are_checked_on_a_ring() -> None:
    model, ids = by_name(LLAMA.build(num_hidden_layers=1)), tokens()
    expected = model(input_ids=ids, use_cache=False).logits
    graphs: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model.compile(backend=backend)
    warnings.simplefilter("ignore")  # torch's compiler warns about gradients of non-leaves
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=1e-9)
    compiled = len(graphs)
    rf.hf.check_model(model)
    assert len(graphs) == compiled


TABLES = ["falcon", "gpt_neo", "gptj"]
MASKS = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "doge", "mpt", "mvp", "trocr"]


@pytest.mark.parametrize("family", TABLES)
def test_classes_with_a_table_of_attentions_are_refused_when_they_are_made(family: str) -> None:
    message = r"attn_implementation: expected a model that uses transformers' attention interface, got \w+, which "
    with pytest.raises(ArgumentError, match=message):
        model_of(family)


@pytest.mark.parametrize("family", MASKS)
def test_models_that_compute_with_their_mask_are_refused(family: str) -> None:
    model = model_of(family)
    ids = tokens()
    with pytest.raises(ArgumentError, match="attn_implementation: expected models that use transformers' attention"):
        model(input_ids=ids, use_cache=False)
    with pytest.raises(ArgumentError, match=r"model: expected a model that .*, got \w+ForCausalLM"):
        first_forward(model)
