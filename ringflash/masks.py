"""Masks as values: row i sees the keys [lo_i, hi_i), in global positions.

Causal, sliding window, packed documents, key padding and prefix-LM are all intervals, and an intersection of intervals
is one too, so masks compose with `&`. Both ends never fall from one row to the next, so the rows that see any of some
keys are consecutive as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.layout import Chunk

EVERYTHING = 2**62  # more keys than any sequence has


class Mask(ABC):
    """Which keys a query sees: one interval of global positions a row.

    Masks are values: equal when they say the same, and usable as keys of a cache.
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

    @property
    @abstractmethod
    def spec(self) -> tuple[str, list[Tensor]]:
        """The mask as a string and int64 tensors on the CPU, from which `mask_from_spec` makes it again."""

    @property
    def batch(self) -> int:
        """Sequences that the mask speaks of; 1 when it is the same for any number."""
        return 1

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
        return (positions_k >= lo[..., None]) & (positions_k < hi[..., None])

    def meets(self, chunks_q: Sequence[Chunk], chunks_k: Sequence[Chunk]) -> bool:
        """Whether any row of `chunks_q` sees any key of `chunks_k`."""
        seqlen_k = max((chunk.stop for chunk in chunks_k), default=0)
        for chunk_q in chunks_q:
            lo, hi = self.bounds(torch.arange(chunk_q.start, chunk_q.stop, device="cpu"), seqlen_k)
            for chunk_k in chunks_k:
                if bool((hi.clamp(max=chunk_k.stop) > lo.clamp(min=chunk_k.start)).any()):
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


class _Part(Mask):
    """A mask that is no intersection."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Itself."""
        return (self,)


@dataclass(frozen=True)
class Causal(_Part):
    """A query sees the keys at its own position and before.

    Positions are global. Where `flash_attention` gets fewer or more queries than keys, the queries are the last ones:
    query i stands at `seqlen_k - seqlen_q + i`, so the diagonal ends in the bottom right corner.
    """

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """One word."""
        return "causal", []

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = 0, hi = position + 1."""
        return torch.zeros_like(positions_q)[None], (positions_q + 1).clamp(0, seqlen_k)[None]


@dataclass(frozen=True)
class SlidingWindow(_Part):
    """A query sees `left` keys before its position and `right` after it, and the one there; None is no limit.

    Positions are global, as in `Causal`; `SlidingWindow(None, 0)` is causal.

    Raises:
        ArgumentError: a negative limit.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, limit in (("left", self.left), ("right", self.right)):
            if limit is not None and limit < 0:
                raise ArgumentError(name, expected="None or at least 0", got=limit, remedy="None is no limit.")

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """The limits in words."""
        return f"window {self.left} {self.right}", []

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = position - left, hi = position + right + 1."""
        left, right = (EVERYTHING if limit is None else limit for limit in (self.left, self.right))
        lo, hi = positions_q - left, positions_q + (right + 1)
        return lo.clamp(0, seqlen_k)[None], hi.clamp(0, seqlen_k)[None]


class _Table(_Part):
    """A mask that is made from a vector of integers, and equal to another of its kind with the same."""

    word: str
    argument: str

    def __init__(self, values: Tensor | Sequence[int]) -> None:
        given = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
        if given.ndim != 1 or given.numel() == 0 or given.is_floating_point() or given.dtype == torch.bool:
            got = f"{given.dtype} {tuple(given.shape)}"
            remedy = "Pass a list or tensor of whole numbers."
            raise ArgumentError(self.argument, expected="a vector of integers", got=got, remedy=remedy)
        self._values = given.detach().to("cpu", torch.int64, copy=True)
        if int(self._values.min()) < 0:
            remedy = "Count tokens from 0."
            raise ArgumentError(self.argument, expected="none below 0", got=int(self._values.min()), remedy=remedy)

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Its kind, and the vector."""
        return self.word, [self._values]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, _Table) and torch.equal(self._values, other._values)

    def __hash__(self) -> int:
        return hash((self.word, tuple(self._values.tolist())))

    def __repr__(self) -> str:
        values = self._values.tolist()
        shown = f"[{', '.join(map(str, values[:8]))}, ... {len(values)} in all]" if len(values) > 8 else values
        return f"{type(self).__name__}({shown})"


