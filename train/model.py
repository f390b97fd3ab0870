"""A Llama-style decoder whose attention runs on one device or on a ring of them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.errors import ArgumentError, ConfigError

INIT_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a `Decoder`.

    Args:
        vocab_size: number of token ids.
        dim: width of the residual stream; `dim // n_heads` is the headdim, even, from 16 to 256.
        n_layers: number of blocks.
        n_heads: query heads.
        n_kv_heads: key and value heads, a divisor of `n_heads`.
        ffn_dim: hidden width of the SwiGLU layer.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: the head shares the embedding's weight.
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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, expected="a positive number", got=getattr(self, name), remedy="Raise it.")
        if self.dim % self.n_heads:
            raise ConfigError(
                "dim", expected=f"a multiple of n_heads={self.n_heads}", got=self.dim, remedy="Change dim or n_heads."
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
                expected="an even dim // n_heads from 16 to 256",
                got=self.headdim,
                remedy="Change dim or n_heads.",
            )

    @property
    def headdim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    def window(self, layer: int) -> int | None:
        """Keys that a query of `layer` sees, its own counted; None is all before it."""
        return None


@dataclass(frozen=True)
class Init:
    """How a weight is drawn: truncated normal of `std`, from a generator seeded by `seed` and the weight's own name.

    The draw does not depend on other weights, on the global generator or on the world size, so that any rank
    can make any weight, and every sharding starts from the same model.
    """

    name: str
    seed: int
    std: float = INIT_STD

    def fill(self, weight: Tensor) -> None:
        """Overwrites `weight`; of a DTensor every rank draws the whole and keeps its shard."""
        digest = hashlib.blake2b(f"{self.seed}/{self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        full = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        nn.init.trunc_normal_(full, std=self.std, a=-3 * self.std, b=3 * self.std, generator=generator)
        with torch.no_grad():
            if isinstance(weight, DTensor):
                full = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
            weight.copy_(full)


class Linear(nn.Module):
    """x @ weight.T, weight (out_features, in_features)."""

    def __init__(self, in_features: int, out_features: int, init: Init) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight, unless it has no storage yet."""
        if not self.weight.is_meta:
            self.init.fill(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return nn.functional.linear(x, self.weight)


class Embedding(nn.Module):
    """weight[input_ids], weight (vocab_size, dim)."""

    def __init__(self, vocab_size: int, dim: int, init: Init) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight, unless it has no storage yet."""
        if not self.weight.is_meta:
            self.init.fill(self.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(...) int64 -> (..., dim)."""
        return nn.functional.embedding(input_ids, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Sets the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class KVCache:
    """Keys and values of the tokens so far, (batch, max_seqlen, n_kv_heads, headdim) a layer, for one rank."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys, self.values, self.length = keys, values, 0

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        batch: int,
        max_seqlen: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> KVCache:
        """A cache with room for `max_seqlen` tokens and none in it."""
        shape = (batch, max_seqlen, config.n_kv_heads, config.headdim)
        keys, values = (
            [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layers)] for _ in range(2)
        )
        return cls(keys, values)

    @property
    def max_seqlen(self) -> int:
        """Tokens that fit."""
        return self.keys[0].shape[1]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new rows behind the old ones of `layer` and returns all of them; `advance` makes them old."""
        end = self.length + k.shape[1]
        if end > self.max_seqlen:
            raise ArgumentError(
                "cache",
                expected=f"room for {end} tokens",
                got=f"max_seqlen={self.max_seqlen}",
                remedy="Make a longer cache with KVCache.empty.",
            )
        self.keys[layer][:, self.length : end] = k
        self.values[layer][:, self.length : end] = v
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def advance(self, seqlen: int) -> None:
        """Counts the rows that every layer has appended."""
        self.length += seqlen


@dataclass(frozen=True)
class Step:
    """What all blocks of one forward share: rotary cosines and sines (batch | 1, seqlen, 1, headdim / 2), ring, cache.

    One plain value, so that FSDP's casting of inputs does not round the angles to the compute dtype.
    """

    cos: Tensor
    sin: Tensor
    context: rf.ContextParallel | None
    cache: KVCache | None
    documents: rf.Documents | None = None


def rotary_angles(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * rope_theta^(-2 i / headdim), (batch | 1, seqlen, 1, headdim / 2).

    The angles are formed in float64: at position 10^6 a float32 angle is wrong by up to 0.03 radians.
    """
    index = torch.arange(0, config.headdim, 2, device=position_ids.device, dtype=torch.float64)
    frequency = config.rope_theta ** (-index / config.headdim)
    if position_ids.ndim == 1:
        position_ids = position_ids[None]
    angle = position_ids[:, :, None, None].double() * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + headdim / 2]) in the angles' dtype; x (batch, seqlen, nheads, headdim)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal attention on rotated queries and keys."""

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        name, residual_std = f"layers.{layer}.self_attn", INIT_STD / math.sqrt(2 * config.n_layers)
        q_dim, kv_dim = config.n_heads * config.headdim, config.n_kv_heads * config.headdim
        self.layer, self.headdim = layer, config.headdim
        self.q_proj = Linear(config.dim, q_dim, Init(f"{name}.q_proj", seed))
        self.k_proj = Linear(config.dim, kv_dim, Init(f"{name}.k_proj", seed))
        self.v_proj = Linear(config.dim, kv_dim, Init(f"{name}.v_proj", seed))
        self.o_proj = Linear(q_dim, config.dim, Init(f"{name}.o_proj", seed, residual_std))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """(batch, seqlen, dim) -> (batch, seqlen, dim)."""
        q, k, v = (p(x).unflatten(-1, (-1, self.headdim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        mask = rf.Causal() if step.documents is None else rf.Causal() & step.documents
        if step.context is not None:
            out = rf.ring_attention(q, k, v, step.context, mask=mask)
        else:
            if step.cache is not None:
                k, v = step.cache.append(self.layer, k, v)
            out = rf.flash_attention(q, k, v, mask=mask)
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        name, residual_std = f"layers.{layer}.mlp", INIT_STD / math.sqrt(2 * config.n_layers)
        self.gate_proj = Linear(config.dim, config.ffn_dim, Init(f"{name}.gate_proj", seed))
        self.up_proj = Linear(config.dim, config.ffn_dim, Init(f"{name}.up_proj", seed))
        self.down_proj = Linear(config.ffn_dim, config.dim, Init(f"{name}.down_proj", seed, residual_std))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        self.activation_checkpointing = False
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, layer, seed)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config, layer, seed)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """(batch, seqlen, dim) -> (batch, seqlen, dim)."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            # Inside the block, so that FSDP's hooks wrap the checkpoint and gather the weights once for its re-run.
            out = checkpoint(self._compute, x, step, use_reentrant=False)
            assert isinstance(out, Tensor)
            return out
        return self._compute(x, step)

    def _compute(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Tokens to next-token logits; parameters are named as in Hugging Face's Llama.

    Args:
        config: the shape.
        seed: of the initial weights, which depend on it and on their names only.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.dim, Init("embed_tokens", seed))
        self.layers = nn.ModuleList(Block(config, layer, seed) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.dim, config.vocab_size, Init("lm_head", seed))

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Keeps only each block's input for the backward and runs the block again there, its ring included."""
        for block in self.layers:
            assert isinstance(block, Block)
            block.activation_checkpointing = enabled

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: rf.ContextParallel | None = None,
        cache: KVCache | None = None,
        documents: rf.Documents | None = None,
    ) -> Tensor:
        """Logits (batch, seqlen, vocab_size), of what `hidden` makes of the same arguments."""
        x = self.hidden(input_ids, position_ids, context, cache, documents)
        return nn.functional.linear(x, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """(vocab_size, dim)."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: rf.ContextParallel | None = None,
        cache: KVCache | None = None,
        documents: rf.Documents | None = None,
    ) -> Tensor:
        """Final normed states (batch, seqlen, dim).

        Args:
            input_ids: (batch, seqlen) int64; with `context` this rank's shard, in the context's layout.
            position_ids: (seqlen,) or (batch, seqlen) int64 positions in the whole sequence.
            context: the ranks that share the sequence; None when this rank has all of it.
            cache: keys and values of the tokens before `input_ids`; extended. For one rank, without `context`.
            documents: where the whole sequence's documents begin, each of which sees itself only.

        Raises:
            ArgumentError: `position_ids` does not fit `input_ids`, `cache` is full, or `cache` comes with `context`.
        """
        if position_ids.shape[-1] != input_ids.shape[-1] or position_ids.ndim not in (1, 2):
            raise ArgumentError(
                "position_ids",
                expected=f"({input_ids.shape[-1]},) or {tuple(input_ids.shape)}",
                got=tuple(position_ids.shape),
                remedy="Pass one position a token of input_ids.",
            )
        if cache is not None and context is not None:
            raise ArgumentError(
                "cache",
                expected="None with a context",
                got="a KVCache",
                remedy="Generate on one rank, without a context.",
            )
        x = self.embed_tokens(input_ids)
        angle_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        step = Step(*rotary_angles(self.config, position_ids, angle_dtype), context, cache, documents)
        for block in self.layers:
            x = block(x, step)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        return self.norm(x)
