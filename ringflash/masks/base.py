"""The interface of masks, the mask that hides nothing, and intersections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.masks.bitmap import Bitmap
from ringflash.masks.pair_counts import PairCounts

if TYPE_CHECKING:
    from ringflash.masks.intervals import Documents


class Packing(NamedTuple):
    """Packed documents under causal masks and windows; a GPU can make the tables of such a mask from `documents`.

    Args:
        left: keys before its own position that a query sees at most.
        right: keys after its own position that a query sees at most.
        documents: the documents.
    """

    left: int
    right: int
    documents: Documents

    def mean_keys(self, seqlen: int) -> float:
        """Estimates the keys that a query sees on average. Lengths of documents on a GPU count as equal."""
        length = min(self.documents.lengths.mean or seqlen / self.documents.count, seqlen)
        return sum(limit * (1 - limit / length / 2) if limit < length else length / 2 for limit in self[:2])

    def most_keys(self, seqlen: int) -> int:
        """Estimates the most keys that a query sees, likewise."""
        longest = min(self.documents.lengths.longest or seqlen // self.documents.count, seqlen)
        return min(longest, min(self.left, longest) + min(self.right, longest) + 1)


class Mask(ABC):
    """A rule for the keys that a query sees: one interval of global positions a row, less keys hidden by a bitmap.

    Without a bitmap the ends of the interval never fall from one row to the next. The rows that see any key of a range
    are therefore consecutive as well. Masks are values: they compare by content, and are usable as keys of a cache.
    """

    reach: tuple[int, int] | None = None
    """Keys before and after its own position that a query sees, for masks that only limit these numbers."""

    packing: Packing | None = None
    """The mask as a `Packing`; None if it has no documents, several, or other parts."""

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the hash, which differs between processes."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    @abstractmethod
    def parts(self) -> tuple[Mask, ...]:
        """Returns the masks that intersect to this one."""

    @abstractmethod
    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns the first key seen and one past the last: int64 lo and hi, (batch, rows).

        The batch is 1 if all sequences are alike.

        Args:
            positions_q: (rows,) int64 global positions.
            seqlen_k: number of keys in the whole sequence.
        """

    def bitmap(self) -> Bitmap | None:
        """Returns the bitmap that selects keys within the interval; None selects all of them."""
        return None

    @property
    @abstractmethod
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the mask as a string and CPU tensors, from which `mask_from_spec` makes an equal mask.

        The tensors are the mask's own. Do not write to them: calls that know the mask would go on with the old values.
        """

    @property
    def operands(self) -> tuple[str, list[Tensor]]:
        """Returns `spec`, but with the tensors where they are: those of `Documents` may be on a GPU."""
        return self.spec

    @property
    def sequences(self) -> int | None:
        """Returns the number of sequences that the mask has entries for; None if it applies to any number."""
        return None

    @property
    def batch(self) -> int:
        """Returns the batch of `bounds`: `sequences`, or 1 if it is None."""
        return self.sequences or 1

    def validate(self, seqlen: int) -> None:
        """Checks that the mask fits a whole sequence of `seqlen` keys.

        Raises:
            ArgumentError: the mask has lengths, blocks or a tree of another sequence.
        """
        for part in self.parts:
            if part is not self:
                part.validate(seqlen)

    def __and__(self, other: Mask) -> Mask:
        """Returns the mask that shows the keys visible under both masks."""
        if not isinstance(other, Mask):
            return NotImplemented
        parts = _in_order([part for mask in (self, other) for part in mask.parts])
        return parts[0] if len(parts) == 1 else Intersection(tuple(parts)) if parts else Full()

    def dense(self, positions_q: Tensor, positions_k: Tensor) -> Tensor:
        """Returns the mask elementwise: bool (batch, rows, keys), True where the key is seen; batch as in `bounds`."""
        seqlen_k = int(positions_k.max()) + 1 if positions_k.numel() else 0
        lo, hi = self.bounds(positions_q, seqlen_k)
        seen = (positions_k >= lo[..., None]) & (positions_k < hi[..., None])
        bitmap = self.bitmap()
        return seen if bitmap is None else seen & bitmap.sees(positions_q, positions_k)

    def area(self, seqlen_q: int, seqlen_k: int) -> PairCounts:
        """Returns the counts of visible pairs of queries at the last `seqlen_q` positions with all `seqlen_k` keys."""
        first = seqlen_k - seqlen_q
        lo, hi = torch.broadcast_tensors(*self.bounds(torch.arange(first, seqlen_k, device="cpu"), seqlen_k))
        return PairCounts(lo, hi, first, self.bitmap())


@dataclass(frozen=True)
class Full(Mask):
    """The mask under which every query sees every key."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Returns no masks: an empty intersection shows everything."""
        return ()

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns an empty string and no tensors."""
        return "", []

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo = 0, hi = seqlen_k."""
        return torch.zeros_like(positions_q)[None], torch.full_like(positions_q, seqlen_k)[None]


