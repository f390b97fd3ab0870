"""Samples of equal length: a stream of documents cut into pieces, or whole documents packed together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ringflash.errors import ConfigError, DataError
from ringflash.train.data.packing import fit
from ringflash.train.data.tokens import TokenFiles
from ringflash.train.models.loss import IGNORE_INDEX

Packing = Literal["packed", "whole", "joined"]
PACKINGS = ("packed", "whole", "joined")
ORDER_SEED = 0  # fixed, so that no run with another seed trains on held-out documents

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenStream:
    """All documents of token files one after another, in an order that is a pure function of their number.

    Neighbouring documents in a folder are often alike; neighbouring documents in the stream are not.
    """

    tokens: TokenFiles

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def order(self) -> Positions:
        """Document at each place."""
        return np.random.Generator(np.random.PCG64(ORDER_SEED)).permutation(len(self.tokens.lengths))

    @cached_property
    def ends(self) -> Positions:
        """End in the stream of the document at each place."""
        return np.cumsum(self.tokens.lengths[self.order])

    @cached_property
    def _learnt_runs(self) -> tuple[Positions, Positions, Positions]:
        """Begins and lengths of the runs of learnt tokens in the stream, and the learnt tokens before each."""
        document, begin, end = self.tokens.learnt_runs()
        begins = np.empty(len(self.order), np.int64)
        begins[self.order] = self.ends - self.tokens.lengths[self.order]
        runs = begins[document] + begin
        by_place = np.argsort(runs)
        # The empty run at the start serves positions before the first learnt token.
        runs, lengths = (np.concatenate([[0], x[by_place]]) for x in (runs, end - begin))
        return runs, lengths, np.cumsum(lengths) - lengths

    def learnt_before(self, positions: Positions) -> Positions:
        """Returns the learnt tokens before each position in the stream, without the first tokens of documents."""
        begins, lengths, before = self._learnt_runs
        run = np.searchsorted(begins, positions, side="right") - 1
        return before[run] + np.minimum(positions - begins[run], lengths[run])

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor, Positions]:
        """Returns the tokens [start, stop), int64, the same as labels, and the ends of documents.

        Labels are -100 where a token is not learnt. Ends are the positions in the stream after the last token of a
        document, for last tokens in [start, stop).

        Raises:
            DataError: an id outside the vocabulary.
        """
        out = np.empty(stop - start, np.int64)
        ignored = np.zeros(stop - start, bool)
        place, found = int(np.searchsorted(self.ends, start, side="right")), []
        position = start
        while position < stop:
            document, end = int(self.order[place]), int(self.ends[place])
            begin = end - int(self.tokens.lengths[document])
            until = min(end, stop)
            here = slice(position - start, until - start)
            out[here] = self.tokens.read(document, position - begin, until - begin)
            if (learnt := self.tokens.learnt(document, position - begin, until - begin)) is not None:
                ignored[here] = ~learnt
            if until == end and end > begin:
                found.append(end)
            position, place = until, place + 1
        labels = torch.from_numpy(np.where(ignored, IGNORE_INDEX, out))
        return torch.from_numpy(out), labels, np.array(found, np.int64)

    def split(self, val_fraction: float) -> int:
        """Returns the start of the held-out end of the stream.

        The end holds whole documents, of at least `val_fraction` of the tokens. A document that would make the end more
        than twice as large is cut instead.
        """
        wanted = round(len(self) * val_fraction)
        cut = len(self) - wanted
        place = int(np.searchsorted(self.ends, cut, side="right"))
        begin = int(self.ends[place - 1]) if place else 0
        return begin if 0 < cut - begin <= wanted and begin else cut


class TokenSamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of `seqlen` inputs from the part [first, last) of a stream, in order, and their labels.

    Sample i holds {"input_ids", "labels"}, (seqlen,) int64 each: the tokens from first + i * seqlen on, and the token
    after each of them. A document that is cut at the end of a sample continues in the next sample.

    With "joined", a sample is one text. With "packed" it also has "cu_seqlens", int64: 0, the end of each document in
    the sample, and seqlen. The last token of a document is its end-of-document token. Its label is -100, because the
    following token belongs to another document, and it is itself the label of the token before. Tokens of conversations
    that are not learnt are no labels either.

    A list of indices gives a batch (len(list), seqlen). Its cu_seqlens are padded with seqlen to a power of two, so
    that they have few shapes. Index -1 gives a row with the label -100 everywhere.
    """

    def __init__(self, line: TokenStream, seqlen: int, first: int, last: int, documents: Packing = "joined") -> None:
        self.line, self.seqlen, self.first, self.last, self.documents = line, seqlen, first, last, documents

    def __len__(self) -> int:
        return max(min(self.last, len(self.line) - 1) - self.first, 0) // self.seqlen

    def num_learnt(self) -> Positions:
        """Returns the number of learnt labels of each sample of conversations."""
        edges = self.first + 1 + np.arange(len(self) + 1) * self.seqlen
        return np.diff(self.line.learnt_before(edges))

    def __getitem__(self, index: int | list[int]) -> dict[str, Tensor]:
        if not isinstance(index, list):
            return self._row(index)
        rows = [self._row(i) for i in index]
        if self.documents != "joined":
            width = 1 << max(len(row["cu_seqlens"]) - 1 for row in rows).bit_length()
            for row in rows:
                row["cu_seqlens"] = torch.nn.functional.pad(
                    row["cu_seqlens"], (0, width - len(row["cu_seqlens"])), value=self.seqlen
                )
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        if index < 0:
            ids = torch.zeros(self.seqlen, dtype=torch.int64)
            labels, ends = torch.full((self.seqlen,), IGNORE_INDEX), np.empty(0, np.int64)
        else:
            ids, labels, ends = self._sample(index)
        row = {"input_ids": ids, "labels": labels}
        if self.documents != "joined":
            row["cu_seqlens"] = torch.from_numpy(np.concatenate([[0], ends[ends < self.seqlen], [self.seqlen]]))
        return row

    def _sample(self, index: int) -> tuple[Tensor, Tensor, Positions]:
        """Returns inputs, labels, and the ends of documents in the sample."""
        start = self.first + index * self.seqlen
        window, targets, ends = self.line.read(start, start + self.seqlen + 1)
        ids, labels, ends = window[:-1], targets[1:], ends[ends <= start + self.seqlen] - start
        if self.documents != "joined":
            labels[torch.from_numpy(ends) - 1] = IGNORE_INDEX
        return ids, labels, ends


