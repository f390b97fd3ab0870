"""Decoder in the style of Llama, Mistral and Qwen, with attention on one device or on a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

import ringflash as rf
from ringflash.errors import ArgumentError, ConfigError
from ringflash.train.models.activations import (
    ActivationCheckpointing,
    Activations,
    HostMemory,
    check_offload,
    recompute,
)
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.kv_cache import KVCache
from ringflash.train.models.linear_loss import linear_token_loss
from ringflash.train.models.loss import TokenLosses
from ringflash.train.models.memory import OFFLOADED_ROWS, feed_forward_pieces
from ringflash.train.models.rotary import rotary_angles, rotate, scaled_length
from ringflash.train.models.weights import INIT_STD, Init, Weights

# torch's kernel of rms_norm gives wrong rows beyond 2^32 elements (torch 2.11, an H200). Compiled code is right.
FUSED_NORM_ELEMENTS = 2**31


class Layer(nn.Module):
    """A module with its own parameters, drawn at random, or read if `stored` is set."""

    stored: Callable[[str, Tensor], None] | None = None  # fills a parameter, given its name in this module
    rounding: torch.dtype | None = None  # dtype in which parameters enter the forward; None: as they are

    def rounded(self, parameter: Tensor) -> Tensor:
        """Returns one of its parameters as it enters the forward. Its gradient is in the dtype of the parameter."""
        return parameter if self.rounding is None else parameter.to(self.rounding)

    def reset_parameters(self) -> None:
        """Draws or reads the parameters that have storage."""
        for name, parameter in self.named_parameters(recurse=False):
            if not parameter.is_meta:
                (self.stored or self.draw)(name, parameter)

    def draw(self, name: str, parameter: Tensor) -> None:
        """Overwrites the parameter `name` with its initial values."""
        raise NotImplementedError


class Linear(Layer, nn.Linear):
    """x @ weight.T + bias, weight (out_features, in_features); the bias, if there is one, starts at zero."""

    only_multiplies = True  # a float8 layer may take its place

    def __init__(self, in_features: int, out_features: int, init: Init, *, bias: bool = False) -> None:
        self.init = init
        super().__init__(in_features, out_features, bias)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps (..., in_features) to (..., out_features)."""
        bias = None if self.bias is None else self.rounded(self.bias)  # pyright: ignore[reportUnnecessaryComparison]
        return nn.functional.linear(x, self.rounded(self.weight), bias)

    def draw(self, name: str, parameter: Tensor) -> None:
        """Draws the weight, or zeros the bias."""
        if name == "weight":
            self.init.fill(parameter)
        else:
            nn.init.zeros_(parameter)


