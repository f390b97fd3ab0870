"""Packed forms: calls that differ in the documents of their mask alone are one prepared call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from ringflash.kernels import select
from ringflash.kernels.contract import Tiling
from ringflash.masks import Documents, Mask

MOST = 256  # forms that documents keep, some for each shape of a call


class PackedForm(NamedTuple):
    """Properties of a mask of packed documents that decide on its calls, besides the documents; see `Packing`.

    Args:
        left: as in `Packing`.
        right: as in `Packing`.
        sequences: number of sequences that the documents have rows for, None if one row applies to all.
        tilings: tiles of forward and backward, for which the GPU makes tables.
    """

    left: int
    right: int
    sequences: int | None
    tilings: tuple[Tiling, Tiling]


def packed_form(
    mask: Mask, q: Tensor, k: Tensor, v: Tensor, softcap: float, backend: str, *, deterministic: bool
) -> PackedForm | None:
    """Returns the form of a mask; None unless it is of packed documents, and kernels read tables that the GPU makes.

    The arguments may be wrong; their checks follow.
    """
    packing = mask.packing
    if packing is None or softcap or backend not in select.BACKENDS or not q.ndim == k.ndim == v.ndim == 4:
        return None
    left, right, documents = packing
    key = left, right, q.shape, k.shape, v.shape, q.dtype, q.device, backend, deterministic
    forms: dict[Hashable, PackedForm | None] = documents.forms
    form = forms.get(key)
    if form is None and key not in forms:
        tilings = select.choose(backend, q).packed_tilings(q, k, v, packing, deterministic=deterministic)
        form = None if tilings is None else PackedForm(left, right, documents.sequences, tilings)
        keep_form(documents, key, form)
    return form


def keep_form(documents: Documents, key: Hashable, value: Any) -> None:
    """Keeps `value` in the forms of `documents`, of which there are few."""
    if len(documents.forms) >= MOST:
        documents.forms.clear()
    documents.forms[key] = value
