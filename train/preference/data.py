"""LightningDataModule over pairs of a chosen and a rejected answer, packed into samples of the context length."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from ringflash.errors import DataError
from ringflash.train.data.corpus import CACHE
from ringflash.train.data.module import TextDataModule
from ringflash.train.data.packing import fit
from ringflash.train.data.permutation import Permutation
from ringflash.train.data.samples import ORDER_SEED, Positions, TokenSamples, TokenStream
from ringflash.train.models.loss import IGNORE_INDEX

log = logging.getLogger(__name__)


class PairSamples(TokenSamples):
    """Samples of whole pairs, several to a sample where they fit.

    A sample is one of `TokenSamples` with "num_pairs", int64 of no dimension. Its documents 2i and 2i + 1 are the
    chosen and the rejected conversation of pair i, and the room after the last pair is a document without labels.

    Args:
        line: documents, of which 2i and 2i + 1 make a pair.
        seqlen: tokens a sample.
        pairs: (n,) numbers of the pairs.
        lengths: (n,) tokens of both conversations of each, at most `seqlen`.
    """

    def __init__(self, line: TokenStream, seqlen: int, pairs: Positions, lengths: Positions) -> None:
        super().__init__(line, seqlen, 0, len(line), "whole")
        order, self._begins = fit(lengths, seqlen)
        self._pairs = pairs[order]

    def __len__(self) -> int:
        return len(self._begins) - 1

    def _row(self, index: int) -> dict[str, Tensor]:
        row = super()._row(index)
        return row | {"num_pairs": torch.tensor(0 if index < 0 else int(np.diff(self._begins)[index]))}

    def _sample(self, index: int) -> tuple[Tensor, Tensor, Positions]:
        tokens = self.line.tokens
        ids = torch.full((self.seqlen,), tokens.header.shards[0].end_of_document)
        labels = torch.full((self.seqlen,), IGNORE_INDEX)
        pairs = self._pairs[self._begins[index] : self._begins[index + 1]]
        documents = (2 * pairs[:, None] + [0, 1]).ravel()
        ends = np.cumsum(tokens.lengths_of(documents))
        for document, end, length in zip(documents.tolist(), ends.tolist(), np.diff(ends, prepend=0), strict=True):
            found = tokens.read(document, 0, length).astype(np.int64)
            learnt = tokens.learnt(document, 1, length)
            if learnt is None or not learnt.any():
                raise DataError(
                    "corpus",
                    expected="a token to learn in both answers of every pair",
                    got=f"none in the {'rejected' if document % 2 else 'chosen'} answer of pair {document // 2} of "
                    f"{tokens.folder}",
                    remedy="Leave its row out, and prepare the folder again.",
                )
            ids[end - length : end] = torch.from_numpy(found)
            labels[end - length : end - 1] = torch.from_numpy(np.where(learnt, found[1:], IGNORE_INDEX))
        return ids, labels, ends


class PreferenceDataModule(TextDataModule):
    """Pairs of a chosen and a rejected answer to one prompt, as many to a sample as fit.

    Whole pairs are held out, and which ones does not depend on the seed. Pairs longer than a sample are left out, and
    a line of the log counts them.

    Args:
        corpus: a folder made by `ringflash prepare --pairs`.
        context_length: tokens a sample, at least those of both conversations of a pair together.
        batch_size: samples a micro-batch, over all data-parallel ranks.
        val_fraction: fraction of the pairs to hold out; 0 for none. None is the prepared folder's value, or else 0.01.
        seed: seed of the order of samples.
    """

    def __init__(
        self,
        corpus: str,
        context_length: int = 4096,
        batch_size: int = 1,
        val_fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(corpus, context_length, batch_size, "whole", val_fraction, seed, CACHE)

    def _cut(self, line: TokenStream, fraction: float) -> tuple[TokenSamples, TokenSamples]:
        tokens = line.tokens
        if not tokens.header.has_pairs:
            remedy = "Prepare rows of preferences with `ringflash prepare --pairs`."
            got = f"{tokens.folder}, with documents of another kind"
            raise DataError("corpus", expected="pairs of two answers", got=got, remedy=remedy)
        lengths = tokens.lengths().reshape(-1, 2).sum(1)
        order = Permutation(len(lengths), ORDER_SEED)(np.arange(len(lengths)))
        pairs = order[lengths[order] <= self.context_length]
        held_out = max(round(len(pairs) * fraction), 1) if fraction else 0
        if len(pairs) <= held_out:
            got = f"{len(pairs)} of {len(order)}; the longest pair has {lengths.max()} tokens"
            expected = f"more than {held_out} pairs of at most {self.context_length} tokens"
            remedy = "Raise the context length, add pairs, or set val_fraction to 0."
            raise DataError("corpus", expected=expected, got=got, remedy=remedy)
        if len(pairs) < len(order) and (self.trainer is None or self.trainer.is_global_zero):
            text = "Data: %d of %d pairs are longer than context_length %d, and are left out"
            log.warning(text, len(order) - len(pairs), len(order), self.context_length)
        parts = np.split(pairs, [len(pairs) - held_out])
        train, val = (PairSamples(line, self.context_length, part, lengths[part]) for part in parts)
        return train, val