class Embedding(Layer, nn.Embedding):
    """Embedding weight[input_ids], from (...) int64 to (..., dim)."""

    def __init__(self, vocab_size: int, dim: int, init: Init) -> None:
        self.init = init
        super().__init__(vocab_size, dim)

    def forward(self, input_ids: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps (...) int64 to (..., dim). It rounds the rows that it takes, which are fewer than the weight's."""
        return self.rounded(super().forward(input_ids))

    def draw(self, name: str, parameter: Tensor) -> None:
        """Draws the weight."""
        self.init.fill(parameter)


class Head(Linear):
    """Head x @ weight.T; with labels it returns the loss, without whole logits."""

    only_multiplies = False

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | TokenLosses:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps (..., dim) to (..., vocab_size), or to the losses."""
        return _logits_or_loss(x, self.rounded(self.weight), labels)


def _logits_or_loss(x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor | TokenLosses:
    return nn.functional.linear(x, weight) if labels is None else linear_token_loss(x, weight, labels)


class RMSNorm(Layer, nn.RMSNorm):
    """Norm x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., dim) to (..., dim)."""
        weight = self.rounded(self.weight)
        if x.numel() <= FUSED_NORM_ELEMENTS or torch.compiler.is_compiling():
            return self._normed(x, weight)
        rows = x.flatten(0, -2)
        pieces = rows.split(max(FUSED_NORM_ELEMENTS // rows.shape[1], 1))
        return torch.cat([self._normed(piece, weight) for piece in pieces]).view(x.shape)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    def draw(self, name: str, parameter: Tensor) -> None:
        """Sets the weight to one."""
        nn.init.ones_(parameter)


@dataclass(frozen=True)
class Step:
    """Values that all blocks of one forward share: rotary cosines and sines, ring, cache, packing.

    Cosines and sines are (batch | 1, seqlen, 1, headdim / 2). They are passed in one plain object, so that FSDP, which
    casts tensor arguments, does not round the angles to the compute dtype.
    """

    cos: Tensor
    sin: Tensor
    context: rf.ContextParallel | None
    cache: KVCache | None
    documents: rf.Documents | None


class Attention(nn.Module):
    """Grouped-query causal attention on rotated queries and keys, over a window or over all earlier keys."""

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        name, residual_std = f"layers.{layer}.self_attn", INIT_STD / math.sqrt(2 * config.n_layers)
        q_dim, kv_dim, bias = config.q_dim, config.kv_dim, config.qkv_bias
        self.layer, self.headdim, window = layer, config.headdim, config.window(layer)
        # A window of w keys holds a query's own key and the w - 1 before it.
        self.mask = rf.Causal() if window is None else rf.Causal() & rf.SlidingWindow(window - 1)
        self.q_proj = Linear(config.dim, q_dim, Init(f"{name}.q_proj", seed), bias=bias)
        self.k_proj = Linear(config.dim, kv_dim, Init(f"{name}.k_proj", seed), bias=bias)
        self.v_proj = Linear(config.dim, kv_dim, Init(f"{name}.v_proj", seed), bias=bias)
        self.o_proj = Linear(q_dim, config.dim, Init(f"{name}.o_proj", seed, residual_std), bias=config.o_bias)
        self.q_norm = RMSNorm(config.headdim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.headdim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Maps (batch, seqlen, dim) to (batch, seqlen, dim)."""
        return self.o_proj(self.heads(x, step))

    def heads(self, x: Tensor, step: Step, *group: Tensor) -> Tensor:
        """Maps (batch, seqlen, dim) to the heads' results (batch, seqlen, nheads headdim), which `o_proj` takes.

        With `group`, one of `head_groups`, only the heads of that group attend.
        """
        layers = self.q_proj, self.k_proj, self.v_proj
        projected = self._project(x, *group) if group else (layer(x) for layer in layers)
        q, k, v = (each.unflatten(-1, (-1, self.headdim)) for each in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        return self.attend(q, k, v, step).flatten(-2)

    def head_groups(self, number: int) -> list[tuple[Tensor, ...]]:
        """Returns the rows of the weights, and of the biases if there are any, of q, k and v for each group of heads.

        A group consists of neighbouring KV heads and their query heads. No group stands for all heads of the layers.
        """
        layers = self.q_proj, self.k_proj, self.v_proj
        biases = [layer.bias for layer in layers if layer.bias is not None]  # pyright: ignore[reportUnnecessaryComparison]
        whole = [*(layer.weight for layer in layers), *biases]
        return [()] if number == 1 else list(zip(*(each.chunk(number) for each in whole), strict=True))

    def check_head_groups(self, number: int) -> None:
        """Raises ConfigError unless heads can run in `number` groups: of as many KV heads each, with weights to cut."""
        heads, remedy = self.k_proj.out_features // self.headdim, "Leave it out: attention then runs in one group."
        if number < 1 or heads % number:
            raise ConfigError("head_groups", expected=f"a divisor of {heads} KV heads", got=number, remedy=remedy)
        others = [layer for layer in (self.q_proj, self.k_proj, self.v_proj) if type(layer) is not Linear]
        if number > 1 and others:
            expected, got = "1 for layers in place of the decoder's", f"{number} with {type(others[0]).__name__}"
            raise ConfigError("head_groups", expected=expected, got=got, remedy=remedy)

    def _project(self, x: Tensor, *group: Tensor) -> tuple[Tensor, ...]:
        """Maps (batch, seqlen, dim) to q, k and v of a group.

        One product makes all three, so that its backward has one gradient of `x` and not three to be added.
        """
        weights, biases = ([self.q_proj.rounded(each) for each in part] for part in (group[:3], group[3:]))
        bias = torch.cat(biases) if biases else None
        q, k, v = nn.functional.linear(x, torch.cat(weights), bias).split([each.shape[0] for each in weights], dim=-1)
        return q, k, v.contiguous()  # the product's result is then free while heads attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Returns attention's output (batch, seqlen, nheads, headdim)."""
        mask = self.mask if step.documents is None else self.mask & step.documents
        if step.cache is not None:
            return step.cache.attend(self.layer, q, k, v, mask)
        if step.context is not None:
            return rf.ring_attention(q, k, v, step.context, mask=mask)
        return rf.flash_attention(q, k, v, mask=mask)


class FeedForward(nn.Module):
    """SwiGLU layer down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        name, residual_std = f"layers.{layer}.mlp", INIT_STD / math.sqrt(2 * config.n_layers)
        self.gate_proj = Linear(config.dim, config.ffn_dim, Init(f"{name}.gate_proj", seed))
        self.up_proj = Linear(config.dim, config.ffn_dim, Init(f"{name}.up_proj", seed))
        self.down_proj = Linear(config.ffn_dim, config.dim, Init(f"{name}.down_proj", seed, residual_std))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., dim) to (..., dim), one piece of `feed_forward_pieces` after another.

        A compiled backward that recomputes gate and up then holds them for one piece, not for all tokens.
        """
        rows = x.flatten(0, -2)
        pieces = [self.whole(piece) for piece in rows.split(feed_forward_pieces(rows.shape[0]))]
        return pieces[0].view(x.shape) if len(pieces) == 1 else torch.cat(pieces).view(x.shape)

    def whole(self, x: Tensor) -> Tensor:
        """Maps (..., dim) to (..., dim), all tokens at once."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Block x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        self.checkpointing: ActivationCheckpointing = "none"
        self.host_memory: HostMemory | None = None
        self.head_groups = 1
        self.compiled: Callable[[Tensor, Step], Tensor] | None = None
        self.compiled_parts: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, layer, seed)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config, layer, seed)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Maps (batch, seqlen, dim) to (batch, seqlen, dim)."""
        if not torch.is_grad_enabled() or step.cache is not None:  # a cache must take its rows only once
            return self._compute(x, step)
        # Recomputes inside the block, so that FSDP's hooks wrap all of it and gather the weights once.
        if self.host_memory is None:
            return self._run(x, step) if self.compiled is None else self.compiled(x, step)
        return self._run_in_parts(x, step, self.host_memory)

    def _run(self, x: Tensor, step: Step) -> Tensor:
        """Runs the block, checkpointed if it is to be."""
        return self._compute(x, step) if self.checkpointing == "none" else recompute(self._compute, x, step)

    def _run_in_parts(self, x: Tensor, step: Step, memory: HostMemory) -> Tensor:
        """Runs attention by groups of heads, and then the rest by pieces of the tokens, each checkpointed on its own.

        A backward then holds tensors of the rest for one piece at a time, and of attention for one group when those are
        gone. Input and attention's results are in host memory once, since groups share the input and the pieces are
        parts of both.
        """
        attend, finish = self.compiled_parts or (partial(self._attention_alone, offload=memory), self._rest_alone)
        staying, outs, cut = (*self.parameters(), step.cos, step.sin), list[Tensor](), list[Sequence[Tensor]]()
        with memory.hooks(staying, wholes=(x,)):
            for group in self.self_attn.head_groups(self.head_groups):
                outs.append(attend(x, step, *group))
                # Cut here, so that the backward joins the gradient of a group's result when it comes to that group.
                cut.append(_rows(outs[-1]))
        with memory.hooks(staying, wholes=(x, *outs)):
            return torch.cat([finish(*piece) for piece in zip(_rows(x), *cut, strict=True)]).view(x.shape)

    def _attention_alone(self, x: Tensor, step: Step, *group: Tensor, offload: HostMemory | None = None) -> Tensor:
        """Compiled code omits `offload`: the hooks see all tensors that a graph saves."""
        return recompute(self._attention, x, step, *group, offload=offload)

    def _rest_alone(self, x: Tensor, *outs: Tensor) -> Tensor:
        return recompute(self._rest, x, *outs)

    def _attention(self, x: Tensor, step: Step, *group: Tensor) -> Tensor:
        return self.self_attn.heads(self.input_layernorm(x), step, *group)

    def _rest(self, x: Tensor, *outs: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1))
        return x + self.mlp.whole(self.post_attention_layernorm(x))

    def _compute(self, x: Tensor, step: Step) -> Tensor:
        return self._with_feed_forward(self._with_attention(x, step))

    def _with_attention(self, x: Tensor, step: Step) -> Tensor:
        return x + self.self_attn(self.input_layernorm(x), step)

    def _with_feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


