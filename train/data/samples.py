"""Samples of equal length: a stream of documents cut into pieces, or whole documents packed together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ringflash.errors import ConfigError, DataError
from ringflash.train.data.packing import fit
from ringflash.train.data.permutation import BlockPermutation, Permutation, shuffle_columns
from ringflash.train.data.tokens import TokenFiles
from ringflash.train.models.loss import IGNORE_INDEX

Packing = Literal["packed", "whole", "joined"]
PACKINGS = ("packed", "whole", "joined")
ORDER_SEED = 0  # fixed, so that no run with another seed trains on held-out documents
GROUP = 256  # documents of a group at most; 10^9 documents take 30 MiB of edges
BLOCK = 1 << 12  # groups of a block, which `WholeSamples` packs together
CACHED_GROUPS = 64

Positions = npt.NDArray[np.int64]


class TokenStream:
    """All documents of token files one after another, in an order that is a pure function of their number.

    Neighbouring documents in a folder are often alike; neighbouring documents in the stream are not. The folder's
    documents are the rows of a table of at most `GROUP` rows, each rotated by a keyed shift. A column of the table is a
    group, and holds documents of the whole folder. Keyed permutations order the blocks of columns, the columns of each
    block, and the documents of each column. Only the ends of groups are held in memory, and found in one pass over the
    index; the documents of a group are looked up when they are read.
    """

    def __init__(self, tokens: TokenFiles) -> None:
        self.tokens, total = tokens, tokens.header.num_documents
        self._width = max(-(-total // GROUP), 1)
        rows = np.arange(-(-total // self._width))
        self._shifts = Permutation(max(self._width, GROUP), ORDER_SEED)(rows) % self._width
        self._columns = BlockPermutation(np.append(np.arange(0, self._width, BLOCK), self._width), ORDER_SEED)
        sums = np.zeros(self._width, np.int64)
        for row, shift in enumerate(self._shifts.tolist()):
            lengths = tokens.lengths(row * self._width, min((row + 1) * self._width, total))
            sums += np.roll(np.pad(lengths, (0, self._width - len(lengths))), -shift)
        # (groups + 1,) start of each group in the stream, and the stream's length.
        self.edges: Positions = np.concatenate([[0], np.cumsum(sums[self._columns(np.arange(self._width))])])
        self._group = lru_cache(CACHED_GROUPS)(lambda group: self.documents(range(group, group + 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    def documents(self, groups: range) -> tuple[Positions, Positions]:
        """Returns the documents of neighbouring groups in order, and where each of them ends in the stream."""
        total = self.tokens.header.num_documents
        columns = self._columns(np.arange(groups.start, groups.stop))
        table = np.arange(len(self._shifts))[:, None] * self._width + (columns + self._shifts[:, None]) % self._width
        documents = shuffle_columns(table, ORDER_SEED).T.ravel()
        documents = documents[documents < total]
        return documents, self.edges[groups.start] + np.cumsum(self.tokens.lengths_of(documents))

    def groups_of(self, first: int, last: int) -> range:
        """Returns the places of the groups that have tokens in [first, last)."""
        begin = int(np.searchsorted(self.edges, first, side="right")) - 1
        return range(begin, int(np.searchsorted(self.edges, last, side="left")))

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor, Positions]:
        """Returns the tokens [start, stop), int64, the same as labels, and the ends of documents.

        Labels are -100 where a token is not learnt. Ends are the positions in the stream after the last token of a
        document, for last tokens in [start, stop).

        Raises:
            DataError: an id outside the vocabulary.
        """
        out = np.empty(stop - start, np.int64)
        ignored = np.zeros(stop - start, bool)
        found, position = [], start
        for group in self.groups_of(start, stop):
            documents, ends = self._group(group)
            place = int(np.searchsorted(ends, position, side="right"))
            while position < stop and place < len(ends):
                document, end = int(documents[place]), int(ends[place])
                begin = int(ends[place - 1] if place else self.edges[group])
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
        if not 0 < cut < len(self):
            return cut
        group = self.groups_of(cut, len(self))[0]
        begin = int(max([self.edges[group], *(end for end in self._group(group)[1] if end <= cut)]))
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

    @property
    def edges(self) -> Positions:
        """First sample of each block of samples that share what `_sample` needs, and the number of all samples."""
        return np.array([0, len(self)])

    def num_labels(self, indices: Sequence[int]) -> Positions:
        """Returns the number of labels of each of the samples `indices`."""
        return np.array([int((self._sample(index)[1] != IGNORE_INDEX).sum()) for index in indices], np.int64)

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
    end-of-document tokens without labels. Blocks of `block` groups that follow each other in the stream, of about a
    million documents, are packed separately. One block is held in memory, and the number of samples of each.
    """

    def __init__(self, line: TokenStream, seqlen: int, first: int, last: int, block: int = BLOCK) -> None:
        super().__init__(line, seqlen, first, last, "whole")
        groups = line.groups_of(first, last)
        self._blocks = [groups[i : i + block] for i in range(0, len(groups), block)]
        self._block = lru_cache(1)(self._pack)
        counts = [len(self._block(number)[2]) - 1 for number in range(len(self._blocks))]
        self._edges: Positions = np.cumsum([0, *counts])

    @property
    def edges(self) -> Positions:
        """First sample of each block, and the number of all samples."""
        return self._edges

    def __len__(self) -> int:
        return int(self._edges[-1])

    def _pack(self, block: int) -> tuple[Positions, Positions, Positions]:
        """Returns the start and stop of each piece in the stream, ordered by sample, and the samples' first pieces."""
        groups = self._blocks[block]
        ends = self.line.documents(groups)[1].clip(self.first, self.last)
        starts = np.concatenate([[max(self.first, self.line.edges[groups[0]])], ends[:-1]])
        pieces = -(-(ends - starts) // self.seqlen)  # number for each document, 0 for an empty one
        which = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + which * self.seqlen
        stops = np.minimum(starts + self.seqlen, np.repeat(ends, pieces))
        order, begins = fit(stops - starts, self.seqlen)
        return starts[order], stops[order], begins

    def _sample(self, index: int) -> tuple[Tensor, Tensor, Positions]:
        ids = torch.full((self.seqlen,), self.line.tokens.header.shards[0].end_of_document)
        labels = torch.full((self.seqlen,), IGNORE_INDEX)
        block = int(np.searchsorted(self._edges, index, side="right")) - 1
        starts, stops, begins = self._block(block)
        inside = slice(*begins[index - self._edges[block] :][:2].tolist())
        starts, stops = starts[inside].tolist(), stops[inside].tolist()
        end = 0
        ends = []
        for start, stop in zip(starts, stops, strict=True):
            window, targets, over = self.line.read(start, min(stop + 1, len(self.line)))
            here = slice(end, end + stop - start)
            ids[here] = window[: stop - start]
            known = targets[1:] if stop not in over else targets[1 : stop - start]
            labels[here][: len(known)] = known
            end = here.stop
            ends.append(end)
        return ids, labels, np.array(ends, np.int64)


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
