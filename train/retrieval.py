"""Retrieval: key-value pairs planted anywhere in a long context of distractors, and asked for after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringflash.errors import ConfigError
from ringflash.train.loss import IGNORE_INDEX

FEWEST_TOKENS, SMALLEST_VOCAB = 8, 16


@dataclass(frozen=True)
class RetrievalTask:
    """Multi-query associative recall over a small vocabulary; a pure function of its seeds, read from no file.

    A sequence holds pairs of a key token and a value token, among filler tokens. Every key stands in it twice: planted
    with a random value, and later asked for, where the value that it was planted with is the label. Nothing else has a
    label. The last token of every sequence asks for a key too, which may have been planted anywhere: its answer measures
    how far back a model finds things. No key is used for two values, so the answer is in one place alone.

    Token ids from 0: keys (half of the vocabulary), values (a quarter), fillers (the rest).

    Args:
        vocab_size: of the model.

    Raises:
        ConfigError: a vocabulary of fewer than 16 tokens.

    Source: Arora et al. 2023, "Zoology", multi-query associative recall.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < SMALLEST_VOCAB:
            expected = f"at least {SMALLEST_VOCAB}: keys, values and fillers"
            raise ConfigError("vocab_size", expected=expected, got=self.vocab_size, remedy="Try 256.")

    @property
    def num_keys(self) -> int:
        """Tokens that are keys, from 0 on."""
        return self.vocab_size // 2

    @property
    def num_values(self) -> int:
        """Tokens that are values, after the keys; one of them is right by chance."""
        return self.vocab_size // 4

    def num_pairs(self, seqlen: int) -> int:
        """Keys of a sequence: as many as there are, or as take half of its tokens."""
        return min(self.num_keys, max(1, (seqlen + 1) // 8))

    def row(self, seqlen: int, seeds: tuple[int, ...], depth: tuple[float, float] | None = None) -> dict[str, Tensor]:
        """{"input_ids", "labels"}, (seqlen,) int64 each, labels shifted already and -100 where nothing is asked.

        Args:
            seqlen: tokens of the input, at least 8.
            seeds: numbers that make this sequence another than others.
            depth: where in the context the key that the last token asks for is planted, from 0, the beginning, to 1,
                the end: drawn between these two. None is anywhere.

        Raises:
            ConfigError: fewer than 8 tokens.
        """
        if seqlen < FEWEST_TOKENS:
            raise ConfigError("context_length", expected=f"at least {FEWEST_TOKENS}", got=seqlen, remedy="Try 512.")
        random = np.random.Generator(np.random.PCG64(seeds))
        # Cells of two tokens; the last holds the last input and, beyond the inputs, its label.
        num_cells, pairs = (seqlen + 1) // 2, self.num_pairs(seqlen)
        cells = random.permutation(num_cells - 1)
        if depth is None:
            tested, others = cells[0], cells[1 : 2 * pairs - 1]
        else:
            first, stop = (int(part * (num_cells - 1)) for part in depth)
            tested = random.integers(first, max(stop, first + 1))
            others = cells[cells != tested][: 2 * pairs - 2]
        places = np.sort(others.reshape(pairs - 1, 2))
        planted, asked = np.append(places[:, 0], tested), np.append(places[:, 1], num_cells - 1)
        start = seqlen + 1 - 2 * num_cells
        fillers = self.num_keys + self.num_values
        tokens = random.integers(fillers, self.vocab_size, seqlen + 1)
        keys = random.permutation(self.num_keys)[:pairs]
        values = self.num_keys + random.integers(0, self.num_values, pairs)
        for place in (planted, asked):
            tokens[start + 2 * place], tokens[start + 2 * place + 1] = keys, values
        labels = np.full(seqlen, IGNORE_INDEX)
        labels[start + 2 * asked] = values
        return {"input_ids": torch.from_numpy(tokens[:-1].copy()), "labels": torch.from_numpy(labels)}
