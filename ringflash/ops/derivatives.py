"""Derivatives of attention: in eager and in compiled calls, under the transforms of torch.func, and clear refusals.

Reverse mode of first order is implemented, and vmap as a loop. Forward mode and second derivatives raise, as a tangent
or gradient of zero would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from ringflash.context import ContextParallel, context_by_name
from ringflash.errors import ArgumentError
from ringflash.ops.call import SCHEMA, AttentionCall
from ringflash.ops.decode_op import decode
from ringflash.ops.guard import Guard
from ringflash.ops.one_device import OneDevice, PackedCall
from ringflash.ops.operators import attention, attention_backward, define, define_vmap
from ringflash.ops.prepared import is_plain
from ringflash.ops.ring_call import BoundCall
from ringflash.torch_private import are_transforms_active

_PLAIN = "ringflash.reference.attention, the plain formula, has every derivative on one device."


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> NoReturn:
    """Raises ArgumentError: the `jvp` of every function here."""
    got = "a tangent (torch.func.jvp, jacfwd, hessian or a dual tensor)"
    remedy = f"Use torch.func.vjp or jacrev. {_PLAIN}"
    raise ArgumentError("derivative of attention", expected="reverse mode", got=got, remedy=remedy)


def _refuse_second_order(ctx: Any, *grads: Any) -> NoReturn:
    raise ArgumentError(
        "derivative of attention", expected="one of first order", got="a gradient of its gradient", remedy=_PLAIN
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps on `ctx` what `_gradients` needs of the operator's inputs and output."""
    q, k, v, *parameters = inputs
    call = AttentionCall(*parameters)
    ctx.call = call.without_tensors()
    ctx.context = context_by_name(call.context) if call.context else None  # alive, since the backward finds it by name
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, call.sinks, call.alibi_slopes, call.dropout_seed)


def _gradients(
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


class _Gradients(torch.autograd.Function):
    """`attention_backward` where a gradient of it may be asked for, which raises."""

    generate_vmap_rule = True
    backward = staticmethod(_refuse_second_order)
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        *tensors, rest = inputs
        return attention_backward(*tensors, *rest.values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Saves nothing."""


class _Values:
    """The operator's arguments that are no tensors of numbers, in one piece, which transforms leave alone."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


def _first_order_backward(*inputs: Any) -> tuple[Tensor, ...]:
    """`attention_backward` of the same arguments by `_Gradients`: ten tensors, then the values."""
    return cast("tuple[Tensor, ...]", _Gradients.apply(*inputs[:10], _Values(inputs[10:])))


def _backward_operator() -> Callable[..., tuple[Tensor, ...]]:
    """Returns `attention_backward`, or the function that refuses a gradient of it where autograd records one."""
    return _first_order_backward if torch.is_grad_enabled() else attention_backward


def _check_alive(context: ContextParallel | None) -> None:
    """Raises ArgumentError if the context of the forward has ended.

    The operator finds a context by name, and another one may have the name by now.
    """
    if context is not None:
        context.check_alive()


class _Operator(torch.autograd.Function):
    """The operator and its gradient: the differentiable inputs, and the others in one piece."""

    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Any) -> tuple[Tensor, Tensor]:
        inputs = q, k, v, *call._replace(sinks=sinks)
        output = attention(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():
            return *_gradients(_backward_operator(), ctx.call, ctx.saved_tensors, *grads), None
        with Guard(ctx.context):  # autograd raises here for an input that changed after the forward, maybe on one rank
            _check_alive(ctx.context)
            saved = ctx.saved_tensors  # here: of a checkpoint they are computed again, for which autograd must see it
            return *_gradients(_backward_operator(), ctx.call, saved, *grads), None


class _Prepared(torch.autograd.Function):
    """A prepared call and its gradient, without the operators: these take the host as long as the launches."""

    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: OneDevice | PackedCall | BoundCall, with_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = attention.forward(q, k, v)
        ctx.attention = attention
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        of, dout, dlse = ctx.attention, grads[0], grads[1] if len(grads) == 2 else None
        with Guard(of.context):  # as in `_Operator`
            saved = ctx.saved_tensors
            if dout is not None and is_plain(dout) and (dlse is None or is_plain(dlse)):
                return *of.backward(dout, dlse, *saved)[:3], None, None
            return *_gradients(_backward_operator(), of.call, (*saved, None, None, None), dout, dlse)[:3], None, None


class _Transformed(torch.autograd.Function):
    """Attention under torch.func's transforms, which need a context that is set up apart from the forward."""

    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, rest = inputs
        return attention(*tensors, *rest.values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, rest = inputs
        _save(ctx, (*tensors, *rest.values), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with Guard(ctx.context):
            _check_alive(ctx.context)
            return *_gradients(_first_order_backward, ctx.call, ctx.saved_tensors, *grads), None, None, None


def _with_gradients(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    """Returns `attention`, differentiable.

    It is an operator too, into which torch.compile's front end does not trace. The compiled graphs have only the
    operators `attention` and `attention_backward`, without a rule of autograd in Python.
    """
    call = AttentionCall(*parameters)
    if are_transforms_active():
        sinks, alibi_slopes, dropout_seed, *values = call
        result = _Transformed.apply(q, k, v, sinks, alibi_slopes, dropout_seed, _Values(tuple(values)))
        return cast("tuple[Tensor, Tensor]", result)
    return cast("tuple[Tensor, Tensor]", _Operator.apply(q, k, v, call.sinks, call._replace(sinks=None)))


attention_with_gradients = define(
    f"attention_with_gradients(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor lse)", _with_gradients
)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns attention of the call, differentiable."""
    if not torch.compiler.is_compiling():
        return _with_gradients(q, k, v, *call)
    # Without gradients nothing decomposes the operator. An exported program may train later.
    if torch.is_grad_enabled() or are_transforms_active() or torch.compiler.is_exporting():
        return attention_with_gradients(q, k, v, *call)
    return attention(q, k, v, *call)


def attend_prepared(
    q: Tensor, k: Tensor, v: Tensor, attention: OneDevice | PackedCall | BoundCall, *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns out and lse of a prepared call, differentiable; without `with_lse` None in place of lse.

    Each result of an `autograd.Function` takes the host time, forward and backward.
    """
    if with_lse:
        return cast("tuple[Tensor, Tensor]", _Prepared.apply(q, k, v, attention, True))
    return cast("Tensor", _Prepared.apply(q, k, v, attention, False)), None


def _looped(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[tuple[Tensor, ...], Any]]:
    """Returns a vmap rule for an operator: one call for each entry."""

    def entry(x: Any, dim: Any, index: int) -> Any:
        if isinstance(x, list | tuple):
            dims = dim if isinstance(dim, list | tuple) else [dim] * len(x)
            return [entry(*pair, index) for pair in zip(x, dims, strict=True)]
        return x if dim is None else x.select(dim, index)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], Any]:
        results = [operator(*entry(args, in_dims, index)) for index in range(info.batch_size)]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


for _each in (attention, attention_backward, attention_with_gradients):
    define_vmap(_each, _looped(_each))
decode.register_vmap(_looped(decode))
