"""Attention as torch operators, forward and backward: opaque to torch.compile, and without gradients of their own.

`derivatives.py` has the differentiable operator, which calls these. `torch.library.custom_op` would give them checks of
every result and a rule of autograd, which run in every call, also in a compiled step. Both take the host longer than
finding the call. `decode_op.py` has no compiled step to save, and uses `custom_op`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringflash.context import context_by_name
from ringflash.errors import ArgumentError
from ringflash.ops.call import SCHEMA, AttentionCall
from ringflash.ops.guard import Phase, announce
from ringflash.ops.one_device import OneDevice, PackedCall
from ringflash.ops.ring_call import BoundCall, RingCall, call_of
from ringflash.state import lse_dtype

_library = torch.library.Library("ringflash", "FRAGMENT")


def _attention(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    """Returns out and lse of this process's queries over the keys of all ranks of the context.

    `parameters` are the fields of an `AttentionCall`. lse is in `lse_dtype`, more precise than what users get, for the
    backward.
    """
    call = AttentionCall(*parameters)
    if torch.is_grad_enabled():
        _refuse_gradients("attention", q, k, v, call.sinks)
    return _known_of(q, k, v, call).forward(q, k, v)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv of this process's part of the sequence, and its rows' share of dsinks (empty without).

    `parameters` are the fields of an `AttentionCall`.
    """
    call = AttentionCall(*parameters)
    if torch.is_grad_enabled():
        _refuse_gradients("attention_backward", dout, q, k, v, out, lse, dlse, call.sinks)
    known = _known_of(q, k, v, call)
    dq, dk, dv, dsinks = known.backward(dout, dlse, q, k, v, out, lse)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = AttentionCall(*parameters).sinks
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape[0])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _refuse_gradients(name: str, *inputs: Tensor | None) -> None:
    """Raises ArgumentError if an input requires grad: autograd knows no gradient of the operator."""
    if any(x is not None and x.requires_grad for x in inputs):
        expected, got = "a call without gradients", "an input that requires grad"
        remedy = "Call rf.flash_attention or rf.ring_attention. Train an exported program before run_decompositions."
        raise ArgumentError(f"torch.ops.ringflash.{name}", expected=expected, got=got, remedy=remedy)


def _known_of(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> OneDevice | PackedCall | BoundCall:
    """Returns the call on one device or on the ranks of its context, made now or before."""
    if not call.context:
        return OneDevice.of(q, k, v, call)
    context = context_by_name(call.context)
    try:
        known = call_of(context, q, k, v, call)
    except BaseException as error:
        announce(context, error, Phase.PREPARING)  # the peers are about to wait for this rank
        raise
    return BoundCall(known, context) if isinstance(known, RingCall) else known


def _untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `kernel`, hidden from torch.compile, which traces into functions that a frame without a graph calls.

    `torch.compiler.disable` imports the compiler, which takes seconds and which a program may never need.
    """
    disabled: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return kernel(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(kernel))
        return disabled[0](*args)

    return call


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Defines an operator of ringflash, and returns it. Without `fake` its `kernel` serves tracing too."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    kind = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
    _library.impl(name, kernel if fake is None else _untraced(kernel), kind)
    if fake is not None:
        torch.library.register_fake(f"ringflash::{name}", fake, lib=_library)
    return getattr(torch.ops.ringflash, name).default


def define_vmap(operator: Any, rule: Callable[..., Any]) -> None:
    """Defines the vmap rule of an operator of `define`."""
    torch.library.register_vmap(operator.name(), rule, lib=_library)


attention = define(
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor lse)", _attention, _fake_forward
)
attention_backward = define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _attention_backward,
    _fake_backward,
)