class WholeSamples(TokenSamples):
    """Samples like packed ones, but of whole documents, combined so that little room remains.

    Documents longer than a sample are cut into pieces of its length. The remaining room holds a document of
    end-of-document tokens without labels.
    """

    def __init__(self, line: TokenStream, seqlen: int, first: int, last: int) -> None:
        super().__init__(line, seqlen, first, last, "whole")
        ends = line.ends.clip(first, last)
        starts = np.concatenate([[first], ends[:-1]])
        pieces = -(-(ends - starts) // seqlen)  # number for each document, 0 for an empty one
        which = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + which * seqlen
        stops = np.minimum(starts + seqlen, np.repeat(ends, pieces))
        order, self._begins = fit(stops - starts, seqlen)
        self._starts, self._stops = starts[order], stops[order]

    def __len__(self) -> int:
        return len(self._begins) - 1

    def num_learnt(self) -> Positions:
        """Returns the number of learnt labels of each sample of conversations."""
        # A piece's labels are the tokens after its first, and the next one. That counts 0 if it opens a document.
        counts = self.line.learnt_before(self._stops + 1) - self.line.learnt_before(self._starts + 1)
        return np.add.reduceat(counts, self._begins[:-1]) if len(counts) else counts

    def _sample(self, index: int) -> tuple[Tensor, Tensor, Positions]:
        ids = torch.full((self.seqlen,), self.line.tokens.header.shards[0].end_of_document)
        labels = torch.full((self.seqlen,), IGNORE_INDEX)
        inside = slice(int(self._begins[index]), int(self._begins[index + 1]))
        ends = np.cumsum(self._stops[inside] - self._starts[inside])
        for start, stop, end in zip(self._starts[inside], self._stops[inside], ends, strict=True):
            window, targets, over = self.line.read(int(start), min(int(stop) + 1, len(self.line)))
            here = slice(int(end - stop + start), int(end))
            ids[here] = window[: stop - start]
            known = targets[1:] if stop not in over else targets[1 : stop - start]
            labels[here][: len(known)] = known
        return ids, labels, ends


def train_and_held_out(
    line: TokenStream, seqlen: int, val_fraction: float, documents: Packing
) -> tuple[TokenSamples, TokenSamples]:
    """Returns training samples and held-out samples; the latter come from the end of the stream.

    The end holds `val_fraction` of the tokens.

    Raises:
        ConfigError: an impossible argument.
        DataError: fewer than one sample, or than one of each when a part is held out.
    """
    if seqlen < 1:
        raise ConfigError("context_length", expected="at least 1", got=seqlen, remedy="Try 4096.")
    if not 0 <= val_fraction < 1:
        raise ConfigError("val_fraction", expected="from 0 to below 1", got=val_fraction, remedy="Try 0.01.")
    if documents not in PACKINGS:
        raise ConfigError("documents", expected=f"one of {PACKINGS}", got=repr(documents), remedy="Choose one of them.")
    total = len(line)
    if total <= seqlen:
        raise _too_short(f"more than {seqlen} tokens: a sample of the context length", f"{total} tokens")
    split = line.split(val_fraction)
    if val_fraction:  # hold out at least one sample, and not all
        split = max(min(split, total - 1 - seqlen), seqlen)
    parts = (0, split), (split, total if val_fraction else split)
    if documents == "whole":
        train, held_out = (WholeSamples(line, seqlen, first, last) for first, last in parts)
    else:
        train, held_out = (TokenSamples(line, seqlen, first, last, documents) for first, last in parts)
    if val_fraction and not (len(train) and len(held_out)):
        raise _too_short(f"more than {2 * seqlen} tokens: 2 samples, one of them held out", f"{total} tokens")
    return train, held_out


def _too_short(expected: str, got: str) -> DataError:
    return DataError("corpus", expected=expected, got=got, remedy="Add text, or lower the context length.")
