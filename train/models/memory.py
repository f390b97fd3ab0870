"""Least memory that training takes, by shape and options: an estimate printed before training begins."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ringflash.errors import ConfigError
from ringflash.train.models.activations import AHEAD_BYTES, ActivationCheckpointing, Activations, pinned_bytes
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.linear_loss import chunk_rows
from ringflash.train.torchao_private import LinearDtype
from ringflash.train.weights.nf4 import BLOCK, BLOCK_BYTES

GIB = 2.0**30
# A block's feed-forward splits a micro-batch of at least this many tokens into pieces. There are few pieces, because
# each adds to all of the weights' gradients. Only two numbers of pieces occur, because each needs a compiled graph, and
# torch.compile makes 8 graphs for all lengths and kinds of blocks.
FEED_FORWARD_ROWS, FEED_FORWARD_PIECES = 32768, 4
# Limits of a container's memory, of version 2 and 1 of cgroups.
CONTAINER_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
HOST_SHARE = 0.85  # of a host's memory; the rest is for the processes, their data and the page cache
# An offloaded block of a Decoder runs what follows attention over pieces of this many tokens.
OFFLOADED_ROWS = 32768


@dataclass(frozen=True)
class TrainingShape:
    """Properties of a run that determine one GPU's memory, other than the model.

    Args:
        tokens: tokens of a micro-batch on this rank: sequences x tokens of its shard; 0 if unknown.
        shard_size: ranks that share one copy of the weights.
        compute_dtype: dtype of activations and gathered weights.
        checkpointing: choice of the activations that blocks keep.
        kept_blocks: number of the last blocks that keep everything, with "block".
        offloaded_blocks: number of the first blocks that keep their tensors in host memory, with "block".
        head_groups: number of groups of heads in which attention of offloaded blocks runs, in a Decoder.
        reshard_after_forward: whether a block's gathered weights are freed after its forward. None leaves that to a
            plan of the budget; an estimate takes it for True.
        copied: whether the forward uses FSDP's copies, gathered or rounded, of the stored weights.
        rounded: whether layers make rounded copies of the stored weights themselves, without `copied`. Blocks that keep
            everything keep these copies too, except of float8 layers, whose backward makes them again.
        in_pieces: whether a block's backward recomputes gate and up piece by piece, as in a compiled Decoder.
        compiled: whether blocks are compiled; their backward then computes silu(gate) again.
        float32_norms: whether blocks are transformers' layers, not compiled. Each of their norms also keeps a float32
            copy of its input, and a backward recomputes a layer as a whole.
        own_head: whether the head is gathered on its own, for the loss alone, as in a Decoder.
        trained: number of parameters of adapters, which alone train; the others are then stored in the compute dtype.
            None: all parameters of the model train.
        adapts_all: whether all linear layers of blocks have adapters, which keep the inputs of their layers.
        nf4: whether the frozen linear layers of blocks are stored and gathered in 4 bits, with a scale for 64 weights.
        copies: stored copies of the model's weights, such as that of a frozen reference.
        linear_dtype: dtype in which the linear layers of blocks multiply; "fp8" is also that of their gathered weights.
        state_8bit: whether AdamW's moments are kept in 8 bits, with a float32 scale for 256 values.
    """

    tokens: int
    shard_size: int = 1
    compute_dtype: torch.dtype = torch.bfloat16
    checkpointing: ActivationCheckpointing = "none"
    kept_blocks: int = 0
    offloaded_blocks: int = 0
    head_groups: int = 1
    reshard_after_forward: bool | None = True
    copied: bool = True
    rounded: bool = False
    in_pieces: bool = False
    compiled: bool = False
    float32_norms: bool = False
    own_head: bool = True
    trained: int | None = None
    adapts_all: bool = False
    nf4: bool = False
    copies: int = 1
    linear_dtype: LinearDtype = "compute"
    state_8bit: bool = False

    @property
    def cuts_heads(self) -> bool:
        """Returns whether groups of heads lower the peak: in blocks of a compiled Decoder, whose weights can be cut."""
        return self.in_pieces and self.linear_dtype == "compute"

    def block_counts(self, blocks: int) -> tuple[int, int, int]:
        """Returns how many of `blocks` blocks keep everything, recompute on the GPU, and offload."""
        activations = Activations(self.checkpointing, self.kept_blocks, self.offloaded_blocks)
        choices = activations.of_blocks(blocks)
        return choices.count("none"), choices.count("block"), choices.count("host")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU; `total` is the peak, at which not all of them exist at once.

    Args:
        weights: sharded master weights; with adapters, the frozen ones in the compute dtype.
        optimizer: AdamW's two moments, sharded.
        gradients: sharded gradients, after the backward.
        gathered: whole weights in the compute dtype that stay for the backward: the embedding, or all but the head, or
            those of blocks that keep everything.
        activations: tensors that all blocks keep from the forward.
        loss: logits of a chunk and their gradient, the head, and gradients of the head and of the final states.
        block: tensors that a block's backward recomputes, less what later blocks have freed, its weights, and the
            gradient of a tied head. In transformers' layers gradients of activations add to them.
        host: tensors that blocks keep in host memory for this GPU; not part of `total`.
        expected: peak with the temporaries of a compiled Decoder; None for other models, whose temporaries are unknown.
    """

    weights: int
    optimizer: int
    gradients: int
    gathered: int
    activations: int
    loss: int
    block: int
    host: int = 0
    expected: int | None = None

    @property
    def total(self) -> int:
        """Peak: at the start of the backward, in the loss or in the last block, or at the optimizer step."""
        backward = self.gathered + self.activations + max(self.loss, self.block)
        return self.weights + self.optimizer + max(backward, self.gradients)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes on the GPU by name."""
        return {name: size for name, size in asdict(self).items() if name not in ("host", "expected")}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items())
        return f"at least {self.total / GIB:.2f} GiB a GPU ({parts})"


def feed_forward_pieces(tokens: int) -> list[int]:
    """Returns the tokens in each piece, for a micro-batch of `tokens` on this rank."""
    if tokens < FEED_FORWARD_ROWS:
        return [tokens]
    piece = tokens // FEED_FORWARD_PIECES
    return [*[piece] * (FEED_FORWARD_PIECES - 1), tokens - piece * (FEED_FORWARD_PIECES - 1)]


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """Returns the numbers of parameters in one block, and in embedding, last norm and head."""
    q_dim, kv_dim = config.q_dim, config.kv_dim
    block = 2 * config.dim * (q_dim + kv_dim) + 3 * config.dim * config.ffn_dim + 2 * config.dim
    block += (q_dim + 2 * kv_dim) * config.qkv_bias + config.dim * config.o_bias + 2 * config.headdim * config.qk_norm
    heads = 1 if config.tie_embeddings else 2
    return block, heads * config.vocab_size * config.dim + config.dim


def estimate_memory(config: ModelConfig, shape: TrainingShape) -> MemoryEstimate:
    """Estimates the least memory of training: bytes that must exist at once under any allocator and kernels.

    A block keeps per token, in the compute dtype, its input, q, k, v, out, the sum after attention, the outputs of both
    norms, gate, up, silu(gate), their product, and lse. Compiled for float8 it keeps one of the norms' outputs, in
    float8, and computes the other and the product again. With checkpointing it keeps input, out and lse; its backward
    recomputes at least the sum, gate and up. The estimate leaves out buffers of the ring and of collectives,
    temporaries, memory that the allocator cannot use, and the CUDA context.

    A backward recomputes all that an uncompiled layer of transformers keeps. At the product with silu(gate) it also
    holds the gradients of the layer's result, of silu(gate) and of up, and the product's gradient in the product's
    place. With offloading, the tensors of the block before are then back on the GPU already. With adapters, norms keep
    nothing for their weights' gradients, and linear layers without an adapter do not keep their inputs.
    """
    master = 8 if shape.compute_dtype == torch.float64 else 4
    item = shape.compute_dtype.itemsize
    block_parameters, root_parameters = parameter_counts(config)
    parameters = config.n_layers * block_parameters + root_parameters
    trained = parameters if shape.trained is None else shape.trained
    block_bytes = block_parameters * (1 if shape.linear_dtype == "fp8" else item)
    if shape.nf4:
        matrices = 2 * config.dim * (config.q_dim + config.kv_dim)
        matrices += 3 * config.dim * config.ffn_dim
        block_bytes += matrices * BLOCK_BYTES // BLOCK - matrices * item
    weights = parameters * shape.copies * master
    if shape.trained is not None:  # under autocast, without FSDP, embedding and head stay as they are
        weights = config.n_layers * block_bytes + root_parameters * (item if shape.copied else master)
        weights += shape.trained * master
    q_dim, kv_dim = config.q_dim, config.kv_dim
    results = q_dim * item + master * config.n_heads  # of attention: out and lse
    kept = config.dim * item + results
    gate_and_up, host = 2 * config.ffn_dim * item, 0
    everything = kept + (3 * config.dim + q_dim + 2 * kv_dim) * item + 8 * config.dim * shape.float32_norms
    everything += (3 if shape.compiled else 4) * config.ffn_dim * item
    if shape.compiled and shape.linear_dtype != "compute":
        everything -= config.dim * (2 * item - 1) + config.ffn_dim * item
    if shape.float32_norms and shape.trained is not None:
        everything -= (2 * config.dim if shape.adapts_all else 4 * config.dim + config.ffn_dim) * item
    kept_blocks, recomputed, offloaded = shape.block_counts(config.n_layers)
    block = shape.tokens * config.dim * item
    rows = feed_forward_pieces(shape.tokens)[-1] if shape.in_pieces else shape.tokens
    if shape.in_pieces and offloaded == config.n_layers:
        rows = min(rows, OFFLOADED_ROWS)
    block += rows * gate_and_up
    if shape.float32_norms:
        block = shape.tokens * (everything - (kept if item == 4 else results))  # float32 inputs need no copy
    block = 0 if kept_blocks == config.n_layers else max(block - kept_blocks * shape.tokens * everything, 0)
    if shape.float32_norms:
        block += shape.tokens * (config.dim + 2 * config.ffn_dim) * item
    if offloaded:
        block += shape.tokens * (kept + results * (shape.float32_norms and config.n_layers > 1))
        groups = shape.head_groups
        widths = [config.dim * item, *[q_dim * item // groups, master * config.n_heads // groups] * groups]
        host = offloaded * sum(pinned_bytes(shape.tokens * width) for width in widths)  # of input, outs and lse
    head = config.vocab_size * config.dim if shape.tokens else 0
    head_gradient = head if shape.trained is None else 0
    logits = min(shape.tokens, chunk_rows(config.vocab_size)) * config.vocab_size
    loss = logits * (master + item) + head_gradient * master + 2 * shape.tokens * config.dim * item
    gathered = root_parameters * item
    if shape.copied and shape.own_head and not config.tie_embeddings:  # gathered and freed alone, with its gradient
        gathered -= config.vocab_size * config.dim * item
        loss += head * item
    else:
        block += head_gradient * (master if shape.rounded else item)
    if shape.rounded:
        gathered = kept_blocks * block_bytes * (shape.linear_dtype == "compute")
        loss += head * item
        block += block_bytes * (kept_blocks < config.n_layers)
    elif shape.reshard_after_forward is False:
        gathered += config.n_layers * block_bytes
    elif shape.copied:
        block += block_bytes
    estimate = MemoryEstimate(
        weights=weights // shape.shard_size,
        optimizer=int(2 * trained * (1 + 4 / 256 if shape.state_8bit else master)) // shape.shard_size,
        gradients=trained * master // shape.shard_size,
        gathered=gathered if shape.copied or shape.rounded else 0,
        activations=shape.tokens * (kept_blocks * everything + recomputed * kept),
        loss=loss,
        block=block,
        host=host,
    )
    return replace(estimate, expected=_expected(config, shape, estimate)) if shape.in_pieces else estimate


def _expected(config: ModelConfig, shape: TrainingShape, estimate: MemoryEstimate) -> int:
    """Returns the bytes that torch allocates at the peak of a step of a compiled Decoder.

    The most exists at the start of the backward, or in the backward of the first block, when the gradients of the
    others exist. Tensors of a block's backward were counted in torch's record of allocations (torch 2.11, an H200; a
    CPU for groups of heads and for pieces of an offloaded block):

    - At attention: gradients of the block's result and of attention's, q, k, v, their gradients, the float32 sum of
      dq and the norm's output. One graph for the whole block also holds four tensors of the feed-forward layer.
    - In groups of heads: of these the norm's output and both gradients for all heads, and the rest for one group, with
      its part of attention's gradient once more. Later the gradients of the norm's output and of q, k, v come on top.
    - At the feed-forward layer: six tensors of a piece's width, and for all tokens gradients of the result and of the
      sum. One graph for the whole block also holds the norm's output and the sum. An offloaded block holds its
      kept tensors, and the gradients of its result, of its input and of attention's result, the last two in pieces.
    - FSDP holds the weights of two blocks, and gradients of one in the compute dtype and in float32.
    """
    dim, item, tokens = config.dim, shape.compute_dtype.itemsize, shape.tokens
    q_dim, kv_dim = config.q_dim, config.kv_dim
    kept_blocks, recomputed, offloaded = shape.block_counts(config.n_layers)
    attention = (2 * dim + 3 * q_dim + 4 * kv_dim) * item + 4 * q_dim
    results = (dim + q_dim) * item + 4 * config.n_heads  # input of the block, out and lse
    wide = 6 * config.ffn_dim * item
    one_graph = max(
        tokens * (attention + 4 * dim * item),
        tokens * 4 * dim * item + feed_forward_pieces(tokens)[-1] * wide,
    )
    groups = shape.head_groups
    if groups > 1:
        of_a_group = ((3 * q_dim + 4 * kv_dim) * item + 4 * q_dim) // groups
        attention = (2 * dim + q_dim) * item + max(of_a_group, (dim + 2 * kv_dim // groups) * item)
    in_parts = tokens * results + max(
        tokens * attention, tokens * (2 * dim + q_dim) * item + min(tokens, OFFLOADED_ROWS) * wide
    )
    in_parts += AHEAD_BYTES if tokens * q_dim * item // groups <= AHEAD_BYTES else 0
    block_parameters, root_parameters = parameter_counts(config)
    if shape.copied:
        weights = block_parameters * (3 * item + 4)
        one_graph, in_parts = one_graph + weights, in_parts + weights
    parameters = config.n_layers * block_parameters + root_parameters
    head = config.vocab_size * dim
    at_start = estimate.gathered + estimate.activations + AHEAD_BYTES * (0 < offloaded < config.n_layers)
    with_head = one_graph + estimate.gradients * head // parameters
    at_start += max(estimate.loss, estimate.block, with_head if recomputed and not kept_blocks else 0)
    # The gradients of the first block and of the embedding come last.
    come_last = block_parameters + (0 if config.tie_embeddings else head)
    at_end = estimate.gradients * (parameters - come_last) // parameters
    at_end += 0 if shape.rounded else estimate.gathered
    at_end += in_parts if offloaded else one_graph + tokens * results if recomputed else 0
    return estimate.weights + estimate.optimizer + max(at_start, at_end, estimate.gradients)


def host_memory() -> int:
    """Returns the bytes of memory that this machine has, or this container may take if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in CONTAINER_LIMITS if path.is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def host_share(ranks: int, total: int | None = None) -> int:
    """Returns the bytes of host memory that each of `ranks` on a host may take for its activations.

    Args:
        ranks: ranks on the host.
        total: bytes of the host's memory; None stands for this machine's.
    """
    return int(HOST_SHARE * (host_memory() if total is None else total)) // ranks


