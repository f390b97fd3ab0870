"""LightningDataModule over a text corpus: packed samples, a held-out end, batches by data-parallel rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from ringflash.errors import ConfigError, DataError
from ringflash.train.corpus import STDLIB, VOCAB_SIZE, Corpus, TokenSamples, load_corpus, num_samples
from ringflash.train.sampler import BatchSampler, ResumableLoader

DEFAULT_CACHE = "~/.cache/ringflash"


class TextDataModule(pl.LightningDataModule):
    """Byte-level next-token samples of a corpus, cut into `context_length` tokens.

    All ranks that share a sequence get the same batch; ranks differ by `trainer.distributed_sampler_kwargs` only.
    The last `val_fraction` of the samples is held out for val/loss, the same samples for test/loss.

    Args:
        corpus: files, folders or globs, a document each file; or "stdlib", the sources of Python's standard library.
        context_length: tokens a sample.
        batch_size: samples a micro-batch, over all data-parallel ranks.
        val_fraction: part of the samples to hold out; 0 for none.
        seed: of the order of documents and samples.
        cache_dir: folder of the token files that corpora are read from.
    """

    def __init__(
        self,
        corpus: str | list[str] = STDLIB,
        context_length: int = 4096,
        batch_size: int = 1,
        val_fraction: float = 0.01,
        seed: int = 0,
        cache_dir: str = DEFAULT_CACHE,
    ) -> None:
        super().__init__()
        if context_length < 1:
            raise ConfigError("context_length", expected="at least 1", got=context_length, remedy="Try 4096.")
        if batch_size < 1:
            raise ConfigError("batch_size", expected="at least 1", got=batch_size, remedy="Try 1.")
        if not 0 <= val_fraction < 1:
            raise ConfigError("val_fraction", expected="from 0 to below 1", got=val_fraction, remedy="Try 0.01.")
        self.sources, self.context_length, self.batch_size = corpus, context_length, batch_size
        self.val_fraction, self.seed, self.cache_dir = val_fraction, seed, Path(cache_dir)
        self.corpus: Corpus | None = None

    def prepare_data(self) -> None:
        """Writes the token file, on one process of a machine."""
        load_corpus(self.sources, self.cache_dir, self.seed)

    def setup(self, stage: str) -> None:
        """Maps the token file.

        Raises:
            DataError: the corpus is shorter than one sample, or than two with a held-out part.
            ConfigError: the model has fewer token ids than the corpus.
        """
        config = getattr(self.trainer and self.trainer.lightning_module, "model_config", None)
        if config is not None and config.vocab_size < VOCAB_SIZE:
            raise ConfigError(
                "vocab_size",
                expected=f"at least {VOCAB_SIZE}: 256 bytes and the end of a document",
                got=config.vocab_size,
                remedy=f"Set model.model.vocab_size to {VOCAB_SIZE}.",
            )
        self.corpus = load_corpus(self.sources, self.cache_dir, self.seed)
        num_samples(self.corpus, self.context_length, at_least=1 if self.val_fraction == 0 else 2)

    def train_samples(self) -> TokenSamples:
        """All samples before the held-out ones."""
        corpus, split, _ = self._split()
        return TokenSamples(corpus, self.context_length, 0, split)

    def val_samples(self) -> TokenSamples:
        """The held-out samples."""
        corpus, split, total = self._split()
        return TokenSamples(corpus, self.context_length, split, total)

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled, every epoch anew."""
        return self._loader(self.train_samples(), shuffle=True)

    def val_dataloader(self) -> ResumableLoader | list[Any]:
        """In order; nothing when nothing is held out."""
        samples = self.val_samples()
        return self._loader(samples, shuffle=False) if len(samples) else []

    def test_dataloader(self) -> ResumableLoader | list[Any]:
        """As `val_dataloader`."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """What the position in an epoch means."""
        return self._identity()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises DataError when the checkpoint's position is one in other samples."""
        now = self._identity()
        differing = [f"{k} {state_dict.get(k)} (now {v})" for k, v in now.items() if state_dict.get(k) != v]
        if differing:
            raise DataError(
                "data",
                expected="the corpus and samples that the checkpoint was trained on",
                got=", ".join(differing),
                remedy="Resume with the same data section; batch_size and the number of ranks may change.",
            )

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self._split()[0].header.digest,
            "context_length": self.context_length,
            "val_fraction": self.val_fraction,
            "seed": self.seed,
        }

    def _split(self) -> tuple[Corpus, int, int]:
        assert self.corpus is not None, "setup comes first"
        total = num_samples(self.corpus, self.context_length)
        held_out = max(1, round(total * self.val_fraction)) if self.val_fraction else 0
        return self.corpus, max(1, total - held_out), total

    def _loader(self, samples: TokenSamples, *, shuffle: bool) -> ResumableLoader:
        ranks = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
        sampler = BatchSampler(len(samples), self.batch_size, **ranks, seed=self.seed, shuffle=shuffle)
        return ResumableLoader(samples, sampler)
