"""Small transformers models with random weights, of every family and every rotary scaling."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LENGTH = 32  # original maximum length of the models; tests use up to three times this length
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
    "yarn, all set": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
        "beta_fast": 4.0,
        "beta_slow": 1.5,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": LENGTH // 2,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, biases, tied": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": 32},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, upper layers": {"model_type": "qwen2", "max_window_layers": 1, **WINDOWS},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3, chosen layers": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **WINDOWS,
    },
}


def random_model(family: str, rope: str = "default", seed: int = 0) -> Any:
    """Returns a float32 causal language model in which every parameter affects the logits."""
    scaling = {"rope_type": "default", "rope_theta": 1000.0, **ROPES[rope]}
    config = transformers.AutoConfig.for_model(**SHAPE, **FAMILIES[family], rope_parameters=scaling)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * drawn if "norm" in name else 0.2 * drawn)
    return model
