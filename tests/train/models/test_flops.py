from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import ringflash as rf
from ringflash.train.lightning.batch import document_positions
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder, Head, Linear
from ringflash.train.models.flops import layer_windows, matmul_parameters, peak_flops, training_flops, visible_pairs
from ringflash.train.models.lora import Lora, add_adapters

CONFIG = ModelConfig(vocab_size=257, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)


def test_matmul_parameters_are_the_models() -> None:
    matrices = {n: p.numel() for n, p in Decoder(CONFIG).named_parameters() if p.ndim == 2}
    assert matmul_parameters(CONFIG) == sum(matrices.values()) - matrices["embed_tokens.weight"]


def test_formula() -> None:
    # The forward by hand for 1000 tokens that see 500 keys each: a weight costs 2 FLOP per token, and q k^T and p v
    # cost 2 FLOP per multiply-add.
    forward = 1000 * (2 * matmul_parameters(CONFIG) + CONFIG.n_layers * 2 * 2 * CONFIG.dim * 500)
    assert training_flops(CONFIG, 1000, CONFIG.n_layers * 1000 * 500) == 3 * forward


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.none() | st.integers(1, 50), min_size=1, max_size=3),
    st.data(),
)
@settings(max_examples=25, deadline=None)
def test_pairs_are_those_of_the_mask(lengths: list[int], windows: list[int | None], data: st.DataObject) -> None:
    cu_seqlens = torch.tensor([0, *accumulate(lengths)])
    seqlen = sum(lengths)
    index = torch.arange(seqlen)
    expected = 0
    for window in windows:
        mask = rf.Causal() & rf.Documents(cu_seqlens)
        if window is not None:
            mask &= rf.SlidingWindow(window - 1)
        expected += int(mask.dense(index, index).sum())
    positions = document_positions(cu_seqlens[None], index)[0]
    order = torch.tensor(data.draw(st.permutations(range(seqlen))))
    cut = data.draw(st.integers(0, seqlen))
    shards = positions[order[:cut]], positions[order[cut:]]
    assert sum(int(visible_pairs(shard, windows)) for shard in shards) == expected


def test_windows_are_the_models() -> None:
    assert layer_windows(CONFIG) == [None] * CONFIG.n_layers


def test_windows_and_head_widths() -> None:
    config = replace(CONFIG, head_dim=32, sliding_window=100, sliding_layers=(1,))
    matrices = {n: p.numel() for n, p in Decoder(config).named_parameters() if p.ndim == 2}
    assert matmul_parameters(config) == sum(matrices.values()) - matrices["embed_tokens.weight"]
    assert layer_windows(config) == [None, 100]
    assert training_flops(config, 1, 1) - training_flops(config, 1, 0) == 3 * 4 * 4 * 32


def test_products_outside_attention_are_what_torch_counts() -> None:
    decoder, seqlen = Decoder(CONFIG), 16
    linear = [m for m in decoder.modules() if isinstance(m, (Linear, Head))]
    with FlopCounterMode(display=False) as counter:
        for module in linear:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            x = torch.zeros(seqlen, weight.shape[1], requires_grad=True)
            torch.nn.functional.linear(x, weight).sum().backward()
    assert counter.get_total_flops() == training_flops(CONFIG, seqlen, 0)


def test_products_with_adapters_are_what_torch_counts() -> None:
    """Only the gradient of the first block's input, which is counted, is not computed."""
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape: dict[str, Any] = {"vocab_size": CONFIG.vocab_size, "hidden_size": CONFIG.dim, "num_hidden_layers": 2}
    shape |= {"intermediate_size": CONFIG.ffn_dim, "num_attention_heads": CONFIG.n_heads, "num_key_value_heads": 2}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape), attn_implementation="eager")
    rank, seqlen = 3, 16
    add_adapters(model, Lora(rank))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(seqlen)[None], use_cache=False).logits.sum().backward()
    of_first_input = 2 * seqlen * (CONFIG.dim * 2 * CONFIG.dim + 3 * rank * CONFIG.dim)  # q, k, v and their A
    counted = training_flops(CONFIG, seqlen, CONFIG.n_layers * seqlen**2, trained)
    # Some releases of transformers compute the angles of RoPE by a product.
    of_angles = sum(counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {}).values())
    assert counter.get_total_flops() - of_angles == counted - of_first_input


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H200", torch.float32, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, None),
    ],
)
def test_peaks(name: str, dtype: torch.dtype, peak: float | None) -> None:
    assert peak_flops(name, dtype) == peak
