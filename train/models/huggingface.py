"""Reader of transformers' config.json of Llama, Mistral, Qwen 2 and Qwen 3, without transformers itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.models.config import ROPE_FIELDS, Family, ModelConfig, RopeScaling

CONFIG = "config.json"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Defaults:
    """Defaults of transformers for a family's keys that config.json leaves out."""

    architecture: str
    max_position_embeddings: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


FAMILIES: dict[Family, Defaults] = {
    "llama": Defaults("LlamaForCausalLM", 2048),
    "mistral": Defaults("MistralForCausalLM", 131072, n_kv_heads=8, sliding_window=4096),
    "qwen2": Defaults("Qwen2ForCausalLM", 32768, n_kv_heads=32, sliding_window=4096),
    "qwen3": Defaults("Qwen3ForCausalLM", 32768, n_kv_heads=32, head_dim=128, sliding_window=4096),
}
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Keys that change the computation, and the only value of each that this decoder supports.
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
}
READ = (
    *REQUIRED,
    *("model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"),
    *("max_position_embeddings", "original_max_position_embeddings", "layer_types"),
    *("rope_parameters", "rope_scaling", "rope_theta"),
)
READ_BY: dict[Family, tuple[str, ...]] = {
    "llama": ("attention_bias",),
    "mistral": ("sliding_window",),
    "qwen2": ("sliding_window", "use_sliding_window", "max_window_layers"),
    "qwen3": ("attention_bias", "sliding_window", "use_sliding_window", "max_window_layers"),
}
# Keys about the tokenizer, the drawing and storing of weights, transformers' outputs, and its generation.
WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash"),
        *("dtype", "torch_dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("initializer_range", "use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "use_bfloat16"),
        *("tokenizer_class", "prefix", "keys_to_ignore_at_inference", "tie_last_hidden_states", "max_length"),
        *("temperature", "top_p", "top_k", "do_sample", "repetition_penalty", "num_beams"),
    )
)


def read_config(folder: str | Path) -> ModelConfig:
    """Reads the shape from the config.json of a transformers folder.

    Raises:
        CheckpointError: no such file, or not JSON.
        ConfigError: another kind of model, or a key that asks for a computation that the decoder does not have.
    """
    file = Path(folder) / CONFIG
    try:
        values = json.loads(file.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}")
    except (OSError, ValueError) as error:
        got = "no such file" if not file.is_file() else f"unreadable: {error}"
        remedy = "Pass a folder of transformers' with config.json and safetensors."
        raise CheckpointError(str(file), expected="a model's config.json", got=got, remedy=remedy) from error
    return from_transformers(values)


def from_transformers(values: dict[str, Any]) -> ModelConfig:
    """Returns the shape that the `values` of a config.json describe.

    Raises:
        ConfigError: another kind of model, or a key that asks for a computation that the decoder does not have.
    """
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        remedy = "Other models run in transformers itself."
        raise ConfigError("model_type", expected=f"one of {', '.join(FAMILIES)}", got=repr(family), remedy=remedy)
    try:
        return _read(values, family, FAMILIES[family])
    except (TypeError, AttributeError) as error:
        remedy = "Use the config.json that the model was saved with."
        raise ConfigError(CONFIG, expected="values of their usual types", got=str(error), remedy=remedy) from error


def _read(values: dict[str, Any], family: Family, defaults: Defaults) -> ModelConfig:
    _check_keys(values, family)
    for name in REQUIRED:
        if not _is_count(values.get(name)):
            remedy = "Use the config.json that the model was saved with."
            raise ConfigError(name, expected="a positive integer", got=values.get(name), remedy=remedy)
    n_heads, n_layers = values["num_attention_heads"], values["num_hidden_layers"]
    longest = values.get("max_position_embeddings", defaults.max_position_embeddings)
    theta, scaling = _read_rope(values, defaults.rope_theta, longest)
    window, layers = _read_windows(values, family, n_layers)
    n_kv_heads = values.get("num_key_value_heads", defaults.n_kv_heads)
    head_dim = values.get("head_dim", defaults.head_dim)
    bias = bool(values.get("attention_bias", False))
    return ModelConfig(
        vocab_size=values["vocab_size"],
        dim=values["hidden_size"],
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        ffn_dim=values["intermediate_size"],
        rope_theta=theta,
        norm_eps=values.get("rms_norm_eps", defaults.rms_norm_eps),
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        head_dim=None if head_dim == values["hidden_size"] / n_heads else head_dim,
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        qk_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=layers,
        rope_scaling=scaling,
        max_position_embeddings=longest,
        family=family,
    )


