"""What a mask is, the one that hides nothing, and intersections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.layouts.layout import Chunk
from ringflash.masks.bitmap import Bitmap
from ringflash.masks.pair_counts import PairCounts


class Mask(ABC):
    """Which keys a query sees: one interval of global positions a row, and of these what a bitmap shows, if it has one.

    Without a bitmap the ends of the interval never fall from one row to the next, so the rows that see any of some
    keys are consecutive as well. Masks are values: equal when they say the same, and usable as keys of a cache.
    """

    @property
    @abstractmethod
    def parts(self) -> tuple[Mask, ...]:
        """The masks of which this is the intersection."""

    @abstractmethod
    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """First key seen and one past the last: int64 lo and hi, (batch, rows), batch 1 when all entries are alike.

        Args:
            positions_q: (rows,) int64 global positions.
            seqlen_k: keys in the whole sequence.
        """

    def bitmap(self) -> Bitmap | None:
        """What of the interval is seen; None is all of it."""
        return None

    @property
    @abstractmethod
    def spec(self) -> tuple[str, list[Tensor]]:
        """The mask as a string and tensors on the CPU, from which `mask_from_spec` makes it again."""

    @property
    def batch(self) -> int:
        """Sequences that the mask speaks of; 1 when it is the same for any number."""
        return 1

    def validate(self, seqlen: int) -> None:
        """Checks that the mask fits a whole sequence of `seqlen` keys.

        Raises:
            ArgumentError: lengths, blocks or a tree of another sequence.
        """
        for part in self.parts:
            if part is not self:
                part.validate(seqlen)

    def __and__(self, other: Mask) -> Mask:
        """Sees what both see."""
        if not isinstance(other, Mask):
            return NotImplemented
        parts = [part for mask in (self, other) for part in mask.parts]
        return parts[0] if len(parts) == 1 else Intersection(tuple(parts)) if parts else Full()

    def dense(self, positions_q: Tensor, positions_k: Tensor) -> Tensor:
        """The mask elementwise: bool (batch, rows, keys), True where the key is seen; batch as in `bounds`."""
        seqlen_k = int(positions_k.max()) + 1 if positions_k.numel() else 0
        lo, hi = self.bounds(positions_q, seqlen_k)
        seen = (positions_k >= lo[..., None]) & (positions_k < hi[..., None])
        bitmap = self.bitmap()
        return seen if bitmap is None else seen & bitmap.sees(positions_q, positions_k)

    def area(self, seqlen_q: int, seqlen_k: int) -> PairCounts:
        """Counts of visible pairs of queries at the last `seqlen_q` positions with keys at the `seqlen_k` from 0 on."""
        first = seqlen_k - seqlen_q
        lo, hi = torch.broadcast_tensors(*self.bounds(torch.arange(first, seqlen_k, device="cpu"), seqlen_k))
        return PairCounts(lo, hi, first, self.bitmap())

    def meets(self, chunks_q: Sequence[Chunk], chunks_k: Sequence[Chunk]) -> bool:
        """Whether any row of `chunks_q` sees any key of `chunks_k`."""
        seqlen_k = max((chunk.stop for chunk in chunks_k), default=0)
        bitmap = self.bitmap()
        for chunk_q in chunks_q:
            rows = torch.arange(chunk_q.start, chunk_q.stop, device="cpu")
            lo, hi = self.bounds(rows, seqlen_k)
            for chunk_k in chunks_k:
                first, last = torch.broadcast_tensors(lo.clamp(min=chunk_k.start), hi.clamp(max=chunk_k.stop))
                if bool((last > first).any() if bitmap is None else bitmap.sees_any(rows, first, last).any()):
                    return True
        return False


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Nothing to intersect with."""
        return ()

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """No word at all."""
        return "", []

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = 0, hi = seqlen_k."""
        return torch.zeros_like(positions_q)[None], torch.full_like(positions_q, seqlen_k)[None]


class AtomicMask(Mask):
    """A mask that is no intersection."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Itself."""
        return (self,)


