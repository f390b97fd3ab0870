"""Attention as torch.library custom operators, forward and backward, returning (out, lse)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringflash.context import context_by_name
from ringflash.ops.call import SCHEMA, AttentionCall
from ringflash.ops.guard import Phase, announce
from ringflash.ops.one_device import OneDevice
from ringflash.ops.ring_call import BoundCall, call_of
from ringflash.state import lse_dtype


@torch.library.custom_op(
    "ringflash::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)"
)
def attention(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    """Returns out and lse of this process's queries over the keys of all ranks of the context.

    `parameters` are the fields of an `AttentionCall`. lse is in `lse_dtype`, more precise than what users get, for the
    backward.
    """
    return _known_of(q, k, v, AttentionCall(*parameters)).forward(q, k, v)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))


@torch.library.custom_op(
    "ringflash::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv of this process's part of the sequence, and its rows' share of dsinks (empty without).

    `parameters` are the fields of an `AttentionCall`.
    """
    known = _known_of(q, k, v, AttentionCall(*parameters))
    dq, dk, dv, dsinks = known.backward(dout, dlse, q, k, v, out, lse)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


@attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = AttentionCall(*parameters).sinks
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _known_of(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> OneDevice | BoundCall:
    """Returns the call on one device or on the ranks of its context, made now or before."""
    if not call.context:
        return OneDevice.of(q, k, v, call)
    context = context_by_name(call.context)
    try:
        known = call_of(context, q, k, v, call)
    except BaseException as error:
        announce(context, error, Phase.PREPARING)  # the peers are about to wait for this rank
        raise
    return known if isinstance(known, OneDevice) else BoundCall(known, context)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps on `ctx` what `gradients` needs of the operator's inputs and output."""
    q, k, v, *parameters = inputs
    call = AttentionCall(*parameters)
    ctx.call = call.without_tensors()
    ctx.context = context_by_name(call.context) if call.context else None  # the backward finds it by name
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, call.sinks, call.alibi_slopes, call.dropout_seed)


def gradients(
    backward: Callable[..., tuple[Tensor, ...]],
    call: AttentionCall,
    saved: Sequence[Any],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of q, k, v and sinks by `backward`, the backward operator or a stand-in of it."""
    q, k, v, out, lse, sinks, alibi_slopes, dropout_seed = saved
    if dout is None:
        dout = torch.zeros_like(out)
    call = call._replace(sinks=sinks, alibi_slopes=alibi_slopes, dropout_seed=dropout_seed)
    dq, dk, dv, dsinks = backward(dout, dlse, q, k, v, out, lse, *call)
    return dq, dk, dv, None if sinks is None else dsinks.to(sinks.dtype)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dv, dsinks = gradients(attention_backward, ctx.call, ctx.saved_tensors, dout, dlse)
    # None for each parameter without a gradient; autograd wants the mask's tensors nested as they are.
    others: dict[str, Any] = dict.fromkeys(AttentionCall._fields)
    others |= {"sinks": dsinks, "mask_tensors": [None] * len(ctx.call.mask_tensors)}
    return dq, dk, dv, *others.values()


attention.register_autograd(_backward, setup_context=save)
