"""Attention as torch operators, forward and backward: opaque to torch.compile, and without a gradient of their own.

`derivatives.py` makes attention of them that is differentiable. `torch.library.custom_op` would define the same
operators, with checks of every result and a rule of autograd, in every call and also in a compiled step. Both take the
host longer than finding the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringflash.context import context_by_name
from ringflash.ops.call import SCHEMA, AttentionCall
from ringflash.ops.guard import Phase, announce
from ringflash.ops.one_device import OneDevice
from ringflash.ops.ring_call import BoundCall, call_of
from ringflash.state import lse_dtype

library = torch.library.Library("ringflash", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _attention(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    """Returns out and lse of this process's queries over the keys of all ranks of the context.

    `parameters` are the fields of an `AttentionCall`. lse is in `lse_dtype`, more precise than what users get, for the
    backward.
    """
    return _known_of(q, k, v, AttentionCall(*parameters)).forward(q, k, v)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q.dtype))


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv of this process's part of the sequence, and its rows' share of dsinks (empty without).

    `parameters` are the fields of an `AttentionCall`.
    """
    known = _known_of(q, k, v, AttentionCall(*parameters))
    dq, dk, dv, dsinks = known.backward(dout, dlse, q, k, v, out, lse)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


def _fake_backward(
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


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = library.define(schema, tags=_TAGS)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringflash::{name}", fake, lib=library)


_define(
    f"attention(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor lse)",
    _attention,
    _fake_forward,
)
_define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _attention_backward,
    _fake_backward,
)
attention = torch.ops.ringflash.attention.default
attention_backward = torch.ops.ringflash.attention_backward.default
