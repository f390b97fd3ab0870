"""Masks as values: row i sees the keys [lo_i, hi_i), in global positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.layout import Chunk


class Mask(ABC):
    """Which keys a query sees, as one interval of global positions a row."""

    name: str

    @abstractmethod
    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """First key seen and one past the last, for rows at `positions_q` (rows,): int64 lo (rows,), hi (rows,)."""

    def dense(self, positions_q: Tensor, positions_k: Tensor) -> Tensor:
        """The mask elementwise: bool (len(positions_q), len(positions_k)), True where the key is seen."""
        seqlen_k = int(positions_k.max()) + 1 if positions_k.numel() else 0
        lo, hi = self.bounds(positions_q, seqlen_k)
        return (positions_k >= lo[:, None]) & (positions_k < hi[:, None])

    def meets(self, chunks_q: Sequence[Chunk], chunks_k: Sequence[Chunk]) -> bool:
        """Whether any row of `chunks_q` sees any key of `chunks_k`; bounds must not fall from row to row."""
        for chunk_q in chunks_q:
            for chunk_k in chunks_k:
                ends = torch.tensor([chunk_q.start, chunk_q.stop - 1])
                lo, hi = self.bounds(ends, chunk_k.stop)
                if int(hi.max()) > chunk_k.start and int(lo.min()) < chunk_k.stop:
                    return True
        return False


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    name = "full"

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = 0, hi = seqlen_k."""
        return torch.zeros_like(positions_q), torch.full_like(positions_q, seqlen_k)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys at its own position and before.

    Positions are global. Where `flash_attention` gets fewer or more queries than keys, the queries are the last ones:
    query i stands at `seqlen_k - seqlen_q + i`, so the diagonal ends in the bottom right corner.
    """

    name = "causal"

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = 0, hi = min(position + 1, seqlen_k), not below 0."""
        return torch.zeros_like(positions_q), (positions_q + 1).clamp(0, seqlen_k)


_MASKS: dict[str, Mask] = {mask.name: mask for mask in (Full(), Causal())}


def as_mask(mask: Mask | None) -> Mask:
    """The mask a caller means: None is `Full()`."""
    if mask is None:
        return _MASKS["full"]
    if not isinstance(mask, Mask):
        remedy = "Pass a mask value, not its class or a tensor."
        raise ArgumentError("mask", expected="None or rf.Causal()", got=repr(mask), remedy=remedy)
    return mask


def mask_by_name(name: str) -> Mask:
    """The mask whose `.name` this is: how a mask crosses a custom op's boundary."""
    return _MASKS[name]
