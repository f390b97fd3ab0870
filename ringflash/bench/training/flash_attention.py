"""A peer of the training benchmark: the same Decoder on FlashAttention, as a careful user would build it.

Blocks that checkpoint keep attention's results, and their backward recomputes the rest. On several GPUs each rank
computes some heads over the whole sequence, between all-to-alls of torch, which a recomputed block repeats. Attention
and the all-to-alls are operators, so that whole blocks are compiled.
Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.library import custom_op
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ringflash as rf
from ringflash.bench.common.flash_kernels import installed_kernels
from ringflash.bench.ring.ulysses import check_split, repeated, to_all_heads, to_some_heads
from ringflash.bench.training.trainees import Trainee, Training, kept_of, on_device, step_of
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Attention, Block, Decoder, Step

GROUPS: dict[str, dist.ProcessGroup] = {}  # by name, because operators take no groups


@custom_op("ringflash_bench::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out and lse of causal attention, from tensors (batch, seqlen, heads, headdim)."""
    out, lse, *_ = installed_kernels().forward(q, k, v, q.shape[3] ** -0.5, True)
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, _ = q.shape
    return q.new_empty(batch, seqlen, heads, v.shape[3]), q.new_empty(batch, heads, seqlen, dtype=torch.float32)


@custom_op("ringflash_bench::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    installed_kernels().backward(dout.contiguous(), q, k, v, out, lse, q.shape[3] ** -0.5, True, *gradients)
    return gradients


@attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    return attention_backward(dout, *ctx.saved_tensors)


attention.register_autograd(_gradients, setup_context=_keep)


@custom_op("ringflash_bench::exchange", mutates_args=())
def exchange(x: Tensor, group: str, to_heads: bool) -> Tensor:
    """Exchanges some rows of all heads for all rows of some heads, or back if not `to_heads`."""
    return (to_some_heads if to_heads else to_all_heads)(x, GROUPS[group]).contiguous()


@exchange.register_fake
def _(x: Tensor, group: str, to_heads: bool) -> Tensor:
    batch, rows, heads, headdim = x.shape
    ranks = GROUPS[group].size()
    shape = (rows * ranks, heads // ranks) if to_heads else (rows // ranks, heads * ranks)
    return x.new_empty(batch, *shape, headdim)


def _remember(ctx: Any, inputs: tuple[Tensor, str, bool], output: Tensor) -> None:
    _, ctx.group, ctx.to_heads = inputs


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return exchange(gradient, ctx.group, not ctx.to_heads), None, None


exchange.register_autograd(_exchange_back, setup_context=_remember)


class FlashAttention(Attention):
    """Attention by `attention`, between all-to-alls if a group is given."""

    def __init__(self, config: ModelConfig, layer: int, group: str | None) -> None:
        super().__init__(config, layer, seed=0)
        self.group = group

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Returns attention's output (batch, seqlen, nheads, headdim)."""
        if self.group is None:
            return attention(q, k, v)[0]
        ranks = GROUPS[self.group].size()
        k, v = (repeated(x, ranks) for x in (k, v))
        q, k, v = (exchange(x, self.group, True) for x in (q, k, v))
        return exchange(attention(q, k, v)[0], self.group, False)


class KeepingBlock(Block):
    """Block on `FlashAttention`, whose backward recomputes all but the results of `attention`."""

    def __init__(self, config: ModelConfig, layer: int, group: str | None) -> None:
        super().__init__(config, layer, seed=0)
        self.self_attn = FlashAttention(config, layer, group)

    def _run(self, x: Tensor, step: Step) -> Tensor:
        if self.checkpointing == "none":
            return self._compute(x, step)
        kept: Any = [torch.ops.ringflash_bench.attention.default]
        contexts = partial(create_selective_checkpoint_contexts, kept)
        return cast("Tensor", checkpoint(self._compute, x, step, use_reentrant=False, context_fn=contexts))


@contextmanager
def flash_attention(training: Training) -> Generator[Trainee, None, None]:
    """Prepares the same Decoder on FlashAttention; as many blocks keep all their activations as on the ring.

    Raises:
        Unavailable: as `check_split`.
    """
    config, ranks = training.config, training.ring.size()
    check_split(ranks, config.n_heads, config.n_kv_heads, training.seqlen)
    kept, group = kept_of(training), training.ring.get_group()
    GROUPS[group.group_name] = group
    exchanged_in = group.group_name if ranks > 1 else None
    with torch.device("meta"):
        model = Decoder(config)
        model.layers = nn.ModuleList(KeepingBlock(config, layer, exchanged_in) for layer in range(config.n_layers))
    model.keep_activations("block", kept_blocks=kept.blocks)
    step = step_of(on_device(model, training, kept), training)
    context = rf.ContextParallel(training.ring, "contiguous")
    input_ids, labels = map(context.shard, training.tokens())
    position_ids = context.positions(training.seqlen, device=training.device)
    try:
        facts = {"kernels": installed_kernels().name, "layout": context.layout, **kept.facts}
        yield Trainee(partial(step, input_ids, position_ids, labels=labels), facts)
    finally:
        context.close()
