"""Decoder: shapes, positions, cache and initial weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import ringflash as rf
from ringflash.errors import ArgumentError, ConfigError
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.kv_cache import KVCache
from ringflash.train.models.rotary import rotary_angles

CONFIG = ModelConfig(vocab_size=61, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)


def tokens(batch: int, seqlen: int) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (batch, seqlen), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
def test_matches_transformers_llama(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = replace(CONFIG, tie_embeddings=tied, rope_theta=10000.0)
    decoder = Decoder(config).double()
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=tied,
        )
    ).double()
    state = {name if name.startswith("lm_head") else f"model.{name}": w for name, w in decoder.state_dict().items()}
    assert not llama.load_state_dict(state, strict=False).unexpected_keys
    x = tokens(2, 33)
    # transformers computes its angles in float32
    torch.testing.assert_close(decoder(x, torch.arange(33)), llama(x).logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_virtual_ranks_give_the_same_logits(world_size: int, layout: str) -> None:
    decoder = Decoder(CONFIG).double()
    context = rf.ContextParallel.local(world_size, layout)
    x = tokens(2, 37)
    sharded = decoder(context.shard(x), context.positions(37), context)
    torch.testing.assert_close(context.unshard(sharded), decoder(x, torch.arange(37)), atol=1e-12, rtol=0)


def test_positions_a_row_each() -> None:
    decoder = Decoder(CONFIG).double()
    x = tokens(2, 9)
    whole = decoder(x, torch.arange(9).expand(2, 9))
    torch.testing.assert_close(whole, decoder(x, torch.arange(9)), atol=0, rtol=0)


def test_attention_sees_relative_positions_only() -> None:
    decoder = Decoder(CONFIG).double()
    x = tokens(1, 20)
    far = decoder(x, torch.arange(20) + 1_000_000)
    torch.testing.assert_close(far, decoder(x, torch.arange(20)), atol=1e-8, rtol=0)


def test_angles_are_exact_far_out() -> None:
    positions = torch.tensor([999_983])
    cos, sin = rotary_angles(CONFIG, positions, torch.float32)
    expected = positions.double() * CONFIG.rope_theta ** (-torch.arange(0, 16, 2).double() / 16)
    torch.testing.assert_close(cos.flatten(), expected.cos().float(), atol=1e-7, rtol=0)
    torch.testing.assert_close(sin.flatten(), expected.sin().float(), atol=1e-7, rtol=0)


def test_wrong_positions() -> None:
    with pytest.raises(ArgumentError, match=r"position_ids: expected \(8,\)"):
        Decoder(CONFIG)(tokens(1, 8), torch.arange(7))


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    torch.manual_seed(1)
    first = Decoder(CONFIG, seed=3).state_dict()
    torch.manual_seed(2)
    second = Decoder(replace(CONFIG, n_layers=2), seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], Decoder(CONFIG, seed=4).state_dict()["lm_head.weight"])
    draws = {tuple(w.flatten()[:4].tolist()) for name, w in first.items() if "norm" not in name}
    assert len(draws) == sum("norm" not in name for name in first)


def test_initial_spread() -> None:
    config = replace(CONFIG, dim=256, n_heads=4, n_layers=8, ffn_dim=512)
    state = Decoder(config).state_dict()
    clipped = 0.9866  # standard deviation of a normal distribution cut at 3
    assert state["layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02 * clipped, rel=0.01)
    assert state["layers.7.mlp.down_proj.weight"].std().item() == pytest.approx(0.02 * clipped / 4, rel=0.01)
    assert state["layers.7.self_attn.o_proj.weight"].std().item() == pytest.approx(0.02 * clipped / 4, rel=0.02)
    assert state["lm_head.weight"].abs().max() <= 0.06 + 1e-6


def test_meta_device() -> None:
    with torch.device("meta"):
        decoder = Decoder(CONFIG, seed=3)
    assert all(p.is_meta for p in decoder.parameters())
    assert not list(decoder.buffers())
    decoder.materialise("cpu")
    expected = Decoder(CONFIG, seed=3).state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in decoder.state_dict().items())


def test_labels_give_the_loss_of_the_logits() -> None:
    decoder = Decoder(CONFIG).double()
    x, labels = tokens(2, 16), tokens(2, 16)
    total, each = decoder(x, torch.arange(16), labels=labels)
    logits = decoder(x, torch.arange(16))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(each.flatten(), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(total, expected.sum(), atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dim": 66}, "dim"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"dim": 32}, "headdim"),
        ({"dim": 68}, "headdim"),
        ({"dim": 2048}, "headdim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rope_theta": float("nan")}, "rope_theta"),
    ],
)
def test_impossible_shapes(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        replace(CONFIG, **change)
    assert raised.value.argument == field


def test_documents_do_not_see_each_other() -> None:
    decoder, x = Decoder(CONFIG).double(), tokens(2, 12)
    ends = torch.tensor([[0, 5, 5, 12], [0, 12, 12, 12]])
    positions = torch.stack([torch.cat([torch.arange(5), torch.arange(7)]), torch.arange(12)])
    out = decoder(x, positions, documents=rf.Documents(ends))
    alone = [decoder(x[:1, :5], torch.arange(5)), decoder(x[:1, 5:], torch.arange(7))]
    torch.testing.assert_close(out[:1], torch.cat(alone, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(out[1:], decoder(x[1:], torch.arange(12)), rtol=0, atol=1e-12)
    cache = KVCache.empty(CONFIG, 2, 12, "cpu", torch.float64)
    with pytest.raises(ArgumentError, match="documents: expected None with a cache"):
        decoder(x, positions, cache=cache, documents=rf.Documents(ends))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_documents_on_a_ring_do_not_see_each_other(layout: str) -> None:
    decoder, x, ends = Decoder(CONFIG).double(), tokens(1, 13), [0, 4, 9, 13]
    context = rf.ContextParallel.local(3, layout)
    positions = torch.cat([torch.arange(4), torch.arange(5), torch.arange(4)])
    shard, own_positions = context.shard(x), context.shard(positions, dim=0)
    out = context.unshard(decoder(shard, own_positions, context, documents=rf.Documents(ends)))
    alone = [decoder(x[:, a:b], torch.arange(b - a)) for a, b in pairwise(ends)]
    torch.testing.assert_close(out, torch.cat(alone, 1), rtol=0, atol=1e-12)


def test_norms_of_many_elements_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, x = Decoder(replace(CONFIG, qk_norm=True)), torch.arange(37)[None] % CONFIG.vocab_size
    expected, sizes = decoder(x, torch.arange(37)), []
    rms_norm = torch.nn.functional.rms_norm
    monkeypatch.setattr("ringflash.train.models.decoder.FUSED_NORM_ELEMENTS", 5 * CONFIG.dim + 1)
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm", lambda x, *args: (sizes.append(x.numel()), rms_norm(x, *args))[1]
    )
    assert torch.equal(decoder(x, torch.arange(37)), expected)
    assert max(sizes) <= 5 * CONFIG.dim + 1
