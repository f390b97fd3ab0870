"""Contenders of the training benchmark: a Decoder on a ring, and the same Decoder on torch's attention.

All have the same weights, tokens, FSDP2, dtypes, linear layers, loss without whole logits, clipping and AdamW. They
differ in their attention. On one GPU a peer runs on scaled_dot_product_attention, on several GPUs on torch's
context_parallel. `flash_attention.py` has a peer on FlashAttention. When blocks checkpoint, the ring keeps their (out,
lse), and torch's attention is recomputed. Under context_parallel it takes KV repeated to the query heads and is not
compiled, and feed-forward layers take all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.train.lightning.optimizer import OptimizerConfig, clip_to_norm, make_adamw, norm_of
from ringflash.train.lightning.sharded import shard_model
from ringflash.train.lightning.strategy import sum_gradients
from ringflash.train.models.budget import available_memory, check_activations, plan_activations
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Attention, Block, Decoder, Step, compiled
from ringflash.train.models.loss import TokenLosses
from ringflash.train.models.memory import GIB, TrainingShape, host_share
from ringflash.train.models.rotary import rotate
from ringflash.train.models.weights import INIT_STD
from ringflash.train.torchao_private import LinearDtype, check_float8, compile_options, refresh_scales, use_float8

SHAPES = {
    "tiny": ModelConfig(vocab_size=257, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128),
    "1b": ModelConfig(
        vocab_size=128256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True
    ),  # as Llama 3.2 1B
    "8b": ModelConfig(
        vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336
    ),  # Llama 3.1 8B
}
# Share of a GPU's memory that torch may take. With the same bound and the same work, all ranks run out of memory in the
# same place, and none waits for another.
MEMORY_FRACTION = 0.95
LARGEST_NORM = 1.0  # norm to which gradients are clipped


@dataclass(frozen=True)
class Training:
    """Settings of one training run.

    Args:
        config: shape of the model.
        seqlen: tokens of the one sequence, over all ranks.
        weights: mesh of all ranks, over which the weights are sharded.
        ring: mesh of the same ranks, with a separate group for attention.
        device: device of this rank.
        dtype: dtype of activations and gathered weights; weights, gradients and optimizer state are float32.
        compiled: whether blocks are compiled.
        cuda_graphs: whether ringflash replays all of attention's passes, and not only those of grouped hops.
        offload: whether ringflash keeps activations in the host's memory.
        activations: activations that blocks keep: "none" or "block", or "auto" for as many as fit. Under torch's
            context_parallel blocks keep their inputs alone.
        linears: dtype in which the linear layers of blocks multiply, as `linear_dtype` of LanguageModel.
    """

    config: ModelConfig
    seqlen: int
    weights: DeviceMesh
    ring: DeviceMesh
    device: torch.device
    dtype: torch.dtype
    compiled: bool
    cuda_graphs: bool = False
    offload: bool = False
    activations: Literal["none", "block", "auto"] = "block"
    linears: LinearDtype = "compute"

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Returns the inputs and labels of the whole sequence, (1, seqlen) each, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab_size, (1, self.seqlen + 1), generator=generator).to(self.device)
        return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True)
class Trainee:
    """A model in training.

    Args:
        step: runs one training step; returns this rank's part of the loss before the step, detached.
        facts: settings of the training, for the contender's row.
    """

    step: Callable[[], Tensor]
    facts: dict[str, Any]


Contender = Callable[[Training], AbstractContextManager[Trainee]]


@contextmanager
def ringflash(training: Training) -> Generator[Trainee, None, None]:
    """Prepares a Decoder on a ring, which trains as LanguageModel does under RingAttentionStrategy."""
    context = rf.ContextParallel(training.ring, fixed_lengths=True, cuda_graphs=training.cuda_graphs or "auto")
    with torch.device("meta"):
        model = Decoder(training.config)
    kept = kept_of(training)
    choice = {"kept_blocks": kept.blocks, "offloaded_blocks": kept.offloaded, "head_groups": kept.head_groups}
    model.keep_activations("block", **choice)
    step = step_of(on_device(model, training, kept), training)
    input_ids, labels = map(context.shard, training.tokens())
    position_ids = context.positions(training.seqlen, device=training.device)
    facts = {"layout": context.layout, "transport": context.transport_kind, "cuda_graphs": training.cuda_graphs}
    facts |= {"offload": training.offload, "keeps_weights": kept.weights, **choice}
    if kept.planned is not None:
        facts["planned_gib"] = round(kept.planned / GIB, 2)
    yield Trainee(partial(step, input_ids, position_ids, context, labels=labels), facts)


@dataclass(frozen=True)
class Kept:
    """Tensors that stay for the backward.

    Args:
        blocks: number of the last blocks that keep all their activations.
        weights: whether the gathered weights of all blocks stay.
        offloaded: number of the first blocks of ringflash that keep their tensors in host memory.
        head_groups: number of groups of heads in which their attention runs.
        planned: bytes of the plan; None without one.
    """

    blocks: int = 0
    weights: bool = False
    offloaded: int = 0
    head_groups: int = 1
    planned: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Entries of a contender's row."""
        return {"kept_blocks": self.blocks, "keeps_weights": self.weights}


