from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ringflash.train.flops import matmul_parameters, peak_flops, training_flops_per_token
from ringflash.train.model import Decoder
from ringflash.train.model_config import ModelConfig

CONFIG = ModelConfig(vocab_size=257, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)


def test_matmul_parameters_are_the_models() -> None:
    matrices = {n: p.numel() for n, p in Decoder(CONFIG).named_parameters() if p.ndim == 2}
    assert matmul_parameters(CONFIG) == sum(matrices.values()) - matrices["embed_tokens.weight"]


def test_formula() -> None:
    # Forward by hand for one token that sees 1000 / 2 keys on average: 2 a weight; q k and p v, 2 a multiply-add.
    forward = 2 * matmul_parameters(CONFIG) + CONFIG.n_layers * 2 * 2 * CONFIG.dim * 500
    assert training_flops_per_token(CONFIG, 1000) == 3 * forward


def test_windows_and_head_widths() -> None:
    config = replace(CONFIG, head_dim=32, sliding_window=100, sliding_layers=(1,))
    matrices = {n: p.numel() for n, p in Decoder(config).named_parameters() if p.ndim == 2}
    assert matmul_parameters(config) == sum(matrices.values()) - matrices["embed_tokens.weight"]
    # the first 100 tokens see 1 to 100 keys, the others 100; causal attention counts as half a square, without diagonal
    keys = 500 + (100 * 100 / 2 + 900 * 100) / 1000
    forward = 2 * matmul_parameters(config) + 2 * 2 * 4 * 32 * keys
    assert training_flops_per_token(config, 1000) == pytest.approx(3 * forward)


def test_products_outside_attention_are_what_torch_counts() -> None:
    decoder, seqlen = Decoder(CONFIG), 16
    linear = [m for m in decoder.modules() if hasattr(m, "in_features") or type(m).__name__ == "Linear"]
    with FlopCounterMode(display=False) as counter:
        for module in linear:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            x = torch.zeros(seqlen, weight.shape[1], requires_grad=True)
            torch.nn.functional.linear(x, weight).sum().backward()
    attention = 3 * 2 * CONFIG.n_layers * seqlen * CONFIG.dim
    assert counter.get_total_flops() == seqlen * (training_flops_per_token(CONFIG, seqlen) - attention)


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