def _check_keys(values: dict[str, Any], family: Family) -> None:
    for name, value in values.items():
        if name in ONLY:
            if value != ONLY[name] and value is not None:
                remedy = f"The decoder computes nothing else; set it to {ONLY[name]!r} if that is what the model needs."
                raise ConfigError(name, expected=repr(ONLY[name]), got=repr(value), remedy=remedy)
        elif name not in READ and name not in READ_BY[family] and name not in WITHOUT_EFFECT and value:
            remedy = "Remove it if the model does not depend on it; else use transformers itself."
            raise ConfigError(name, expected=f"keys of {family} that the decoder knows", got=repr(value), remedy=remedy)


def _read_rope(values: dict[str, Any], theta: float, longest: int) -> tuple[float, RopeScaling | None]:
    """Returns rope_theta and scaling, from rope_parameters or the older rope_scaling and rope_theta."""
    theta = values.get("rope_theta") or theta
    names = [name for name in ("rope_scaling", "rope_parameters") if values.get(name)]
    found = [_plain_rope(name, values[name], theta) for name in names] or [{"rope_theta": theta}]
    if found[0] != found[-1]:
        expected, remedy = f"the same in {' and '.join(names)}", "Keep the one that the model was trained with."
        raise ConfigError("rope_scaling", expected=expected, got=found, remedy=remedy)
    rope = found[0]
    kind, theta = rope.pop("rope_type", "default"), float(rope.pop("rope_theta"))
    if kind == "dynamic":  # transformers uses max_position_embeddings and ignores any other length
        if (before := rope.setdefault("original_max_position_embeddings", longest)) != longest:
            expected = f"max_position_embeddings={longest} with dynamic scaling"
            remedy = "transformers keeps one length of these: remove the other."
            raise ConfigError("original_max_position_embeddings", expected=expected, got=before, remedy=remedy)
    elif kind in ("yarn", "llama3"):
        before = values.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = before or rope.get("original_max_position_embeddings", longest)
        if kind == "yarn":
            rope.setdefault("factor", longest / rope["original_max_position_embeddings"])
    needed, possible = ROPE_FIELDS.get(kind, ((), ()))
    known = {"factor", *needed, *possible} if kind in ROPE_FIELDS else set()
    if strange := sorted(rope.keys() - known):
        name, remedy = strange[0], "Remove it if the model does not depend on it."
        raise ConfigError(f"rope_parameters.{name}", expected=f"keys of {kind!r}", got=rope[name], remedy=remedy)
    if kind == "default":
        return theta, None
    if "factor" not in rope:
        raise ConfigError("rope_parameters.factor", expected=f"a number for {kind!r}", got=None, remedy="Set it.")
    return theta, RopeScaling(rope_type=kind, **rope)


def _plain_rope(name: str, given: Any, theta: float) -> dict[str, Any]:
    """Returns the rotary settings that are not null, under transformers 5's names."""
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        remedy = "Rotary embeddings that differ by layer are not computed."
        raise ConfigError(name, expected="one set of numbers for all layers", got=repr(given), remedy=remedy)
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind or "default")
    if kind != "default" and kind not in ROPE_FIELDS:
        expected, remedy = f"one of default, {', '.join(ROPE_FIELDS)}", "Other models run in transformers itself."
        raise ConfigError("rope_type", expected=expected, got=repr(kind), remedy=remedy)
    if (part := rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        remedy = "The decoder rotates whole heads."
        raise ConfigError("partial_rotary_factor", expected="1.0", got=part, remedy=remedy)
    return {"rope_theta": theta, **rope, "rope_type": kind}


def _read_windows(values: dict[str, Any], family: Family, n_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Returns sliding_window and sliding_layers."""
    window = values.get("sliding_window", FAMILIES[family].sliding_window) if family != "llama" else None
    if family in ("qwen2", "qwen3") and not values.get("use_sliding_window", False):
        window = None
    first = values.get("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
    usual = [SLIDING if window is not None and layer >= first else FULL for layer in range(n_layers)]
    types = values.get("layer_types") or usual
    remedy = "Use the config.json that the model was saved with."
    if len(types) != n_layers or not {*types} <= {FULL, SLIDING}:
        expected = f"{n_layers} of {FULL} and {SLIDING}"
        raise ConfigError("layer_types", expected=expected, got=types, remedy=remedy)
    if types != usual and (window is None or family == "mistral"):
        got = f"{types.count(SLIDING)} of {n_layers} layers with a window"
        expected = f"what sliding_window={window} of {family} says"
        raise ConfigError("layer_types", expected=expected, got=got, remedy=remedy)
    if SLIDING not in types:
        return None, None
    return window, None if FULL not in types else tuple(i for i, kind in enumerate(types) if kind == SLIDING)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
