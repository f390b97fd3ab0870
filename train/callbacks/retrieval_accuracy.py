"""Accuracy of retrieval answers by context length and depth: counted, logged and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ringflash import extras
from ringflash.commands.options import put_json
from ringflash.commands.picture import picture
from ringflash.errors import ConfigError
from ringflash.train.data.retrieval import Grid, RetrievalDataModule
from ringflash.train.models.loss import IGNORE_INDEX

METRIC = "val/retrieval"


@dataclass(frozen=True)
class Cell:
    """Accuracy at one length and depth.

    Args:
        length: tokens.
        begin: start of the depth range of the requested facts, as a fraction of the context from 0 to 1.
        end: end of that range.
        rows: number of sequences.
        accuracy: fraction of the sequences with a right answer.
    """

    length: int
    begin: float
    end: float
    rows: int
    accuracy: float


def count(logits: Tensor, labels: Tensor, position_ids: Tensor, last: int) -> Tensor:
    """Counts the right answers of each sequence at its last token: (batch,) int64, 0 or 1.

    Args:
        logits: (batch, seqlen_local, vocab_size).
        labels: (batch, seqlen_local) int64.
        position_ids: (seqlen_local,) or (batch, seqlen_local) int64; only the rank that holds position `last` counts.
        last: position of the last token.
    """
    counts = (position_ids == last) & (labels != IGNORE_INDEX)
    return ((logits.argmax(-1) == labels) & counts).sum(1)


def tabulate(right: Tensor, grid: Grid) -> list[Cell]:
    """Computes accuracies by length and depth from the right answers (len(grid),) of all sequences."""
    parts = right.cpu().view(len(grid.lengths), grid.depths, grid.rows).double().mean(2).tolist()
    return [
        Cell(length, depth / grid.depths, (depth + 1) / grid.depths, grid.rows, accuracy)
        for length, row in zip(grid.lengths, parts, strict=True)
        for depth, accuracy in enumerate(row)
    ]


def depth_names(depths: int) -> list[str]:
    """Returns the start of each of `depths` equal parts, in percent, with as many decimals as keep them apart."""
    decimals = max(len(str(depths - 1)) - 2, 0)  # 100 parts are whole percents, 1000 are tenths
    return [f"{depth / depths:.{decimals}%}" for depth in range(depths)]


def mean(cells: Sequence[Cell]) -> float:
    """Returns the accuracy over all cells, which have equal numbers of sequences."""
    return sum(cell.accuracy for cell in cells) / len(cells)


class RetrievalAccuracy(Callback):
    """Logs val/retrieval and val/retrieval/LENGTH/DEPTH% after each validation, and writes the last to files.

    On a ring each rank looks for the answers in its own shard. Needs a `RetrievalDataModule`.

    Args:
        filename: name of the picture in the run's folder; a .json of the same name is written next to it.

    Raises:
        ConfigError: `filename` is no name of a picture.
        MissingExtra: matplotlib is not installed.
    """

    def __init__(self, filename: str = "retrieval.png") -> None:
        if Path(filename).suffix not in (".png", ".svg", ".pdf") or Path(filename).name != filename:
            expected, remedy = "a name that ends in .png, .svg or .pdf", "Try retrieval.png."
            raise ConfigError("filename", expected=expected, got=filename, remedy=remedy)
        extras.require("plot", "RetrievalAccuracy")
        self.filename = filename
        self.cells: list[Cell] = []
        self._right = torch.empty(0)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resets the counts."""
        self._right = torch.zeros(len(_data(trainer).grid), dtype=torch.int64, device=pl_module.device)

    @torch.no_grad()
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts the batch's right answers."""
        data, input_ids = _data(trainer), batch["input_ids"]
        position_ids = batch.get("position_ids", torch.arange(input_ids.shape[1], device=input_ids.device))
        number = max(int(batch["row"].max()), 0)
        last = data.grid.lengths[number // (data.grid.depths * data.grid.rows)] - 1
        # The loss computes no whole logits, so this second forward does.
        logits = pl_module.decoder(input_ids, position_ids, pl_module.context)
        right = count(logits, batch["labels"], position_ids, last)
        self._right.index_add_(0, batch["row"].clamp(min=0), right)  # sequence -1 has no label and adds 0

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the accuracies over all ranks."""
        right = trainer.strategy.reduce(self._right, reduce_op="sum")
        assert isinstance(right, Tensor)
        self.cells = tabulate(right, _data(trainer).grid)
        grid = _data(trainer).grid
        names = [f"{METRIC}/{length}/{depth}" for length in grid.lengths for depth in depth_names(grid.depths)]
        values = {name: cell.accuracy for name, cell in zip(names, self.cells, strict=True)}
        # The accuracies are already equal on every rank; the maximum keeps equal values.
        pl_module.log(METRIC, mean(self.cells), prog_bar=True, sync_dist=True, reduce_fx="max")
        pl_module.log_dict(values, sync_dist=True, reduce_fx="max")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the accuracies to files, if the run has a log."""
        if trainer.loggers and not trainer.sanity_checking:
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            if trainer.is_global_zero:
                write(folder / f"{Path(self.filename).stem}.json", self.cells, step=trainer.global_step)
                draw(folder / self.filename, self.cells)


def _data(trainer: pl.Trainer) -> RetrievalDataModule:
    data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] - set without being declared
    assert isinstance(data, RetrievalDataModule), "RetrievalAccuracy needs a RetrievalDataModule"
    return data


def write(file: Path, cells: Sequence[Cell], **facts: Any) -> None:
    """Writes `facts` and the cells as JSON, as `put_json`."""
    put_json(file, facts | {"mean": mean(cells), "cells": [asdict(cell) for cell in cells]})


def draw(file: Path, cells: Sequence[Cell]) -> None:
    """Draws the cells as a picture: depth from left to right, one row a length."""
    lengths = list(dict.fromkeys(cell.length for cell in cells))
    depths = len(cells) // len(lengths)
    table = [[cell.accuracy for cell in cells[i : i + depths]] for i in range(0, len(cells), depths)]
    with picture(file, (2.5 + 0.6 * depths, 1.6 + 0.5 * len(lengths)), 150) as figure:
        axes = figure.subplots()
        image = axes.imshow(table, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for y, row in enumerate(table):
            for x, accuracy in enumerate(row):
                color = "white" if accuracy > 0.6 else "black"
                axes.text(x, y, f"{accuracy:.0%}", ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(depths), depth_names(depths))
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set(xlabel="depth of the fact in the context, from", ylabel="tokens", title="answers that are right")
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, format="{x:.0%}")