def _rows(x: Tensor) -> Sequence[Tensor]:
    """Returns the pieces of tokens of an offloaded block, (rows, dim) each of x (batch, seqlen, dim)."""
    return x.flatten(0, -2).split(OFFLOADED_ROWS)


def compiled(
    function: Callable[..., Any], backend: str | Callable[..., Any], options: dict[str, Any] | None
) -> Callable[..., Any]:
    """Returns `function` compiled in one piece. `options` are those of inductor; other backends get none."""
    options = options if backend == "inductor" else None
    return torch.compile(function, backend=backend, options=options or None, fullgraph=True)


class Decoder(nn.Module):
    """Decoder from tokens to next-token logits; parameters are named as in Hugging Face's Llama.

    Args:
        config: shape of the decoder.
        seed: seed of the initial weights, which depend only on it and on their names.
        weights: initial weights from a folder instead; each rank reads its own part, once its parameters have storage.

    Raises:
        CheckpointError: `weights` do not fit this shape.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, weights: Weights | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.dim, Init("embed_tokens", seed))
        self.layers = nn.ModuleList(Block(config, layer, seed) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Head(config.dim, config.vocab_size, Init("lm_head", seed))
        if weights is not None:
            weights.check({name: tuple(p.shape) for name, p in self.named_parameters()})
            for name, module in self.named_modules():
                if isinstance(module, Layer):
                    module.stored = partial(weights.fill, name)
                    module.reset_parameters()

    def materialise(self, device: torch.device | str) -> None:
        """Allocates a decoder from the meta device on `device`, sharded or not, and fills its weights."""
        self.to_empty(device=device)
        for module in self.modules():
            if isinstance(module, Layer):
                module.reset_parameters()

    def round_weights(self, dtype: torch.dtype | None) -> None:
        """Makes each layer compute with its weights rounded to `dtype`, as FSDP does with the weights that it gathers.

        None leaves the weights as they are. On one rank FSDP would only copy, and its copies and reductions take the
        host most of a short step.
        """
        for module in self.modules():
            if isinstance(module, Layer):
                module.rounding = dtype

    def keep_activations(
        self,
        checkpointing: ActivationCheckpointing,
        *,
        kept_blocks: int = 0,
        offloaded_blocks: int = 0,
        head_groups: int = 1,
    ) -> None:
        """Sets the activations that blocks keep for the backward; call it before `compile_blocks`.

        "none" checkpoints nothing. "block" keeps inputs and attention's results; the backward recomputes the rest of a
        block without its ring. The last `kept_blocks` keep everything. The first `offloaded_blocks` keep their tensors
        in host memory, and their attention runs in `head_groups`.

        Raises:
            ConfigError: `offloaded_blocks` without "block", or `head_groups` without offloaded blocks, or for heads or
                layers that cannot be cut so.
        """
        check_offload(checkpointing, offloaded_blocks > 0, head_groups)
        host_memory = HostMemory()
        choices = Activations(checkpointing, kept_blocks, offloaded_blocks, head_groups).of_blocks(len(self.layers))
        for block, choice in zip(self._blocks(), choices, strict=True):
            block.checkpointing = "none" if choice == "none" else "block"
            block.host_memory, block.head_groups = (host_memory, head_groups) if choice == "host" else (None, 1)
            block.self_attn.check_head_groups(block.head_groups)

    def compile_blocks(
        self, backend: str | Callable[..., Any] = "inductor", options: dict[str, Any] | None = None
    ) -> None:
        """Compiles each block's forward and backward in training; all blocks of one kind share the compiled code.

        Blocks that keep everything compile another function than the others, since torch bounds the graphs of one.
        Blocks that keep their tensors in host memory compile two parts. `backend` and `options` are as in `compiled`.
        """
        for block in self._blocks():
            if block.host_memory is not None:
                attention = compiled(block._attention_alone, backend, options)
                block.compiled_parts = attention, compiled(block._rest_alone, backend, options)
            else:
                function = block._compute if block.checkpointing == "none" else block._run
                block.compiled = compiled(function, backend, options)

    def _blocks(self) -> list[Block]:
        return [cast("Block", block) for block in self.layers]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: rf.ContextParallel | None = None,
        cache: KVCache | None = None,
        documents: rf.Documents | None = None,
        *,
        labels: Tensor | None = None,
        newest: bool = False,
    ) -> Tensor | TokenLosses:
        """Returns logits (batch, seqlen, vocab_size), or with `labels` the loss, without whole logits.

        Args:
            input_ids: (batch, seqlen) int64; with `context` this rank's shard, in the context's layout. With both
                `context` and a `cache` that holds tokens, the next tokens, whole on every rank.
            position_ids: (seqlen,) or (batch, seqlen) int64 positions in the whole sequence, or in each document.
            context: ranks that share the sequence; None when this rank has all of it.
            cache: keys and values of the tokens before `input_ids`, which this call extends. It must be made for the
                same `context`.
            documents: documents packed into the whole sequence, which do not see each other. Not with `cache`.
            labels: (batch, seqlen) int64, cut as `input_ids`; the loss is computed here, where FSDP has the head whole.
            newest: with `cache`, return logits (batch, 1, vocab_size) of each sequence's newest token only, on every
                rank.

        Raises:
            ArgumentError: `position_ids` or `labels` do not fit `input_ids`; `cache` is full, of another context or
                comes with `documents`; or `newest` comes without `cache`.
        """
        if position_ids.shape[-1] != input_ids.shape[-1] or position_ids.ndim not in (1, 2):
            raise ArgumentError(
                "position_ids",
                expected=f"({input_ids.shape[-1]},) or {tuple(input_ids.shape)}",
                got=tuple(position_ids.shape),
                remedy="Pass one position a token of input_ids.",
            )
        if (newest and cache is None) or (cache is not None and cache.context is not context):
            raise ArgumentError(
                "cache",
                expected="a KVCache made for the context",
                got="none" if cache is None else f"one for {cache.context}",
                remedy="Make it with KVCache.empty(..., context=context).",
            )
        if cache is not None and documents is not None:
            remedy = "Generate from one document a sequence."
            raise ArgumentError("documents", expected="None with a cache", got=repr(documents), remedy=remedy)
        if cache is not None:
            cache.begin(position_ids)
        x = self.embed_tokens(input_ids)
        angle_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        seqlen = input_ids.shape[1]
        length = scaled_length(self.config, seqlen, context, documents) if cache is None else cache.longest
        step = Step(*rotary_angles(self.config, position_ids, angle_dtype, length), context, cache, documents)
        for block in self.layers:
            x = block(x, step)
        if cache is not None:
            cache.finish()
            x = cache.newest(x) if newest else x
        x = self.norm(x)
        if self.lm_head is None:
            return _logits_or_loss(x, self.embed_tokens.rounded(self.embed_tokens.weight), labels)
        return self.lm_head(x, labels)
