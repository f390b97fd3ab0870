"""Models loaded from transformers: shapes, refusals, and equal logits."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringflash as rf
from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.checkpoint.load import compare_model_configs
from ringflash.train.commands.export import family_of, to_transformers
from ringflash.train.models.config import ModelConfig, RopeScaling
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.huggingface import from_transformers, read_config
from ringflash.train.models.weights import Weights

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DYNAMIC = RopeScaling("dynamic", 4.0, original_max_position_embeddings=32)


def tokens(batch: int, seqlen: int) -> torch.Tensor:
    return torch.randint(0, 61, (batch, seqlen), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_transformers_own(family: str, tmp_path: Path) -> None:
    peers = pytest.importorskip("tests.train.peers", reason="transformers is not installed", exc_type=ImportError)
    kind, other = (kind for kind in peers.FAMILIES if kind.startswith(family))
    cases = [(kind, rope) for rope in peers.ROPES] + [(other, "default"), (other, "dynamic")]
    for number, (kind, rope) in enumerate(cases):
        folder = tmp_path / f"{number}"
        model = peers.random_model(kind, rope, seed=number)
        model.save_pretrained(folder)
        config = read_config(folder)
        decoder = Decoder(config, weights=Weights(folder)).double()
        plain = Decoder(replace(config, rope_scaling=None), weights=Weights(folder)).double()
        seqlen = peers.LENGTH // 2 if number == len(cases) - 1 else 3 * peers.LENGTH
        x, positions = tokens(1, seqlen), torch.arange(seqlen)
        with torch.no_grad():
            got, unscaled = decoder(x, positions), plain(x, positions)
            expected = model.double()(x).logits
        # transformers computes angles and norms in float32 for every dtype. Angles are off by about 1e-7 per position;
        # the exact error also depends on how the processor rounds powers.
        largest = expected.abs().max()
        error, of_scaling = ((logits - expected).abs().max() / largest for logits in (got, unscaled))
        assert error <= 2e-7 * seqlen, f"{kind}, {rope}, {seqlen}: {error}"
        assert rope == "default" or seqlen < peers.LENGTH or of_scaling > 0.1
        assert from_transformers(to_transformers(config, "float32")) == config


def test_dynamic_scaling_goes_by_the_whole_sequence() -> None:
    config = replace(from_transformers(LLAMA), rope_scaling=DYNAMIC, max_position_embeddings=32)
    decoder, x = Decoder(config).double(), tokens(1, 90)
    whole = decoder(x, torch.arange(90))
    assert (whole[:, :40] - decoder(x[:, :40], torch.arange(40))).abs().max() > 1e-6
    context = rf.ContextParallel.local(3)
    sharded = context.unshard(decoder(context.shard(x), context.positions(90), context))
    torch.testing.assert_close(sharded, whole, atol=1e-12, rtol=0)


def test_documents_are_sequences_of_their_own() -> None:
    windows = replace(from_transformers(LLAMA), sliding_window=6, sliding_layers=(1,), rope_scaling=DYNAMIC)
    decoder, x = Decoder(windows).double(), tokens(1, 90)
    lengths = (50, 40)  # dynamic scaling depends on the longest document
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = decoder(x, positions, documents=rf.Documents([0, 50, 90]))
    torch.testing.assert_close(packed[:, :50], decoder(x[:, :50], torch.arange(50)), atol=1e-12, rtol=0)
    context = rf.ContextParallel.local(2)
    shards = context.shard(x), context.shard(positions, dim=0)
    sharded = decoder(*shards, context, documents=rf.Documents([0, 50, 90]))
    torch.testing.assert_close(context.unshard(sharded), packed, atol=1e-12, rtol=0)


def test_older_and_newer_keys_say_the_same() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **yarn}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **yarn}}
    assert from_transformers(LLAMA | old) == from_transformers(LLAMA | new) == from_transformers(LLAMA | old | new)
    assert from_transformers(LLAMA | old).rope_theta == 1e6
    assert from_transformers(LLAMA).rope_theta == 10000
    with pytest.raises(ConfigError, match="the same in rope_scaling and rope_parameters"):
        from_transformers(LLAMA | old | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": "2"}, "config.json"),
        ({"num_key_value_heads": 3}, "n_kv_heads"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 2}}, "rope_parameters.beta_fast"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
            "original_max_position_embeddings",
        ),
    ],
)
def test_what_the_decoder_does_not_compute(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_transformers(LLAMA | changes)
    assert raised.value.argument == named


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_config(tmp_path)
    for content in ("{", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="unreadable"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).headdim == 16


@given(
    st.builds(
        ModelConfig,
        vocab_size=st.integers(1, 300),
        dim=st.sampled_from([64, 96, 100]),
        n_layers=st.integers(1, 5),
        n_heads=st.just(4),
        n_kv_heads=st.sampled_from([1, 2, 4]),
        ffn_dim=st.integers(1, 300),
        rope_theta=st.floats(10, 1e7),
        norm_eps=st.floats(1e-8, 1e-3),
        tie_embeddings=st.booleans(),
        head_dim=st.sampled_from([16, 32, 64]),
        qkv_bias=st.booleans(),
        o_bias=st.booleans(),
        qk_norm=st.booleans(),
        sliding_window=st.sampled_from([None, 1, 77]),
        rope_scaling=st.sampled_from([None, RopeScaling("linear", 2.0), replace(DYNAMIC)]),
        max_position_embeddings=st.just(32),
    )
)
def test_config_json_is_read_back(config: ModelConfig) -> None:
    if (config.qkv_bias != config.o_bias or config.sliding_window) and refused(config):
        return
    read = from_transformers(json.loads(json.dumps(to_transformers(config, "bfloat16"))))
    assert read.headdim == config.headdim
    assert replace(read, head_dim=config.head_dim, family=None) == config


def refused(config: ModelConfig) -> bool:
    try:
        return not family_of(config)
    except ConfigError:
        return True


def test_family() -> None:
    plain = from_transformers(LLAMA)
    assert family_of(replace(plain, family=None)) == "llama"
    assert family_of(replace(plain, family=None, sliding_window=9)) == "mistral"
    assert family_of(replace(plain, family="mistral")) == "mistral"
    assert family_of(replace(plain, family=None, qk_norm=True)) == "qwen3"
    with pytest.raises(ConfigError, match="a shape that llama can have"):
        family_of(replace(plain, sliding_window=9))
    with pytest.raises(ConfigError, match="the longest sequence"):
        to_transformers(replace(plain, max_position_embeddings=None), "float32")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 15}, "headdim"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_layers": (0,)}, "sliding_layers"),
        ({"sliding_window": 4, "sliding_layers": (0, 2)}, "sliding_layers"),
        ({"sliding_window": 4, "sliding_layers": (0, 0)}, "sliding_layers"),
        ({"family": "gpt2"}, "family"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        replace(from_transformers(LLAMA), **changes)
    assert raised.value.argument == named


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_scaling.rope_type"),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_scaling.original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 2.0, "truncate": False}, "rope_scaling.truncate"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": -1.0},
            "rope_scaling.beta_fast",
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            },
            "rope_scaling.high_freq_factor",
        ),
    ],
)
def test_scaling_that_cannot_be(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RopeScaling(**values)
    assert raised.value.argument == named


def test_fields_of_older_checkpoints() -> None:
    config = ModelConfig(61, 64, 2, 4, 2, 96, rope_scaling=DYNAMIC, sliding_window=4, sliding_layers=(1,))
    assert ModelConfig.from_fields(asdict(config)) == config
    older = {"vocab_size": 61, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}
    assert ModelConfig.from_fields(older) == ModelConfig(61, 64, 2, 4, 2, 96)
    compare_model_configs(older, asdict(ModelConfig(61, 64, 2, 4, 2, 96)))
    for saved, differs in ((older, "sliding_window None"), (None, "none in the checkpoint")):
        with pytest.raises(CheckpointError, match=differs):
            compare_model_configs(saved, asdict(config))
    for values, got in (({**older, "n_experts": 8}, "an unknown one"), ({"dim": 64}, "vocab_size")):
        with pytest.raises(ConfigError, match=got):
            ModelConfig.from_fields(values)
