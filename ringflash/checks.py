"""Checks of arguments that several functions share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real

import torch
from torch import Tensor

from ringflash.errors import ArgumentError

MIN_HEADDIM, MAX_HEADDIM = 16, 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(tensors: Mapping[str, object], form: str, *, alike: str) -> None:
    """Raises ArgumentError unless all have 4 dimensions, and the dtype and device of the first, which is named q.

    Args:
        tensors: the arguments by name.
        form: the shape that they take, for the remedy.
        alike: the remedy for another dtype or device.
    """
    q = next(iter(tensors.values()))
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not isinstance(q, Tensor):
            raise ArgumentError(name, expected="a tensor", got=type(x).__name__, remedy="Pass torch tensors.")
        if x.ndim != 4:
            got = f"shape {tuple(x.shape)}"
            raise ArgumentError(name, expected="4 dimensions", got=got, remedy=f"Pass {form}.")
        if x.dtype != q.dtype or x.device != q.device:
            got = f"{x.dtype} on {x.device}"
            raise ArgumentError(name, expected=f"as q: {q.dtype} on {q.device}", got=got, remedy=alike)


def check_heads(nheads: int, nheads_kv: int, headdims: Mapping[str, int]) -> None:
    """Raises ArgumentError for widths that no kernel has, and for query heads that cannot share the KV heads evenly."""
    for name, headdim in headdims.items():
        if not MIN_HEADDIM <= headdim <= MAX_HEADDIM:
            remedy = "Split or pad the heads."
            raise ArgumentError(name, expected=f"{MIN_HEADDIM} to {MAX_HEADDIM}", got=headdim, remedy=remedy)
    if nheads_kv == 0 or nheads % nheads_kv:
        expected = f"a positive multiple of nheads_kv = {max(nheads_kv, 1)}"
        remedy = "Query heads share KV heads in equal groups."
        raise ArgumentError("nheads", expected=expected, got=f"{nheads} and {nheads_kv}", remedy=remedy)


def check_of_heads(q: Tensor, sinks: object, alibi_slopes: object) -> None:
    """Raises ArgumentError unless those given are one number a head of `q`; slopes may differ between sequences."""
    batch, _, nheads, _ = q.shape
    shapes = {"sinks": (sinks, [(nheads,)]), "alibi_slopes": (alibi_slopes, [(nheads,), (batch, nheads)])}
    for name, (x, allowed) in shapes.items():
        if x is None:
            continue
        expected = f"a floating-point tensor of shape {' or '.join(map(str, allowed))} on {q.device}"
        if not isinstance(x, Tensor):
            raise ArgumentError(name, expected=expected, got=type(x).__name__, remedy="Pass one number a head.")
        if tuple(x.shape) not in allowed or not x.is_floating_point() or x.device != q.device:
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ArgumentError(name, expected=expected, got=got, remedy="Pass one number a head.")


def check_whole(argument: str, value: object, least: int, remedy: str) -> None:
    """Raises ArgumentError unless `value` is a whole number and at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ArgumentError(argument, expected=f"a whole number, at least {least}", got=repr(value), remedy=remedy)


def check_softcap(softcap: float) -> None:
    """Raises ArgumentError unless `softcap` is positive and finite, or 0 for no softcap."""
    if not isinstance(softcap, int | float) or isinstance(softcap, bool) or not 0.0 <= softcap < math.inf:
        raise ArgumentError("softcap", expected="0 or positive, and finite", got=softcap, remedy="0 is no cap.")


def scale_of(softmax_scale: float | None, headdim: int) -> float:
    """Returns the softmax scale; None is 1 / sqrt(headdim). Raises ArgumentError unless it is positive and finite."""
    is_number = isinstance(softmax_scale, int | float | Real)  # not what has __float__ alone, such as a tensor
    if softmax_scale is not None and (not is_number or isinstance(softmax_scale, bool)):
        remedy = "Leave it out for 1 / sqrt(headdim). Multiply q by a learned scale, and pass softmax_scale=1.0."
        raise ArgumentError("softmax_scale", expected="a number, or None", got=repr(softmax_scale), remedy=remedy)
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else float(softmax_scale)
    if not 0.0 < scale < math.inf:
        remedy = "Flip the sign of q for a negative scale."
        raise ArgumentError("softmax_scale", expected="positive and finite", got=scale, remedy=remedy)
    return scale


def check_return_lse(return_lse: bool | None, of_options: bool) -> bool:
    """Returns the keyword `return_lse`, or the option if it is None.

    Raises:
        ArgumentError: the keyword is neither None nor a bool, or the option is not a bool.
    """
    if return_lse is not None and not isinstance(return_lse, bool):
        remedy = "None does what options.return_lse says."
        raise ArgumentError("return_lse", expected="None, True or False", got=repr(return_lse), remedy=remedy)
    if not isinstance(of_options, bool):
        remedy = "None is for the keyword alone."
        raise ArgumentError("options.return_lse", expected="True or False", got=repr(of_options), remedy=remedy)
    return of_options if return_lse is None else return_lse


def check_switch(argument: str, value: object) -> None:
    """Raises ArgumentError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(argument, expected="True or False", got=repr(value), remedy="Pass a bool.")
