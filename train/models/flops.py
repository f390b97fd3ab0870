"""Floating-point operations of a training step, and the peak rates of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ringflash.train.models.config import ModelConfig

# Dense bf16 and fp16 FLOP/s, without sparsity, from NVIDIA's data sheets (SXM).
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "A800": 312e12, "H800": 989e12}


def matmul_parameters(config: ModelConfig) -> int:
    """Counts the weights that multiply every token: projections, SwiGLU and head, not the embedding's look-up."""
    attention = 2 * config.dim * (config.q_dim + config.kv_dim)
    return config.n_layers * (attention + 3 * config.dim * config.ffn_dim) + config.dim * config.vocab_size


def layer_windows(config: ModelConfig) -> list[int | None]:
    """Returns the most keys that a query sees, including its own, layer by layer; None is no limit."""
    return [config.window(layer) for layer in range(config.n_layers)]


def visible_pairs(position_ids: Tensor, windows: Sequence[int | None]) -> Tensor:
    """Counts the (query, key) pairs that causal attention computes, over all layers: a scalar int64 tensor.

        sum over layers and tokens of min(position + 1, window)

    Positions restart at each document, so this counts packed documents too. For a shard it counts the pairs of the
    shard's queries, so the counts of shards can be added.

    Args:
        position_ids: int64 positions of the queries in their documents, any shape.
        windows: result of `layer_windows`.
    """
    seen = position_ids + 1
    parts = [count * (seen if window is None else seen.clamp(max=window)).sum() for window, count in _counted(windows)]
    return torch.stack(parts).sum()


def training_flops(config: ModelConfig, tokens: float, pairs: float, adapters: int | None = None) -> float:
    """Computes FLOPs of forward and backward of `tokens` tokens that see `pairs` keys, summed over tokens and layers.

        3 * (2 * matmul parameters * tokens + 4 * n_heads * headdim * pairs)

    The forward takes 2 a weight and token, and 4 * headdim a pair and head for q k^T and p v; the backward costs twice
    the forward. Only visible pairs count, so causal attention is half of the square. Recomputation, norms, rotations,
    softmax and optimizer do not count.

    With `adapters`, the number of their parameters, only these train. The other weights have no gradients, so they take
    4 a weight and token. The gradient of the first block's input, which nothing needs, counts too.
    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    weights = 6.0 * matmul_parameters(config) if adapters is None else 4.0 * matmul_parameters(config) + 6.0 * adapters
    return weights * tokens + 12.0 * config.q_dim * pairs


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Returns a device's nominal FLOP/s of matrix products in `dtype`; None when unknown."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    words = device_name.replace("-", " ").upper().split()
    return next((peak for name, peak in PEAK_FLOPS.items() if name in words), None)


def _counted(windows: Sequence[int | None]) -> list[tuple[int | None, int]]:
    """Returns each window with the number of its layers, so that each window is evaluated once."""
    return list(Counter(windows).items())
