"""Interval masks: causal, sliding window, documents, key padding and prefix-LM."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash.checks import check_switch, check_whole
from ringflash.errors import ArgumentError
from ringflash.masks.base import AtomicMask, Packing, TensorMask, integers, is_traced, shortened
from ringflash.torch_private import are_transforms_active

EVERYTHING = 2**62  # more keys than any sequence has


@dataclass(frozen=True)
class Causal(AtomicMask):
    """The causal mask: a query sees the keys at its own position and before.

    Positions are global. If `flash_attention` gets fewer or more queries than keys, the queries are the last positions:
    query i has position `seqlen_k - seqlen_q + i`, so the diagonal ends in the bottom right corner.
    """

    @property
    def reach(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns no limit before a query, and no keys after it."""
        return EVERYTHING, 0

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind, and no tensors."""
        return "causal", []

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo = 0, hi = position + 1."""
        return torch.zeros_like(positions_q)[None], (positions_q + 1).clamp(0, seqlen_k)[None]


@dataclass(frozen=True)
class SlidingWindow(AtomicMask):
    """The sliding window mask: a query sees the key at its position, `left` keys before and `right` keys after it.

    Positions are global, as in `Causal`. None is no limit; `SlidingWindow(None, 0)` is causal.

    Raises:
        ArgumentError: a limit is negative, or not a whole number.
    """

    left: int | None = None
    right: int | None = None
    _words: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, limit in (("left", self.left), ("right", self.right)):
            if limit is not None:
                check_whole(name, limit, 0, "None is no limit.")
        # torch.compile traces `spec`, and takes an integer that has changed for a symbol, which no text can hold.
        object.__setattr__(self, "_words", f"window {self.left} {self.right}")

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind with both limits, and no tensors."""
        return self._words, []

    @property
    def reach(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns both limits. Larger ones, such as sys.maxsize, would overflow where a position is added."""
        left, right = (EVERYTHING if limit is None else min(limit, EVERYTHING) for limit in (self.left, self.right))
        return left, right

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo = position - left, hi = position + right + 1."""
        left, right = self.reach
        lo, hi = positions_q - left, positions_q + (right + 1)
        return lo.clamp(0, seqlen_k)[None], hi.clamp(0, seqlen_k)[None]


class _Table(TensorMask):
    """A mask made from a vector of integers."""

    word: str
    argument: str

    def __init__(self, values: Tensor | Sequence[int]) -> None:
        self._values = integers(self.argument, values)
        if not is_traced() and bool((self._values < 0).any()):
            least = int(self._values.min())
            raise ArgumentError(self.argument, expected="none below 0", got=least, remedy="Count tokens from 0.")

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind, and the vector."""
        return self.word, [self._values]

    @property
    def sequences(self) -> int | None:
        """Returns the number of entries, one a sequence."""
        return self._values.numel()

    def validate(self, seqlen: int) -> None:
        """Raises ArgumentError if a length exceeds the sequence's `seqlen` keys."""
        most = int(self._values.max())
        if most > seqlen:
            remedy = "Count the tokens of the whole sequence."
            raise ArgumentError(
                self.argument, expected=f"none above the sequence's {seqlen} keys", got=most, remedy=remedy
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shortened(self._values.tolist())})"


class Lengths(NamedTuple):
    """Figures of the lengths of documents; all documents on a GPU are unknown.

    Args:
        mean: length of the document of an average token, 0 if unknown.
        longest: length of the longest document, 0 if unknown.
        alignment: the largest number that divides all cumulative lengths before the sequence's end: 1 if unknown, 0 if
            all of them are 0.
    """

    mean: float
    longest: int
    alignment: int