def kept_of(training: Training) -> Kept:
    """Returns what stays for the backward, the same on all ranks."""
    checkpointing = None if training.activations == "auto" else training.activations
    check_activations(checkpointing, "auto", training.offload)
    blocks = training.config.n_layers
    if checkpointing is not None or training.device.type != "cuda":
        return Kept(0 if checkpointing == "block" else blocks, offloaded=blocks if training.offload else 0)
    world_size, compiled = training.weights.size(), training.compiled
    tokens = training.seqlen // world_size
    options: dict[str, Any] = {"in_pieces": compiled, "compiled": compiled, "linear_dtype": training.linears}
    options |= {"rounded": rounds_weights(training), "copied": not rounds_weights(training)}
    shape = TrainingShape(tokens, world_size, training.dtype, reshard_after_forward=None, **options)
    own_host = host_share(torch.cuda.device_count()) if training.linears == "compute" else 0
    memory = torch.tensor([*torch.cuda.mem_get_info(training.device), own_host], device=training.device)
    dist.all_reduce(memory, dist.ReduceOp.MIN, training.weights.get_group())
    least, total, host = memory.tolist()
    available = min(available_memory(least), int(MEMORY_FRACTION * total))
    plan = plan_activations(training.config, shape, "auto", available, total, "free", host)
    _, kept, offloaded, groups = plan.activations
    return Kept(kept, plan.keeps_weights, offloaded, groups, plan.planned)


def rounds_weights(training: Training) -> bool:
    """Returns whether the layers round their weights themselves, as those of a LanguageModel on one rank."""
    return training.weights.size() == 1


@contextmanager
def sdpa(training: Training) -> Generator[Trainee, None, None]:
    """Prepares the same Decoder on scaled_dot_product_attention, for one GPU.

    Whole blocks are compiled, and as many keep all their activations as on the ring. The kernels are cuDNN's on a GPU.
    """
    kept = kept_of(training)
    with torch.device("meta"):
        model = Decoder(training.config)
        for layer, block in enumerate(model.layers):
            cast("Block", block).self_attn = SdpaAttention(training.config, layer, seed=0)
    model.keep_activations("block", kept_blocks=kept.blocks)
    step = step_of(on_device(model, training, kept), training)
    input_ids, labels = training.tokens()
    position_ids = torch.arange(training.seqlen, device=training.device)
    backend = SDPBackend.CUDNN_ATTENTION if training.device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend):
        yield Trainee(partial(step, input_ids, position_ids, labels=labels), kept.facts)


class SdpaAttention(Attention):
    """Attention by scaled_dot_product_attention, with grouped KV heads as they are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Returns attention's output (batch, seqlen, nheads, headdim)."""
        shared = q.shape[2] > k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return out.transpose(1, 2)