class AtomicMask(Mask):
    """A mask that is not an intersection."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Returns the mask itself."""
        return (self,)


class TensorMask(AtomicMask):
    """A mask made from tensors; it equals a mask of the same kind with equal tensors.

    Tile tables are computed from it on the host. A tensor on a GPU is copied to the host once, and the host waits for
    the copy: make masks from lists, or from CPU tensors such as a data loader gives. `Documents` on a GPU need no such
    copy in calls of the Hopper kernels on one device.
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


@dataclass(frozen=True)
class Intersection(Mask):
    """The mask that shows the keys visible under all of several masks; `a & b` makes it, and equals `b & a`.

    Args:
        of: at least two masks, each once and in the order of `_in_order`.
    """

    of: tuple[Mask, ...]

    def __post_init__(self) -> None:
        counts = {part.sequences for part in self.of if part.sequences is not None}
        if len(counts) > 1:
            remedy = "Give all of them one entry a sequence."
            raise ArgumentError("mask", expected="one batch size", got=sorted(counts), remedy=remedy)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.of)

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Returns the intersected masks."""
        return self.of

    @property
    def sequences(self) -> int | None:
        """Returns the number of sequences that parts have entries for; None if all parts apply to any number."""
        return next((part.sequences for part in self.of if part.sequences is not None), None)

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the strings of the parts joined, and all their tensors."""
        return _joined([part.spec for part in self.of])

    @property
    def operands(self) -> tuple[str, list[Tensor]]:
        """Returns the strings of the parts joined, and all their tensors, where they are."""
        return _joined([part.operands for part in self.of])

    @cached_property
    def packing(self) -> Packing | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns the mask as a `Packing` if one part is documents, and the others limit `reach`."""
        return find_packing(self.of)

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns the largest lo and the smallest hi of the parts."""
        los, his = zip(*(part.bounds(positions_q, seqlen_k) for part in self.of), strict=True)
        return reduce(torch.maximum, los), reduce(torch.minimum, his)

    def bitmap(self) -> Bitmap | None:
        """Returns the intersection of the parts' bitmaps, or None if no part has one."""
        return self._bitmap

    @cached_property
    def _bitmap(self) -> Bitmap | None:
        bitmaps = [bitmap for part in self.of if (bitmap := part.bitmap()) is not None]
        return reduce(Bitmap.__and__, bitmaps) if bitmaps else None

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.of))


def find_packing(parts: Sequence[Mask]) -> Packing | None:
    """Returns the `packing` of an intersection, without its cache.

    torch.compile may write no cache of a mask while it checkpoints.
    """
    packings = [part.packing for part in parts if part.packing is not None]
    reaches = [part.reach for part in parts if part.reach is not None]
    if len(packings) != 1 or len(reaches) != len(parts) - 1:
        return None
    left, right = map(min, zip(packings[0][:2], *reaches, strict=True))
    return Packing(left, right, packings[0].documents)


