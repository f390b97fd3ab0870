"""Calls that were made before: the key by which a call is found again, and the calls that are kept.

A call is found again if it differs from an earlier one only in the values of its tensors. Its arguments are then known
to be right, and its kernels, mask and plan are known. Calls whose way depends on more than their arguments are never
prepared: under torch.compile, profilers, modes, transforms of torch.func and forward-mode derivatives, with tensors of
other classes, and with dropout, sinks or slopes.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ringflash.dropout import Dropout
from ringflash.masks import Mask
from ringflash.ops.call import AttentionOptions
from ringflash.ops.packed import keep_form, packed_form
from ringflash.torch_private import (
    are_transforms_active,
    dispatch_modes,
    forward_mode_level,
    function_modes,
    is_profiling,
    jit_tracing_state,
)

T = TypeVar("T")

PLAIN = (Tensor, nn.Parameter)
NUMBERS = (float, int)
SCALES = (*NUMBERS, type(None))
SWITCHES = (bool, type(None))


class PreparedCall(NamedTuple, Generic[T]):
    """A call with checked arguments: how it is computed, and whether it returns lse."""

    attention: T
    with_lse: bool


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    softmax_scale: float | None,
    dropout: Dropout | None,
    softcap: float,
    options: AttentionOptions,
    return_lse: bool | None,
    *,
    by_form: bool = False,
) -> Hashable:
    """Returns a key of all arguments of a call except the values of its tensors; None for a call to be made anew.

    The arguments may be wrong: the first call of a key checks them. So a key tells 1 from 1.0 and True, which Python
    counts as equal. With `by_form` masks of one packed form have one key.
    """
    if is_observed():
        return None
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN) or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    device, dtype = q.device, q.dtype
    if dropout is not None or k.dtype != dtype or v.dtype != dtype or device.type == "meta":
        return None
    if torch.is_autocast_enabled(device.type) and dtype != torch.get_autocast_dtype(device.type):
        return None
    if type(options) is not AttentionOptions or options.sinks is not None or options.alibi_slopes is not None:
        return None
    deterministic, of_options, backend = options.deterministic, options.return_lse, options.backend
    kinds = type(softmax_scale), type(softcap), type(deterministic), type(of_options), type(return_lse), type(backend)
    if kinds[0] not in SCALES or kinds[1] not in NUMBERS or kinds[5] is not str:
        return None
    if not (kinds[2] in SWITCHES and kinds[3] in SWITCHES and kinds[4] in SWITCHES):
        return None
    if not (mask is None or isinstance(mask, Mask)):
        return None
    shapes = q.shape, k.shape, v.shape, dtype, device, k.device, v.device
    values = softmax_scale, softcap, deterministic, of_options, return_lse, backend
    always = torch.are_deterministic_algorithms_enabled()
    if by_form and mask is not None and (packing := mask.packing) is not None:
        plain = shapes, packing[:2], kinds, values, always
        known = packing.documents.forms.get(plain)
        if known is None:
            deterministic = always if deterministic is None else deterministic
            form = packed_form(mask, q, k, v, softcap, backend, deterministic=deterministic)
            known = form is not None and _shared((form, *plain))
            keep_form(packing.documents, plain, known)
        if known:
            return known
    return shapes, mask, kinds, values, always


class _SharedKey:
    """Stands for a key that many masks share; as it equals itself alone, it takes no time to compare."""


@lru_cache(maxsize=256)
def _shared(key: Hashable) -> _SharedKey:
    """Returns the one object that stands for `key`."""
    return _SharedKey()


def is_observed() -> bool:
    """Returns whether a compiler, transform, mode, profiler, trace or forward mode wants to see operators."""
    if torch.compiler.is_compiling() or are_transforms_active() or dispatch_modes() or function_modes():
        return True
    return is_profiling() or forward_mode_level() >= 0 or jit_tracing_state() is not None


def is_plain(grad: Tensor) -> bool:
    """Returns whether a backward with this gradient of out may run without operators."""
    if torch.is_grad_enabled() or is_observed():
        return False
    return type(grad) is Tensor and not grad.is_neg()
