"""Checks of arguments that several functions share."""

from __future__ import annotations

import math

from ringflash.errors import ArgumentError


def check_whole(argument: str, value: object, least: int, remedy: str) -> None:
    """Raises ArgumentError unless `value` is a whole number and at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(argument, expected=f"a whole number, at least {least}", got=repr(value), remedy=remedy)


def check_softcap(softcap: float) -> None:
    """Raises ArgumentError unless `softcap` is positive and finite, or 0 for no softcap."""
    if not isinstance(softcap, int | float) or not 0.0 <= softcap < math.inf:
        raise ArgumentError("softcap", expected="0 or positive, and finite", got=softcap, remedy="0 is no cap.")


def scale_of(softmax_scale: float | None, headdim: int) -> float:
    """Returns the softmax scale; None is 1 / sqrt(headdim). Raises ArgumentError unless it is positive and finite."""
    if softmax_scale is not None and not hasattr(softmax_scale, "__float__"):
        remedy = "Leave it out for 1 / sqrt(headdim)."
        raise ArgumentError("softmax_scale", expected="a number, or None", got=repr(softmax_scale), remedy=remedy)
    scale = 1.0 / math.sqrt(headdim) if softmax_scale is None else float(softmax_scale)
    if not 0.0 < scale < math.inf:
        remedy = "Flip the sign of q for a negative scale."
        raise ArgumentError("softmax_scale", expected="positive and finite", got=scale, remedy=remedy)
    return scale


def check_return_lse(return_lse: bool | None, of_options: bool) -> bool:
    """Returns the keyword `return_lse`, or the option if it is None. Raises ArgumentError unless it is None or bool."""
    if return_lse is not None and not isinstance(return_lse, bool):
        remedy = "None does what options.return_lse says."
        raise ArgumentError("return_lse", expected="None, True or False", got=repr(return_lse), remedy=remedy)
    return of_options if return_lse is None else return_lse