class Documents(_Table):
    """Packed documents: a query sees the keys of its own document.

    Document i holds the positions [cu_seqlens[i], cu_seqlens[i + 1]); it may be empty. Positions past the last one
    belong to no document: they see nothing and nobody sees them.

    Args:
        cu_seqlens: (ndocuments + 1,) integers from 0 on, never falling.

    Raises:
        ArgumentError: another shape, start or order.
    """

    word, argument = "documents", "cu_seqlens"

    def __init__(self, cu_seqlens: Tensor | Sequence[int]) -> None:
        super().__init__(cu_seqlens)
        ends = self._values
        if int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
            remedy = "Pass cumulative lengths: 0, the first document's length, the first two's, ..."
            raise ArgumentError("cu_seqlens", expected="0 first and never falling", got=ends.tolist(), remedy=remedy)

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo and hi = where the row's document begins and ends."""
        ends = self._values.to(positions_q.device)
        index = torch.searchsorted(ends, positions_q, right=True)
        lo, hi = ends[(index - 1).clamp(min=0)], ends[index.clamp(max=ends.numel() - 1)]
        hi = hi.where(index > 0, lo)  # before the first document
        return lo.clamp(max=seqlen_k)[None], hi.clamp(max=seqlen_k)[None]


class KeyPadding(_Table):
    """Each sequence of the batch has keys up to its length; what its storage holds past that is never read.

    Args:
        seqlens_k: (batch,) integers.
    """

    word, argument = "key_padding", "seqlens_k"

    def __init__(self, seqlens_k: Tensor | Sequence[int]) -> None:
        super().__init__(seqlens_k)

    @property
    def batch(self) -> int:
        """One length a sequence."""
        return self._values.numel()

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = 0, hi = the sequence's length."""
        hi = self._values.to(positions_q.device).clamp(max=seqlen_k)[:, None].expand(-1, positions_q.numel())
        return torch.zeros_like(positions_q)[None], hi


class PrefixLM(_Table):
    """A query sees the whole prefix of its sequence, and after that the keys at its own position and before.

    Args:
        prefix_lens: (batch,) integers.

    Source: Raffel et al. 2020, "T5", section 3.2.1.
    """

    word, argument = "prefix_lm", "prefix_lens"

    def __init__(self, prefix_lens: Tensor | Sequence[int]) -> None:
        super().__init__(prefix_lens)

    @property
    def batch(self) -> int:
        """One prefix a sequence."""
        return self._values.numel()

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """lo = 0, hi = max(position + 1, prefix)."""
        prefix = self._values.to(positions_q.device)[:, None]
        return torch.zeros_like(positions_q)[None], torch.maximum(positions_q + 1, prefix).clamp(0, seqlen_k)


@dataclass(frozen=True)
class Intersection(Mask):
    """Sees what all of several masks see; `a & b` makes it."""

    of: tuple[Mask, ...]

    def __post_init__(self) -> None:
        batches = {part.batch for part in self.of} - {1}
        if len(batches) > 1:
            remedy = "Give all of them one entry a sequence."
            raise ArgumentError("mask", expected="one batch size", got=sorted(batches), remedy=remedy)

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

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.of))


_TABLES: dict[str, type[_Table]] = {kind.word: kind for kind in (Documents, KeyPadding, PrefixLM)}


def as_mask(mask: Mask | None) -> Mask:
    """The mask a caller means: None is `Full()`."""
    if mask is None:
        return Full()
    if not isinstance(mask, Mask):
        remedy = "Pass a mask value, not its class or a tensor."
        raise ArgumentError("mask", expected="None or a mask such as rf.Causal()", got=repr(mask), remedy=remedy)
    return mask


def mask_from_spec(words: str, tensors: Sequence[Tensor]) -> Mask:
    """The mask with this `.spec`: how a mask crosses a custom op's boundary."""
    remaining = iter(tensors)
    mask: Mask = Full()
    for part in filter(None, words.split(" & ")):
        name, *limits = part.split()
        if name == "causal":
            mask &= Causal()
        elif name == "window":
            left, right = (None if limit == "None" else int(limit) for limit in limits)
            mask &= SlidingWindow(left, right)
        else:
            mask &= _TABLES[name](next(remaining))
    return mask
