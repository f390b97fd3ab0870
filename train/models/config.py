"""Shape of a decoder as plain values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ringflash.errors import ConfigError

RopeType = Literal["linear", "dynamic", "yarn", "llama3"]
Family = Literal["llama", "mistral", "qwen2", "qwen3"]

# Fields of each scaling type other than its factor: required ones, and optional ones.
ROPE_FIELDS: dict[RopeType, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": (("original_max_position_embeddings",), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for sequences longer than in a model's first training.

    Args:
        rope_type: "linear" divides all frequencies by `factor` (Chen et al. 2023). "dynamic" raises the base with the
            length of the whole sequence, once it exceeds the original length (NTK-aware). "yarn" divides the slow
            frequencies and blends (Peng et al. 2023). "llama3" does the same with other bounds (Llama 3.1).
        factor: ratio of the new to the original length.
        original_max_position_embeddings: the original length; for all types but "linear".
        attention_factor: "yarn": factor of cosines and sines; None derives it from `factor` and the mscales.
        beta_fast: "yarn": frequencies with more rotations than this in the original length stay; 32 if None.
        beta_slow: "yarn": frequencies with fewer rotations than this in it are divided by `factor`; 1 if None.
        mscale: "yarn": `attention_factor` is derived from this and `mscale_all_dim`.
        mscale_all_dim: "yarn": see `mscale`.
        truncate: "yarn": round the bounds of the blend to whole frequencies; True if None.
        low_freq_factor: "llama3": wavelengths over the original length / this are multiplied by `factor`.
        high_freq_factor: "llama3": wavelengths under the original length / this stay.

    Raises:
        ConfigError: an unknown type, a field that its type lacks or does not use, or a factor below 1.
    """

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_FIELDS:
            remedy = "Leave rope_scaling out for plain rotary embeddings."
            expected = f"one of {', '.join(ROPE_FIELDS)}"
            raise ConfigError("rope_scaling.rope_type", expected=expected, got=repr(self.rope_type), remedy=remedy)
        if not self.factor >= 1:
            remedy = "It says how much longer sequences may be."
            raise ConfigError("rope_scaling.factor", expected="at least 1", got=self.factor, remedy=remedy)
        needed, possible = ROPE_FIELDS[self.rope_type]
        for name in (f.name for f in fields(self) if f.name not in ("rope_type", "factor")):
            value = getattr(self, name)
            if name in needed and value is None:
                expected, remedy = f'a number for "{self.rope_type}"', "Set it as the model was trained."
            elif name not in (*needed, *possible) and value is not None:
                expected, remedy = f'nothing for "{self.rope_type}"', "Leave it out, or choose another rope_type."
            elif name != "truncate" and value is not None and not value > 0:
                expected, remedy = "a positive number", "Set it as the model was trained."
            else:
                continue
            raise ConfigError(f"rope_scaling.{name}", expected=expected, got=value, remedy=remedy)
        if self.rope_type == "llama3":
            assert self.low_freq_factor is not None
            assert self.high_freq_factor is not None
            if not self.low_freq_factor < self.high_freq_factor:
                raise ConfigError(
                    "rope_scaling.high_freq_factor",
                    expected=f"more than low_freq_factor={self.low_freq_factor}",
                    got=self.high_freq_factor,
                    remedy="Llama 3.1 has 1 and 4.",
                )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a `Decoder`.

    Args:
        vocab_size: number of token ids.
        dim: width of the residual stream; `dim // n_heads` is the headdim unless `head_dim` sets another.
        n_layers: number of blocks.
        n_heads: query heads.
        n_kv_heads: key and value heads, a divisor of `n_heads`.
        ffn_dim: hidden width of the SwiGLU layer.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: the head shares the embedding's weight.
        head_dim: width of one attention head, even, from 16 to 256; None is `dim // n_heads`.
        qkv_bias: queries, keys and values have a bias, as in Qwen 2.
        o_bias: attention's output projection has a bias too.
        qk_norm: queries and keys are normalised head by head before rotation, as in Qwen 3.
        sliding_window: number of keys that a query sees, including its own; None is all keys up to its own.
        sliding_layers: layers with the window, counted from 0; None is all layers.
        rope_scaling: scaling for sequences longer than in the model's first training.
        max_position_embeddings: longest sequence that the model supports; only config.json uses it.
        family: transformers' model_type in config.json; None is the first that fits.

    Raises:
        ConfigError: an impossible shape.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    head_dim: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int | None = None
    family: Family | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, expected="a positive number", got=getattr(self, name), remedy="Raise it.")
        for name in ("sliding_window", "max_position_embeddings"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, expected="None or at least 1", got=value, remedy="None is no limit.")
        if self.head_dim is None and self.dim % self.n_heads:
            raise ConfigError(
                "dim", expected=f"a multiple of n_heads={self.n_heads}", got=self.dim, remedy="Or set head_dim."
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                "n_kv_heads",
                expected=f"a divisor of n_heads={self.n_heads}",
                got=self.n_kv_heads,
                remedy="Each key/value head serves the same number of query heads: choose a divisor.",
            )
        if self.headdim % 2 or not 16 <= self.headdim <= 256:
            raise ConfigError(
                "headdim",
                expected="an even dim // n_heads or head_dim from 16 to 256",
                got=self.headdim,
                remedy="Change dim or n_heads, or set head_dim.",
            )
        self._check_layers()
        if self.family is not None and self.family not in get_args(Family):
            expected, remedy = f"one of {', '.join(get_args(Family))}", "Leave it out for one that fits."
            raise ConfigError("family", expected=expected, got=repr(self.family), remedy=remedy)

    @property
    def headdim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.headdim

    @property
    def kv_dim(self) -> int:
        """Width of all KV heads together."""
        return self.n_kv_heads * self.headdim

    def window(self, layer: int) -> int | None:
        """Returns the number of keys that a query of `layer` sees, including its own; None is no limit."""
        has_one = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if has_one else None

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> ModelConfig:
        """Inverts dataclasses.asdict; fields that an older version did not write take their defaults.

        Raises:
            ConfigError: a field is unknown to this version, or a required field is missing.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            remedy = "A newer version may have written it."
            raise ConfigError(unknown[0], expected="a field of ModelConfig", got="an unknown one", remedy=remedy)
        plain = dict(values)
        try:
            if isinstance(scaling := plain.get("rope_scaling"), dict):
                plain["rope_scaling"] = RopeScaling(**scaling)
            return cls(**plain)
        except TypeError as error:
            raise ConfigError(
                "model", expected="the fields of ModelConfig", got=str(error), remedy="Use what asdict gives."
            ) from error

    def _check_layers(self) -> None:
        layers = self.sliding_layers
        if layers is None:
            return
        if self.sliding_window is None:
            remedy = "Set sliding_window, or leave sliding_layers out."
            raise ConfigError("sliding_layers", expected="None without a sliding_window", got=layers, remedy=remedy)
        if sorted(set(layers) & set(range(self.n_layers))) != sorted(layers):
            expected = f"different layers from 0 to {self.n_layers - 1}"
            raise ConfigError("sliding_layers", expected=expected, got=layers, remedy="Count layers from 0.")
