"""LightningDataModule over token files or text: samples of the context length, a held-out end, batches by rank."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ringflash.errors import ConfigError, DataError
from ringflash.train.data.chat import CHAT_TEMPLATE
from ringflash.train.data.corpus import CACHE, load_corpus
from ringflash.train.data.resumable import ResumableDataModule
from ringflash.train.data.sampler import BatchSampler, ResumableLoader
from ringflash.train.data.samples import Packing, TokenSamples, TokenStream, train_and_held_out
from ringflash.train.data.sources import STDLIB
from ringflash.train.data.tokenizer import MODEL_FILE, RUN_FOLDER, Tokenizer, tokenizer_folder
from ringflash.train.data.tokens import TokenFiles

log = logging.getLogger(__name__)

LOOKED_AT = 256  # samples in which a token to learn is looked for
VAL_FRACTION = 0.01  # default for text without a given fraction


class TextDataModule(ResumableDataModule[ResumableLoader]):
    """Next-token samples of documents, `context_length` tokens each.

    All ranks that share a sequence get the same batch; ranks differ by `trainer.distributed_sampler_kwargs` only. The
    documents held out for val/loss and test/loss do not depend on the seed. The order of samples is a pure function of
    seed and epoch.

    Args:
        corpus: a folder made by `ringflash prepare`; or text to train on byte by byte: files, folders or globs, or
            "stdlib", the sources of Python's standard library.
        context_length: tokens a sample.
        batch_size: samples a micro-batch, over all data-parallel ranks.
        documents: "packed": no token sees another document's tokens, positions restart at each document, and no token
            predicts past its document's end. A document that is cut at the end of a sample continues in the next.
            "whole": like "packed", but documents that fit into a sample are not cut. "joined": a sample is one text,
            across document bounds.
        val_fraction: fraction of the tokens to hold out, rounded up to whole documents unless that would more than
            double it; 0 for none. None is the prepared folder's value, or 0.01 if it has none.
        seed: seed of the order of samples.
        cache_dir: folder for the token files of encoded text.
    """

    remedy = "Resume with the same data section; batch_size and the number of ranks may change."

    def __init__(
        self,
        corpus: str | list[str] = STDLIB,
        context_length: int = 4096,
        batch_size: int = 1,
        documents: Packing = "packed",
        val_fraction: float | None = None,
        seed: int = 0,
        cache_dir: str = CACHE,
    ) -> None:
        super().__init__()
        if context_length < 1:
            raise ConfigError("context_length", expected="at least 1", got=context_length, remedy="Try 4096.")
        if batch_size < 1:
            raise ConfigError("batch_size", expected="at least 1", got=batch_size, remedy="Try 1.")
        if val_fraction is not None and not 0 <= val_fraction < 1:
            raise ConfigError("val_fraction", expected="from 0 to below 1", got=val_fraction, remedy="Try 0.01.")
        self.sources, self.context_length, self.batch_size = corpus, context_length, batch_size
        self.documents: Packing = documents
        self.seed, self.cache_dir, self._asked_val_fraction = seed, Path(cache_dir), val_fraction
        self._samples: tuple[TokenSamples, TokenSamples] | None = None

    def prepare_data(self) -> None:
        """Encodes text, in one process of a machine."""
        load_corpus(self.sources, self.cache_dir)

    def setup(self, stage: str) -> None:
        """Maps the token files, and saves their tokenizer in the folder of a run that is logged.

        Raises:
            DataError: there are fewer tokens than one sample, or than two with a held-out part. Or the model has fewer
                token ids, or its initial weights come from a folder with another tokenizer. Or no sample of
                conversations has a token to learn.
        """
        super().setup(stage)
        tokens = load_corpus(self.sources, self.cache_dir)
        begins_with = getattr(self.trainer and self.trainer.lightning_module, "init_from", None)
        folder = None if begins_with is None else tokenizer_folder(begins_with)
        if folder is not None and not tokens.tokenizer.agrees_with(folder):
            raise DataError(
                "tokenizer",
                expected=f"that of {begins_with}, whose weights training begins with",
                got=f"{tokens.tokenizer.name}, as {tokens.folder} has",
                remedy=f"Prepare the text with `ringflash prepare --tokenizer {begins_with}`; to have the model learn "
                f"other ids all the same, take {MODEL_FILE} out of its folder.",
            )
        known = getattr(self.trainer and self.trainer.lightning_module, "vocab_size", None)
        if known is not None and known < tokens.vocab_size:
            remedy = "Prepare the text with the tokenizer that belongs to the model."
            if begins_with is None:  # else the weights have this size
                remedy = f"Set model.model.vocab_size to {tokens.vocab_size}, or prepare the text with the model's own."
            raise DataError(
                "vocab_size",
                expected=f"at least {tokens.vocab_size}, the ids of {tokens.tokenizer.name}, as {tokens.folder} has",
                got=known,
                remedy=remedy,
            )
        self._samples = self._cut(TokenStream(tokens), self._val_fraction(tokens))
        if tokens.header.num_learnt is not None:
            self._check_learnt(speak=stage == "fit" and (self.trainer is None or self.trainer.is_global_zero))
        if stage == "fit" and self.trainer is not None and self.trainer.loggers:
            folder = self.trainer.log_dir  # a collective
            if folder is not None and self.trainer.is_global_zero:
                tokens.tokenizer.save(Path(folder) / RUN_FOLDER)
                if (template := tokens.folder / "tokenizer" / CHAT_TEMPLATE).is_file():
                    shutil.copyfile(template, Path(folder) / RUN_FOLDER / CHAT_TEMPLATE)

    def _cut(self, line: TokenStream, fraction: float) -> tuple[TokenSamples, TokenSamples]:
        """Returns training samples and held-out samples, `fraction` of them."""
        if line.tokens.header.has_pairs:
            expected, remedy = "documents to learn", "Train on preferences with `ringflash dpo`."
            got = f"{line.tokens.folder}, with pairs of a chosen and a rejected answer"
            raise DataError("corpus", expected=expected, got=got, remedy=remedy)
        return train_and_held_out(line, self.context_length, fraction, self.documents)

    @property
    def tokens(self) -> TokenFiles:
        """Token files of the training text; available after `setup` has run."""
        return self.train_samples().line.tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the token files."""
        return self.tokens.tokenizer

    def train_samples(self) -> TokenSamples:
        """Returns all samples before the held-out ones."""
        assert self._samples is not None, "setup comes first"
        return self._samples[0]

    def val_samples(self) -> TokenSamples:
        """Returns the held-out samples."""
        assert self._samples is not None, "setup comes first"
        return self._samples[1]

    def train_dataloader(self) -> ResumableLoader:
        """Returns a loader that shuffles every epoch differently.

        It begins after the batches of a checkpoint, or after those of an earlier loader of the same trainer.
        """
        return self._continued(self._loader(self.train_samples(), shuffle=True))

    def val_dataloader(self) -> ResumableLoader | list[Any]:
        """Returns a loader in order, or an empty list when nothing is held out."""
        samples = self.val_samples()
        return self._loader(samples, shuffle=False) if len(samples) else []

    def test_dataloader(self) -> ResumableLoader | list[Any]:
        """Returns the loader of `val_dataloader`."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of a checkpoint, which also names the corpus, for `ringflash evaluate`."""
        names = [self.sources] if isinstance(self.sources, str) else list(self.sources)
        return super().state_dict() | {"sources": names}

    def _settings(self) -> dict[str, Any]:
        return {
            "corpus": self.tokens.header.digest,
            "context_length": self.context_length,
            "documents": self.documents,
            "val_fraction": self._val_fraction(self.tokens),
            "seed": self.seed,
        }

    def _check_learnt(self, *, speak: bool) -> None:
        """Logs how many samples have no token to learn; their loss is 0 and has no weight.

        If there are many samples, it reads some, evenly spread over the first block, because all would take too long.
        """
        for part, samples in (("training", self.train_samples()), ("held-out", self.val_samples())):
            first = int(samples.edges[min(1, len(samples.edges) - 1)])
            counts = samples.num_labels(np.unique(np.arange(LOOKED_AT) * first // LOOKED_AT).tolist() if first else [])
            empty = int((counts == 0).sum())
            if len(counts) and empty == len(counts):
                raise DataError(
                    "corpus",
                    expected=f"a token to learn in one of {len(counts)} {part} samples",
                    got="none: they hold only other turns",
                    remedy="Raise the context length, so that samples reach the assistant's turns.",
                )
            if empty and speak:
                text = (
                    "Data: %d of %d %s samples have no token to learn, and add nothing: a longer context_length helps"
                )
                log.warning(text, empty, len(counts), part)

    def _val_fraction(self, tokens: TokenFiles) -> float:
        if self._asked_val_fraction is not None:
            return self._asked_val_fraction
        return VAL_FRACTION if tokens.header.val_fraction is None else tokens.header.val_fraction

    def _loader(self, samples: TokenSamples, *, shuffle: bool) -> ResumableLoader:
        rank, ranks = self._ranks()
        options: dict[str, Any] = {"seed": self.seed, "shuffle": shuffle, "edges": samples.edges}
        sampler = BatchSampler(len(samples), self.batch_size, rank=rank, num_replicas=ranks, **options)
        return ResumableLoader(samples, sampler)
