"""Floating-point operations of a training step, and what a GPU could do at best."""

from __future__ import annotations

import torch

from ringflash.train.model_config import ModelConfig

# Dense bf16 and fp16 FLOP/s, without sparsity, from NVIDIA's data sheets (SXM).
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "A800": 312e12, "H800": 989e12}


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that every token is multiplied with: projections, SwiGLU and head, not the embedding's look-up."""
    attention = 2 * config.dim * (config.n_heads + config.n_kv_heads) * config.headdim
    return config.n_layers * (attention + 3 * config.dim * config.ffn_dim) + config.dim * config.vocab_size


def training_flops_per_token(config: ModelConfig, seqlen: int) -> float:
    """FLOPs a token of forward and backward, causal attention counted as half, nothing recomputed.

        3 * (2 * matmul parameters + 4 * n_heads * headdim * keys of all layers)

    Forward: 2 a weight, and 4 * n_heads * headdim a key that a token sees for q k^T and p v; the backward costs twice
    the forward. On average a token sees seqlen / 2 keys, of a window w (1 - w / (2 seqlen)).
    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    windows = [min(config.window(layer) or seqlen, seqlen) for layer in range(config.n_layers)]
    keys = sum(window * (1 - window / (2 * seqlen)) for window in windows)
    return 3.0 * (2 * matmul_parameters(config) + 4 * config.n_heads * config.headdim * keys)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of matrix products in `dtype` that a device is sold with; None when unknown."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    words = device_name.replace("-", " ").upper().split()
    return next((peak for name, peak in PEAK_FLOPS.items() if name in words), None)