@contextmanager
def torch_context_parallel(training: Training) -> Generator[Trainee, None, None]:
    """Prepares the same Decoder on torch's context_parallel, with cuDNN and all-gathers.

    Each whole block is checkpointed.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    with torch.device("meta"):
        model = PeerDecoder(training.config)
    step = step_of(on_device(model, training, Kept()), training)
    input_ids, labels = (x.clone() for x in training.tokens())  # context_parallel cuts them in place
    position_ids = torch.arange(training.seqlen, device=training.device)
    set_rotate_method("allgather")
    backend = SDPBackend.CUDNN_ATTENTION if training.device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    buffers = [input_ids, labels, position_ids]
    with sdpa_kernel(backend), context_parallel(training.ring, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
        yield Trainee(partial(step, input_ids, position_ids, labels=labels), {"layout": "zigzag"})


class PeerBlock(Block):
    """Block that keeps only its input and runs again in its backward, attention included.

    The parts before and after attention are compiled. Attention is not, since context_parallel makes DTensors for it.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, seed=0)
        self.before: Callable[[Tensor, Step], tuple[Tensor, Tensor, Tensor]] = self._before
        self.after: Callable[[Tensor, Tensor], Tensor] = self._after

    def compile_parts(self, backend: str | Callable[..., Any], options: dict[str, Any] | None) -> None:
        """Compiles the parts before and after attention."""
        self.before = compiled(self._before, backend, options)
        self.after = compiled(self._after, backend, options)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Returns the output of the block: (batch, seqlen, dim) -> (batch, seqlen, dim)."""
        out = checkpoint(self._whole, x, step, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(out, Tensor)
        return out

    def _whole(self, x: Tensor, step: Step) -> Tensor:
        return self.after(x, _attend(*self.before(x, step)))

    def _before(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of the block's input, with KV heads repeated to the query heads.

        Shapes: (batch, seqlen, dim) -> (batch, nheads, seqlen, headdim) each.
        """
        attention, x = self.self_attn, self.input_layernorm(x)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, attention.headdim)) for project in projections)
        q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        group = q.shape[2] // k.shape[2]
        k, v = (each.repeat_interleave(group, 2) for each in (k, v))
        return q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def _after(self, x: Tensor, out: Tensor) -> Tensor:
        """Returns the output of the block from its input `x` and from attention's output.

        Shapes: (batch, seqlen, dim) and (batch, nheads, seqlen, headdim) -> (batch, seqlen, dim).
        """
        x = x + self.self_attn.o_proj(out.transpose(1, 2).flatten(-2))
        return x + self.mlp.whole(self.post_attention_layernorm(x))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention, (batch, nheads, seqlen, headdim) each.

    It calls the function that context_parallel replaces by name.
    """
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class PeerDecoder(Decoder):
    """Decoder that consists of `PeerBlock`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(PeerBlock(config, layer) for layer in range(config.n_layers))

    def compile_blocks(
        self, backend: str | Callable[..., Any] = "inductor", options: dict[str, Any] | None = None
    ) -> None:
        """Compiles the parts of each block."""
        for block in self.layers:
            cast("PeerBlock", block).compile_parts(backend, options)


def on_device(model: Decoder, training: Training, kept: Kept) -> Decoder:
    """Compiles the blocks of `model`, shards it as a LanguageModel does, and draws its weights.

    Each rank draws only its shard to save time. Linear layers of the blocks become float8 ones before, if
    `training.linears` asks for it.
    """
    check_float8(training.linears, training.device, training.dtype)
    sharded = not rounds_weights(training)
    use_float8(model.layers, training.linears, training.device, sharded=sharded, speak=False)
    if training.compiled:
        model.compile_blocks(options=compile_options(training.linears))
    if not sharded:
        model.round_weights(training.dtype)
    else:
        options: dict[str, Any] = {"head": model.lm_head, "reshard_after_forward": not kept.weights}
        shard_model(model, model.layers, training.weights, training.dtype, **options)
        sum_gradients(model)
    model.to_empty(device=training.device)
    generator = torch.Generator(training.device).manual_seed(training.weights.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.ndim > 1:
                local.normal_(0, INIT_STD, generator=generator)
            else:
                local.fill_(1)
    return model


def step_of(model: Decoder, training: Training) -> Callable[..., Tensor]:
    """Returns a step: forward on its arguments, backward, clipping and AdamW. The step returns the loss."""
    optimizer = make_adamw(model.parameters(), OptimizerConfig())

    def step(*args: Any, **kwargs: Any) -> Tensor:
        if training.linears == "fp8":
            refresh_scales(model)
        loss = cast("TokenLosses", model(*args, **kwargs)).total / training.seqlen
        loss.backward()
        norm = norm_of([p.grad for p in model.parameters() if p.grad is not None])
        clip_to_norm(model.parameters(), LARGEST_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
