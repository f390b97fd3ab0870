"""Interval masks: causal, sliding window, documents, key padding and prefix-LM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ringflash.checks import check_whole
from ringflash.errors import ArgumentError
from ringflash.masks.base import AtomicMask, TensorMask, integers, is_traced, shortened
from ringflash.torch_private import are_transforms_active

EVERYTHING = 2**62  # more keys than any sequence has


@dataclass(frozen=True)
class Causal(AtomicMask):
    """The causal mask: a query sees the keys at its own position and before.

    Positions are global. If `flash_attention` gets fewer or more queries than keys, the queries are the last positions:
    query i has position `seqlen_k - seqlen_q + i`, so the diagonal ends in the bottom right corner.
    """

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

    def bounds(self, positions_q: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """Returns lo = position - left, hi = position + right + 1."""
        # Larger limits, such as sys.maxsize, would overflow where a position is added.
        left, right = (EVERYTHING if limit is None else min(limit, EVERYTHING) for limit in (self.left, self.right))
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


class Documents(TensorMask):
    """The mask of packed documents: a query sees the keys of its own document.

    Document i holds the positions [cu_seqlens[i], cu_seqlens[i + 1]); it may be empty. The documents cover the whole
    sequence (attention calls `validate`); a query outside them would see no key, and no query would see a key there.

    Args:
        cu_seqlens: (ndocuments + 1,) integers from 0 to the sequence's length, never falling; or one such row a
            sequence, (batch, ndocuments + 1). Rows of fewer documents are filled up with the sequence's length.

    Raises:
        ArgumentError: `cu_seqlens` has another shape, start or order.
    """

    def __init__(self, cu_seqlens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> None:
        ends = integers("cu_seqlens", cu_seqlens, max_ndim=2)
        if not is_traced() and (bool((ends[..., 0] != 0).any()) or bool((ends.diff() < 0).any())):
            remedy = "Pass cumulative lengths: 0, the first document's length, the first two's, ..."
            raise ArgumentError("cu_seqlens", expected="0 first and never falling", got=ends.tolist(), remedy=remedy)
        # A single row applies to any number of sequences.
        self._ends = ends[0] if ends.ndim == 2 and ends.shape[0] == 1 else ends

    @property
    def spec(self) -> tuple[str, list[Tensor]]:
        """Returns the name of the kind, and the cumulative lengths."""
        return "documents", [self._ends]

    @property
    def sequences(self) -> int | None:
        """Returns the number of rows of `cu_seqlens`, one a sequence; None if it is a vector."""
        return None if self._ends.ndim == 1 else self._ends.shape[0]

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
        if self._ends.ndim == 1:
            return f"Documents({shortened(self._ends.tolist())})"
        return f"Documents({self.batch} sequences, the first {shortened(self._ends[0].tolist())})"


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
