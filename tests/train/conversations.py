"""A run on packed conversations, for the worlds of conftest.py, and its loss by the plain formula."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ringflash.train.data.chat import Chat
from ringflash.train.data.module import TextDataModule
from ringflash.train.data.prepare import Recipe, prepare
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.models.decoder import Decoder
from tests.train.data.chats import messages, write_chat_tokenizer, write_rows
from tests.train.runs import MODEL, Outcome, Run, train

LENGTH = 128  # of a sample, and more than of any conversation


def prepare_conversations(folder: Path) -> None:
    """Writes a corpus of 16 conversations to `folder`/to."""
    draw = random.Random(0)
    rows = [messages(*("ring " * draw.randrange(1, 6) for _ in range(draw.choice([2, 2, 4])))) for _ in range(16)]
    model, source = write_chat_tokenizer(folder / "model"), write_rows(folder / "rows.jsonl", rows)
    prepare(str(source), folder / "to", Recipe(Tokenizer.load(model), chat=Chat.load(model)))


def conversations(folder: Path, batch_size: int = 1) -> TextDataModule:
    """Returns the samples of the corpus; `setup` has run."""
    data = TextDataModule(str(folder / "to"), LENGTH, batch_size, "whole", val_fraction=0.3)
    data.setup("validate")
    return data


def run_of(data: TextDataModule) -> Run:
    """Returns a run of one step of two micro-batches, which hold all training samples."""
    shape = replace(MODEL, vocab_size=data.tokens.vocab_size)
    half = -(-len(data.train_samples()) // 2)
    return Run(batch_size=half, micro_batches=2, model=shape, dtype="float64", validate=True)


def train_on_conversations(folder: Path) -> Outcome:
    """Runs the step on the ranks of the default process group."""
    run = run_of(conversations(folder))
    return train(run, data=conversations(folder, run.batch_size))


def plain_loss(decoder: Decoder, data: TextDataModule, *, held_out: bool) -> Tensor:
    """Returns the mean over the learnt tokens of all training or held-out conversations, each alone in the model."""
    line, split, losses = data.train_samples().line, data.val_samples().first, []
    for document, end in zip(*line.documents(range(len(line.edges) - 1)), strict=True):
        if (end > split) == held_out:
            length = int(data.tokens.lengths_of(np.array([document]))[0])
            ids = torch.tensor(data.tokens.read(int(document), 0, length).astype(int))
            learnt = torch.tensor(data.tokens.learnt(int(document), 1, length))
            logits = decoder(ids[None, :-1], torch.arange(length - 1))[0]
            losses.append(cross_entropy(logits, ids[1:], reduction="none")[learnt])
    return torch.cat(losses).mean()