def check_host_memory(estimate: MemoryEstimate, ranks: int, available: int) -> None:
    """Raises ConfigError when `ranks` of one host keep more than its `available` bytes."""
    if ranks * estimate.host > available:
        raise ConfigError(
            "activation_offload",
            expected=f"at most the host's {available / GIB:.2f} GiB",
            got=f"at least {estimate.host / GIB:.2f} GiB for each of {ranks} GPUs",
            remedy="Use a shorter context, a smaller micro-batch, more hosts, or no activation_offload.",
        )


def check_memory(estimate: MemoryEstimate, shape: TrainingShape | None, available: int) -> None:
    """Raises ConfigError when `estimate` is more than the `available` bytes of the GPU.

    `shape` is that of a run that fixes its activations; None stands for a plan, which has tried every choice.
    """
    if estimate.total > available:
        ways = ""
        if shape is not None:
            ways = "" if shape.offloaded_blocks or shape.linear_dtype != "compute" else "activation_offload, "
            if shape.checkpointing != "block":
                ways = 'activation_checkpointing="block", then ' + ways
        raise ConfigError(
            "memory",
            expected=f"at most the GPU's {available / GIB:.2f} GiB",
            got=str(estimate),
            remedy=f"Use {ways}a shorter context, a smaller micro-batch, or more ranks.",
        )
