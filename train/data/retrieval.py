"""Retrieval task: facts planted anywhere in a long context of distractors, and questions about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringflash.errors import ConfigError
from ringflash.train.data.resumable import ResumableDataModule
from ringflash.train.models.loss import IGNORE_INDEX

FEWEST_TOKENS, SMALLEST_VOCAB = 16, 16
TOKENS_A_QUESTION = 4
MOST_BATCHES = 2**31 - 1
TRAINING, MEASURING = range(2)  # seeds of two disjoint kinds of sequences, so that no measured one was trained on


@dataclass(frozen=True)
class RetrievalTask:
    """Associative recall: the value of a key from a fact planted anywhere in the context.

    There are n = isqrt(vocab_size / 2) keys and n values. A token is one of n^2 facts "key k has value v", n questions
    for a key, n answers, or a filler. A sequence holds fillers and one fact of every key, with newly drawn values.
    Every fourth token, and the last, asks for a key that was planted before; its label is the value. No other token has
    a label, and no input contains an answer. A model must find the one fact of the requested key, at any position,
    among n facts and all fillers. Without it, one answer in n is right.

    The sequences are a pure function of their seeds, and no file is read.

    Args:
        vocab_size: vocabulary size of the model.

    Raises:
        ConfigError: a vocabulary of fewer than 16 tokens.

    Source: Arora et al. 2023, "Zoology", multi-query associative recall, with a token a fact.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < SMALLEST_VOCAB:
            expected = f"at least {SMALLEST_VOCAB}: facts, questions, answers and fillers"
            raise ConfigError("vocab_size", expected=expected, got=self.vocab_size, remedy="Try 128.")

    @property
    def num_keys(self) -> int:
        """Number of keys, and of values; one answer in this many is right by chance."""
        return math.isqrt(self.vocab_size // 2)

    def row(self, seqlen: int, seeds: tuple[int, ...], depth: tuple[float, float] = (0.0, 1.0)) -> dict[str, Tensor]:
        """Returns {"input_ids", "labels"}, (seqlen,) int64 each; labels are -100 where the sequence asks nothing.

        Args:
            seqlen: number of tokens, at least 16.
            seeds: numbers that identify this sequence.
            depth: range of the fact that the last token asks for, as fractions of the context from 0 (start) to 1
                (end).

        Raises:
            ConfigError: fewer than 16 tokens.
        """
        if seqlen < FEWEST_TOKENS:
            raise ConfigError("context_length", expected=f"at least {FEWEST_TOKENS}", got=seqlen, remedy="Try 1024.")
        random = np.random.Generator(np.random.PCG64(seeds))
        n, last = self.num_keys, seqlen - 1
        first, stop = (int(part * last) for part in depth)
        places = random.permutation(last)
        tested = random.integers(first, max(stop, first + 1))
        places = np.append(tested, places[places != tested])
        planted = min(n, seqlen // 8)
        keys, values = random.permutation(n)[:planted], random.integers(0, n, planted)
        tokens = random.integers(n * n + 2 * n, self.vocab_size, seqlen)
        tokens[places[:planted]] = keys * n + values
        asked = np.append(places[planted : planted + seqlen // TOKENS_A_QUESTION], last)
        which = np.append(random.integers(0, planted, len(asked) - 1), 0)
        known = places[which] < asked
        asked, which = asked[known], which[known]
        tokens[asked] = n * n + keys[which]
        labels = np.full(seqlen, IGNORE_INDEX)
        labels[asked] = n * n + n + values[which]
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


@dataclass(frozen=True)
class Grid:
    """Sequences of a measurement: `rows` of every length and depth, numbered in this order.

    Args:
        lengths: numbers of tokens.
        depths: number of equal parts of each length; the last token asks for a fact in one of them.
        rows: sequences of each length and depth.
        seed: seed of the sequences.

    Raises:
        ConfigError: no length, depth or row.
    """

    lengths: tuple[int, ...]
    depths: int
    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("lengths", min(self.lengths, default=0)), ("depths", self.depths), ("rows", self.rows)):
            if value < 1:
                raise ConfigError(name, expected="at least one, and positive", got=value, remedy="Try 10.")

    def __len__(self) -> int:
        return len(self.lengths) * self.depths * self.rows

    def batches(self, tokens: int, ranks: int = 1) -> list[list[int]]:
        """Returns numbers of sequences in batches of one length each, of about `tokens` together.

        Number -1 pads to multiples of `ranks`.
        """
        result: list[list[int]] = []
        each = self.depths * self.rows
        for index, length in enumerate(self.lengths):
            size = rows_of(tokens, length, ranks)
            numbers = [*range(index * each, (index + 1) * each)]
            numbers += [-1] * (-each % size if each > size else -each % ranks)
            result += [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return result

    def batch(self, task: RetrievalTask, numbers: list[int]) -> dict[str, Tensor]:
        """Returns a batch of the sequences `numbers`.

        It holds {"input_ids", "labels"} (len(numbers), seqlen), and "row", the numbers. Number -1 gives a row without
        labels.
        """
        length = self.lengths[max(numbers) // (self.depths * self.rows)] if max(numbers) >= 0 else FEWEST_TOKENS
        rows = []
        for number in numbers:
            depth = max(number, 0) // self.rows % self.depths
            seeds = (self.seed, MEASURING, length, max(number, 0))
            rows.append(task.row(length, seeds, (depth / self.depths, (depth + 1) / self.depths)))
            if number < 0:
                rows[-1]["labels"].fill_(IGNORE_INDEX)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} | {"row": torch.tensor(numbers)}


def rows_of(tokens: int, length: int, ranks: int) -> int:
    """Returns the number of sequences of `length` with about `tokens` in all: a positive multiple of `ranks`."""
    return max(1, tokens // (length * ranks)) * ranks


class TrainingLoader:
    """Endless batches with a constant number of tokens while sequences grow longer.

    A batch is a pure function of (seed, its number); data-parallel rank r takes its sequences r, r + ranks, ...
    """

    def __init__(self, data: RetrievalDataModule, task: RetrievalTask, rank: int, ranks: int, length: int) -> None:
        self.data, self.task, self.rank, self.ranks, self.length = data, task, rank, ranks, length
        self.number = 0

    def __len__(self) -> int:
        """Returns the batches of the whole run, because Lightning prefetches one batch if a loader has no length."""
        return self.length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            data, number = self.data, self.number
            length = data.length_of(number)
            size = rows_of(data.batch_size * data.context_length, length, self.ranks)
            rows = [self.task.row(length, (data.seed, TRAINING, number, i)) for i in range(self.rank, size, self.ranks)]
            self.number += 1
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def state_dict(self) -> dict[str, int]:
        """Returns the number of batches so far."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after that number of batches."""
        self.number = state["number"]

    start_after = load_state_dict


class MeasuringLoader:
    """Loader of the batches of a grid that `batches` lists by sequence numbers."""

    def __init__(self, grid: Grid, task: RetrievalTask, batches: list[list[int]]) -> None:
        self.grid, self.task, self.batches = grid, task, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.grid.batch(self.task, numbers) for numbers in self.batches)


class RetrievalDataModule(ResumableDataModule[TrainingLoader]):
    """Sequences of `RetrievalTask`, for the model's vocabulary; the sequences of a `Grid` are held out.

    Training may begin with short sequences and double them: a model that has to find one token among very many learns
    this much sooner among few. A batch keeps the same number of tokens.

    Args:
        context_length: tokens of a sequence.
        batch_size: sequences of that length a micro-batch, over all data-parallel ranks.
        first_length: tokens of the first sequences; None for `context_length`.
        double_every: micro-batches after which the length doubles, until it is `context_length`.
        val_lengths: lengths of the held-out sequences; None for `context_length`.
        val_depths: number of parts of the context; facts that the last token asks for are planted in each part.
        val_rows: held-out sequences of each length and depth.
        seed: seed of all sequences.

    Raises:
        ConfigError: numbers that make no sequence.
    """

    trained_on = "the sequences that the checkpoint was trained on"
    to_overfit = "Leave it out: the task makes new sequences for every batch."

    def __init__(
        self,
        context_length: int = 1024,
        batch_size: int = 4,
        first_length: int | None = None,
        double_every: int = 200,
        val_lengths: list[int] | None = None,
        val_depths: int = 10,
        val_rows: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        first_length = context_length if first_length is None else first_length
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("first_length", first_length, FEWEST_TOKENS),
            ("context_length", context_length, first_length),
            ("double_every", double_every, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ConfigError(name, expected=f"at least {least}", got=value, remedy="Raise it.")
        self.context_length, self.batch_size, self.seed = context_length, batch_size, seed
        self.first_length, self.double_every = first_length, double_every
        self.grid = Grid(tuple(val_lengths or (context_length,)), val_depths, val_rows, seed)
        self._task: RetrievalTask | None = None

    @property
    def task(self) -> RetrievalTask:
        """The task, in the model's vocabulary; available after `setup` has run."""
        assert self._task is not None, "setup comes first"
        return self._task

    def length_of(self, number: int) -> int:
        """Returns the tokens of a sequence in training's micro-batch `number`."""
        doublings = min(number // self.double_every, 64)
        return min(self.first_length << doublings, self.context_length)

    def setup(self, stage: str) -> None:
        """Looks up the model's vocabulary."""
        vocab_size = getattr(self.trainer and self.trainer.lightning_module, "vocab_size", None)
        if vocab_size is None:
            expected, got = "a LanguageModel, whose vocabulary the task is made for", "another module"
            raise ConfigError("model", expected=expected, got=got, remedy="Train a LanguageModel.")
        super().setup(stage)
        self._task = RetrievalTask(vocab_size)

    def train_dataloader(self) -> TrainingLoader:
        """Returns endless batches; an epoch has the number that max_steps needs.

        They begin after the batches of a checkpoint, or after those of an earlier loader of the same trainer.
        """
        rank, ranks = self._ranks()
        steps = self.trainer.max_steps * self.trainer.accumulate_grad_batches if self.trainer else -1
        return self._continued(TrainingLoader(self, self.task, rank, ranks, steps if steps > 0 else MOST_BATCHES))

    def val_dataloader(self) -> MeasuringLoader:
        """Returns the held-out sequences, length by length and depth by depth."""
        rank, ranks = self._ranks()
        batches = self.grid.batches(self.batch_size * self.context_length, ranks)
        return MeasuringLoader(self.grid, self.task, [numbers[rank::ranks] for numbers in batches])

    test_dataloader = val_dataloader

    def _settings(self) -> dict[str, int]:
        names = ("context_length", "batch_size", "first_length", "double_every", "seed")
        return {name: getattr(self, name) for name in names}
