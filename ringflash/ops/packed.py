"""Packed forms: calls that differ in the documents of their mask alone are one prepared call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ringflash.kernels import select
from ringflash.kernels.contract import Tiling
from ringflash.masks import Mask
from ringflash.recent_calls import RecentCalls


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


_tilings: RecentCalls[tuple[Tiling, ...]] = RecentCalls()  # empty where the host makes the tables


def packed_form(
    mask: Mask, q: Tensor, k: Tensor, v: Tensor, softcap: float, backend: str, *, deterministic: bool
) -> PackedForm | None:
    """Returns the form of a mask; None unless it is of packed documents, and kernels read tables that the GPU makes."""
    packing = mask.packing
    if packing is None or softcap or backend not in select.BACKENDS:
        return None
    mean_keys = packing.mean_keys(k.shape[1])
    key = backend, q.device, q.dtype, q.shape, k.shape, v.shape, deterministic, mean_keys
    tilings = _tilings.get(key)
    if tilings is None:
        kernels = select.choose(backend, q)
        found = kernels.packed_tilings(q, k, v, mean_keys=mean_keys, deterministic=deterministic)
        tilings = _tilings.put(key, found or ())
    if not tilings:
        return None
    return PackedForm(packing.left, packing.right, packing.documents.sequences, (tilings[0], tilings[1]))
