"""Loss by position in the document, which shows how well a model uses a longer context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ringflash.errors import ConfigError
from ringflash.train.callbacks.observe import gathered, is_logging_step
from ringflash.train.lightning.batch import positions_of
from ringflash.train.models.loss import IGNORE_INDEX

FIRST_BUCKET = 64  # positions 0 to 63; the next buckets are 64 to 127, 128 to 255, ...
NUM_BUCKETS = 26  # the last begins at 2^30
MOST_NATS = 700.0  # largest loss with an exponential that fits a float
PREFIX = "train/loss_by_position/"


@dataclass(frozen=True)
class Bucket:
    """Tokens at positions `first` to `last` of their documents, and the sum of their losses in nats."""

    first: int
    last: int
    tokens: int
    loss_sum: float

    @property
    def name(self) -> str:
        """Name of the bucket, for instance 4096-8191."""
        return f"{self.first}-{self.last}"

    @property
    def loss(self) -> float:
        """Mean loss of the tokens."""
        return self.loss_sum / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity for a large loss."""
    return math.exp(loss) if loss < MOST_NATS else math.inf


def table_by_position(token_losses: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
    """Returns (2, NUM_BUCKETS) float64: sums of losses, and numbers of labels, by bucket of position.

    The position is the input's, so the loss at position p belongs to a prediction from p + 1 tokens. Tables of several
    batches or ranks can be added.

    Args:
        token_losses: (batch, seqlen) of any float dtype; values without a label are ignored.
        labels: (batch, seqlen) int64, `IGNORE_INDEX` for none.
        position_ids: (seqlen,) or (batch, seqlen) int64.
    """
    edges = FIRST_BUCKET * 2 ** torch.arange(NUM_BUCKETS - 1, device=labels.device)
    bucket = torch.bucketize(position_ids.contiguous(), edges, right=True).expand_as(labels).flatten()
    valid = labels != IGNORE_INDEX
    values = torch.stack([token_losses.double().masked_fill(~valid, 0), valid.double()]).flatten(1)
    return values.new_zeros(2, NUM_BUCKETS).index_add_(1, bucket, values)


def buckets(table: Tensor) -> list[Bucket]:
    """Returns the buckets of a table that hold tokens, in order."""
    found = []
    for index, (loss_sum, tokens) in enumerate(zip(*table.tolist(), strict=True)):
        if tokens:
            end = FIRST_BUCKET << index
            found.append(Bucket(end // 2 if index else 0, end - 1, int(tokens), loss_sum))
    return found


class LossByPosition(Callback):
    """Logs train/loss_by_position/FIRST-LAST: mean loss since the last logging step, by position in the document.

    Needs a `training_step` that returns {"loss", "token_losses": (batch, seqlen_local) float32}. Ranks sum their tables
    once a logging interval.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts an empty table."""
        self._table, self._last_step = None, trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the micro-batch to the table, and logs at the Trainer's logging steps.

        Raises:
            ConfigError: the module's training_step returns no token losses.
        """
        if not isinstance(outputs, Mapping) or "token_losses" not in outputs:
            raise ConfigError(
                "LossByPosition",
                expected='a training_step that returns {"loss", "token_losses"}',
                got=f"{type(pl_module).__name__}'s, which returns no token losses",
                remedy="Return them, detached, or leave the callback out.",
            )
        table = table_by_position(outputs["token_losses"], batch["labels"], positions_of(batch))
        table = table.where(table.isfinite().all(), 0)  # a skipped step has no finite loss
        self._table = table if self._table is None else self._table + table
        if trainer.global_step == self._last_step:  # in the middle of an accumulation window
            return
        self._last_step = trainer.global_step
        if is_logging_step(trainer):
            whole = gathered(trainer, self._table.flatten()).sum(0).view_as(self._table)
            metrics = {f"{PREFIX}{bucket.name}": bucket.loss for bucket in buckets(whole)}
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, sync_dist=False)
            self._table = None