class TensorMask(AtomicMask):
    """A mask that is made from tensors, and equal to another of its kind with the same.

    Tables of tiles are made of it on the host. Of a tensor on a GPU it takes a copy, once, for which the host waits:
    make masks from lists, or from CPU tensors such as a data loader gives.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorMask):
            return NotImplemented
        (word, tensors), (other_word, other_tensors) = self.spec, other.spec
        return word == other_word and all(map(torch.equal, tensors, other_tensors))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        word, tensors = self.spec
        return hash((word, *(tensor.numpy().tobytes() for tensor in tensors)))


@dataclass(frozen=True, eq=False)
class Intersection(Mask):
    """Sees what all of several masks see; `a & b` makes it, and equals `b & a`."""

    of: tuple[Mask, ...]

    def __post_init__(self) -> None:
        batches = {part.batch for part in self.of} - {1}
        if len(batches) > 1:
            remedy = "Give all of them one entry a sequence."
            raise ArgumentError("mask", expected="one batch size", got=sorted(batches), remedy=remedy)

    def __eq__(self, other: object) -> bool:
        return frozenset(self.of) == frozenset(other.of) if isinstance(other, Intersection) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self.of))

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that are intersected."""
        return self.of

    @property
    def batch(self) -> int:
        """That of the parts that have one."""
        return max(part.batch for part in self.of)

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """The parts' words joined, and all their tensors."""
        words, tensors = zip(*(part.spec for part in self.of), strict=True)
        return " & ".join(words), [tensor for of_part in tensors for tensor in of_part]

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = the largest, hi = the smallest."""
        los, his = zip(*(part.bounds(positions_q, seqlen_k) for part in self.of), strict=True)
        return reduce(torch.maximum, los), reduce(torch.minimum, his)

    def bitmap(self) -> Bitmap | None:
        """What the parts' bitmaps all show."""
        return self._bitmap

    @cached_property
    def _bitmap(self) -> Bitmap | None:
        bitmaps = [bitmap for part in self.of if (bitmap := part.bitmap()) is not None]
        return reduce(Bitmap.__and__, bitmaps) if bitmaps else None

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.of))


def as_mask(mask: Mask | None) -> Mask:
    """The mask a caller means: None is `Full()`."""
    if mask is None:
        return Full()
    if not isinstance(mask, Mask):
        remedy = "Pass a mask value, not its class or a tensor."
        raise ArgumentError("mask", expected="None or a mask such as rf.Causal()", got=repr(mask), remedy=remedy)
    return mask


def integers(argument: str, values: Tensor | Sequence[int] | Sequence[Sequence[int]], max_ndim: int = 1) -> Tensor:
    """A copy of a vector of integers, or of a matrix where `max_ndim` is 2: int64 on the CPU, contiguous.

    Raises:
        ArgumentError: anything else, or an empty one.
    """
    expected = "a vector of integers" if max_ndim == 1 else "a vector of integers, or one a sequence"
    given = tensor_of(argument, values, expected)
    fits = 1 <= given.ndim <= max_ndim and given.numel() > 0
    if not fits or given.is_floating_point() or given.dtype == torch.bool:
        got = f"{given.dtype} {tuple(given.shape)}"
        remedy = "Pass a list or tensor of whole numbers."
        raise ArgumentError(argument, expected=expected, got=got, remedy=remedy)
    return given.detach().to("cpu", torch.int64, copy=True, memory_format=torch.contiguous_format)


def tensor_of(argument: str, values: Any, expected: str) -> Tensor:
    """`values` as a tensor that can be read. Raises ArgumentError where they are none, or have no storage."""
    try:
        given = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    except (ValueError, TypeError, RuntimeError) as error:
        remedy = "Pass lists of one length, or a tensor."
        raise ArgumentError(argument, expected=expected, got=str(error), remedy=remedy) from error
    if given.is_meta:
        remedy = "A mask is a value: make it from numbers."
        raise ArgumentError(argument, expected=expected, got="a meta tensor", remedy=remedy)
    return given


def is_traced() -> bool:
    """Whether torch.compile runs this, with no numbers yet: a mask's are then checked where the operator makes it."""
    return torch.compiler.is_compiling()


def shortened(values: Sequence[int]) -> str:
    """A list as text, without what is past its eighth entry."""
    return f"[{', '.join(map(str, values[:8]))}, ... {len(values)} in all]" if len(values) > 8 else str(list(values))