class Documents(TensorMask):
    """The mask of packed documents: a query sees the keys of its own document.

    Document i holds the positions [cu_seqlens[i], cu_seqlens[i + 1]); it may be empty. The documents cover the whole
    sequence (attention calls `validate`); a query outside them would see no key, and no query would see a key there.

    A tensor on a GPU is copied there. The Hopper kernels on one device make their tables from the copy, and the host
    waits for nothing. Rings, other kernels and whatever else needs the values on the host read them once, and wait.

    Args:
        cu_seqlens: (ndocuments + 1,) integers from 0 to the sequence's length, never falling; or one such row a
            sequence, (batch, ndocuments + 1). Rows of fewer documents are filled up with the sequence's length.
        device_check: whether the GPU checks start, order and sum of a tensor on it. Wrong values end the process with
            a message of CUDA, as an index out of range does. Without the check the values must be right: what the
            first and last document leave out is then one document more at each end.

    Raises:
        ArgumentError: `cu_seqlens` has another shape, start or order.
    """

    def __init__(
        self, cu_seqlens: Tensor | Sequence[int] | Sequence[Sequence[int]], *, device_check: bool = True
    ) -> None:
        check_switch("device_check", device_check)
        ends = integers("cu_seqlens", cu_seqlens, max_ndim=2, stays_on_gpu=True)
        # A single row applies to any number of sequences.
        ends = ends[0] if ends.ndim == 2 and ends.shape[0] == 1 else ends
        self.device_check = device_check
        self.forms: dict[Hashable, Any] = {}
        """Packed forms of calls with these documents, by all that they depend on besides; see `ops/packed.py`."""
        self.tables: dict[Hashable, tuple[Tensor, ...]] | None = None
        """Tables on a GPU that kernels have made of these documents; see `kernels/document_tables.py`."""
        self.of_capture = ends.is_cuda and not is_traced() and torch.cuda.is_current_stream_capturing()
        """Whether the capture of a CUDA graph makes the values, in its pool. Its replays fill them."""
        self._given = ends
        if not ends.is_cuda:
            _check_ends(ends)

    @property
    def _ends(self) -> Tensor:
        """The values on the CPU, checked."""
        if not self._given.is_cuda:
            return self._given
        return self._given.cpu() if is_traced() else self._read

    @cached_property
    def _read(self) -> Tensor:
        """The values of a GPU, read once."""
        ends = self._given.cpu()
        _check_ends(ends)
        return ends

    @property
    def on_gpu(self) -> Tensor | None:
        """Returns the values on the GPU on which they were given, int64 and unchecked; None if given on the CPU."""
        return self._given if self._given.is_cuda else None

    @property
    def count(self) -> int:
        """Returns the number of documents of a sequence, with empty ones."""
        return max(self._given.shape[-1] - 1, 1)

    @cached_property
    def lengths(self) -> Lengths:
        """Returns figures of the lengths, as far as the host knows them."""
        if self._given.is_cuda:
            return Lengths(0.0, 0, 1)
        ends = self._given.numpy()
        lengths = ends[..., 1:] - ends[..., :-1]
        squares = np.square(lengths, dtype=np.float64).sum() if lengths.size else 0.0
        return Lengths(
            mean=float(squares / max(lengths.sum(), 1)),
            longest=int(lengths.max(initial=0)),
            alignment=int(np.gcd.reduce(ends[ends < ends[..., -1:]])),
        )

    @property
    def packing(self) -> Packing:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns the documents without a limit of `reach`; not cached, because documents would hold themselves."""
        return Packing(EVERYTHING, EVERYTHING, self)

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind, and the cumulative lengths."""
        return "documents", [self._ends]

    @property
    def operands(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind, and the cumulative lengths where they are."""
        return "documents" if self.device_check else "unchecked_documents", [self._given]

    @property
    def sequences(self) -> int | None:
        """Returns the number of rows of `cu_seqlens`, one a sequence; None if it is a vector."""
        return None if self._given.ndim == 1 else self._given.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the values on the CPU alone."""
        given = {"_given": self._ends, "of_capture": False, "device_check": self.device_check}
        return {**given, "forms": {}, "tables": None}

    def validate(self, seqlen: int) -> None:
        """Raises ArgumentError unless the documents of each sequence sum to `seqlen` keys."""
        sums = self._ends.numpy().reshape(self.batch, -1)[:, -1]  # numpy, which takes the host less time than torch
        if (sums != seqlen).any():
            wrong = int(sums[sums != seqlen][0])
            expected = f"lengths that sum to the sequence's {seqlen} keys"
            remedy = "End it with the sequence's length; what pads the sequence is a document too."
            raise ArgumentError("cu_seqlens", expected=expected, got=f"a sum of {wrong}", remedy=remedy)

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo and hi = the first position of the row's document, and one past its last."""
        plain = type(positions_q) is Tensor and not (is_traced() or are_transforms_active())
        if plain and positions_q.is_cpu:  # so the positions can be read
            rows = positions_q.numpy()
            if (rows[1:] >= rows[:-1]).all():  # then repeating is faster than a search for each row
                return self._repeated(rows, seqlen_k)
        ends = self._ends.to(positions_q.device).view(self.batch, -1)
        # By the number of ends up to a row's position; a row before the first document has an empty interval.
        los, his = torch.cat([ends[:, :1], ends], 1), torch.cat([ends[:, :1], ends[:, 1:], ends[:, -1:]], 1)
        los, his = los.clamp(max=seqlen_k), his.clamp(max=seqlen_k)
        index = torch.searchsorted(ends, positions_q.expand(self.batch, -1).contiguous(), right=True)
        return los.gather(1, index), his.gather(1, index)

    def _repeated(self, rows: np.ndarray, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo and hi for positions that never fall, by repeating each document's."""
        ends = self._ends.numpy().reshape(self.batch, -1)
        cuts = np.empty((len(ends), ends.shape[1] + 2), np.int64)
        cuts[:, 0], cuts[:, 1:-1], cuts[:, -1] = 0, rows.searchsorted(ends), len(rows)
        counts = (cuts[:, 1:] - cuts[:, :-1]).ravel()
        edges = np.empty_like(cuts)  # the first and the last end twice: rows outside all documents see nothing
        np.minimum(ends, seqlen_k, out=edges[:, 1:-1])
        edges[:, 0], edges[:, -1] = edges[:, 1], edges[:, -2]
        shape = len(ends), len(rows)
        lo, hi = (x.ravel().repeat(counts).reshape(shape) for x in (edges[:, :-1], edges[:, 1:]))
        return torch.from_numpy(lo), torch.from_numpy(hi)

    def __repr__(self) -> str:
        if self.sequences is None:
            return f"Documents({shortened(self._ends.tolist())})"
        return f"Documents({self.batch} sequences, the first {shortened(self._ends[0].tolist())})"


def _check_ends(ends: Tensor) -> None:
    """Raises ArgumentError for cumulative lengths on the CPU that do not begin at 0, or fall."""
    if not is_traced() and (bool((ends[..., 0] != 0).any()) or bool((ends.diff() < 0).any())):
        remedy = "Pass cumulative lengths: 0, the first document's length, the first two's, ..."
        raise ArgumentError("cu_seqlens", expected="0 first and never falling", got=ends.tolist(), remedy=remedy)


class KeyPadding(_Table):
    """The key padding mask: each sequence of the batch has keys up to its length; padding after them is never read.

    Args:
        seqlens_k: (batch,) integers, the lengths.
    """

    word, argument = "key_padding", "seqlens_k"

    def __init__(self, seqlens_k: Tensor | Sequence[int]) -> None:
        super().__init__(seqlens_k)

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo = 0, hi = the sequence's length."""
        hi = self._values.to(positions_q.device).clamp(max=seqlen_k)[:, None].expand(-1, positions_q.numel())
        return torch.zeros_like(positions_q)[None], hi


class PrefixLM(_Table):
    """The prefix-LM mask: a query sees the whole prefix of its sequence, and the keys at its own position and before.

    Args:
        prefix_lens: (batch,) integers, the lengths of the prefixes.

    Source: Raffel et al. 2020, "T5", section 3.2.1.
    """

    word, argument = "prefix_lm", "prefix_lens"

    def __init__(self, prefix_lens: Tensor | Sequence[int]) -> None:
        super().__init__(prefix_lens)

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo = 0, hi = max(position + 1, prefix)."""
        prefix = self._values.to(positions_q.device)[:, None]
        return torch.zeros_like(positions_q)[None], torch.maximum(positions_q + 1, prefix).clamp(0, seqlen_k)