def _joined(specs: Sequence[tuple[str, list[Tensor]]]) -> tuple[str, list[Tensor]]:
    words, tensors = zip(*specs, strict=True)
    return " & ".join(words), [tensor for of_part in tensors for tensor in of_part]


def _in_order(parts: Sequence[Mask]) -> list[Mask]:
    """Returns the parts of an intersection in an order that depends on their values alone, and equal parts once.

    Equal intersections then have one text, by which ranks compare masks and caches look them up.
    """
    ordered = sorted(parts, key=_words)
    if len({_words(part) for part in ordered}) == len(ordered) or is_traced():
        return ordered
    return sorted(dict.fromkeys(ordered), key=_content)


def _words(part: Mask) -> str:
    """Returns the text of `spec`, by that of `operands`, which reads no values of documents on a GPU."""
    return part.operands[0].removeprefix("unchecked_")


def _content(part: Mask) -> tuple[str, list[bytes]]:
    words, tensors = part.spec
    return words, [tensor.numpy().tobytes() for tensor in tensors]


def as_mask(mask: Mask | None) -> Mask:
    """Returns the mask that a caller passed, or `Full()` for None.

    Raises:
        ArgumentError: `mask` is neither a mask nor None.
    """
    if mask is None:
        return Full()
    if not isinstance(mask, Mask):
        raise _no_mask(mask)
    return mask


def _no_mask(given: Any) -> ArgumentError:
    """Returns the error for a dense mask, which its shape and dtype describe, or for any other value."""
    expected = "None or a mask such as rf.Causal()"
    if not isinstance(given, Tensor | np.ndarray):
        remedy = "Pass a mask value, not its class or a tensor."
        return ArgumentError("mask", expected=expected, got=shorten(repr(given), 200), remedy=remedy)
    remedy = (
        "Pass the rule instead of its matrix: rf.Causal(), rf.SlidingWindow(left), rf.Documents(cu_seqlens), "
        "rf.KeyPadding(seqlens_k) or rf.PrefixLM(prefix_lens), joined with &. A pattern without such a rule is "
        "rf.BlockSparse(blocks, block_size)."
    )
    got = f"a {type(given).__name__} of {given.dtype} {tuple(given.shape)}"
    return ArgumentError("mask", expected=expected, got=got, remedy=remedy)


def integers(
    argument: str,
    values: Tensor | Sequence[int] | Sequence[Sequence[int]],
    max_ndim: int = 1,
    *,
    stays_on_gpu: bool = False,
) -> Tensor:
    """Returns a copy of a vector of integers, or of a matrix if `max_ndim` is 2: int64, contiguous.

    The copy is on the CPU; with `stays_on_gpu`, the copy of a tensor on a GPU is there.

    Raises:
        ArgumentError: `values` is anything else, or empty.
    """
    expected = "a vector of integers" if max_ndim == 1 else "a vector of integers, or one a sequence"
    given = tensor_of(argument, values, expected)
    fits = 1 <= given.ndim <= max_ndim and given.numel() > 0
    if not fits or given.is_floating_point() or given.dtype == torch.bool:
        got = f"{given.dtype} {tuple(given.shape)}"
        remedy = "Pass a list or tensor of whole numbers."
        raise ArgumentError(argument, expected=expected, got=got, remedy=remedy)
    device = given.device if stays_on_gpu and given.is_cuda else "cpu"
    return given.detach().to(device, torch.int64, copy=True, memory_format=torch.contiguous_format)


def tensor_of(argument: str, values: Any, expected: str) -> Tensor:
    """Returns `values` as a tensor with values that can be read.

    Raises:
        ArgumentError: `values` cannot become a tensor, or is a meta tensor, which has no storage.
    """
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
    """Returns whether torch.compile traces this code, without values.

    The values of a mask are then checked when the custom operator makes the mask again.
    """
    return torch.compiler.is_compiling()


def shortened(values: Sequence[int]) -> str:
    """Returns a list as text, cut after its eighth entry."""
    return f"[{', '.join(map(str, values[:8]))}, ... {len(values)} in all]" if len(values) > 8 else str(list(values))
