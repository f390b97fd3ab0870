"""Checks that keep a user's own LightningModule from training or logging a wrong number."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint, StochasticWeightAveraging, WeightAveraging

from ringflash.errors import ConfigError

if TYPE_CHECKING:
    from ringflash.train.lightning.sharded import ShardedStrategy

logger = logging.getLogger(__name__)

COUNT = "num_valid_tokens"
AVERAGES = (StochasticWeightAveraging, WeightAveraging)
TOLERANCE = 1e-5  # relative; far below the difference of two shards' losses
REMEDY = (
    "Log the mean over all ranks: mean = self.trainer.strategy.context.token_mean(token_losses, batch['labels']), then "
    "self.log(name, mean.value, batch_size=int(mean.num_valid), sync_dist=True)."
)


NO_ATTENTION = (
    "The training step called no attention of its context, so each of the %d ranks attends to its own part of the "
    "sequence alone. Call rf.ring_attention with context=self.trainer.strategy.context in place of rf.flash_attention "
    "or scaled_dot_product_attention, unless no token of this model sees another."
)


class WatchedBatch(dict[str, Any]):
    """A batch that records whether `training_step` reads the number of valid tokens."""

    is_count_read = False

    def __getitem__(self, key: str) -> Any:
        self.is_count_read |= key == COUNT
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the entry `key`, or `default`."""
        self.is_count_read |= key == COUNT
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        """Iterates over names. This override makes `**batch` and `{**batch}` read entries one by one."""
        return super().__iter__()

    def items(self) -> Any:
        """Returns names and entries, including the number of valid tokens."""
        self.is_count_read = True
        return super().items()

    def values(self) -> Any:
        """Returns the entries, including the number of valid tokens."""
        self.is_count_read = True
        return super().values()

    def pop(self, key: str, *default: Any) -> Any:
        """Removes and returns the entry `key`, or `default`."""
        self.is_count_read |= key == COUNT
        return super().pop(key, *default)


def loss_error() -> ConfigError:
    """Makes the error for a loss that is not divided by the global number of valid tokens."""
    return ConfigError(
        "training_step",
        expected="a loss from context.token_mean, or the local sum of token losses / batch['num_valid_tokens']",
        got="a loss that uses neither; a mean over a shard gives gradients that are too large by the number of ranks, "
        "and wrong ones where ranks have unequal numbers of valid tokens",
        remedy="Return self.trainer.strategy.context.token_mean(token_losses, batch['labels']).loss.",
    )


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raises ConfigError for callbacks that copy the whole module, and warns of a callback that cannot save."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, AVERAGES):
            raise ConfigError(
                "callbacks",
                expected="none that copies the module: its weights are sharded over ranks",
                got=type(callback).__name__,
                remedy="Use ringflash.train.ExponentialMovingAverage, which averages each rank's shards.",
            )
        if isinstance(callback, OnExceptionCheckpoint) and trainer.world_size > 1 and trainer.is_global_zero:
            text = "OnExceptionCheckpoint saves nothing on several ranks, which an error finds at different steps. %s"
            logger.warning(text, "Use ModelCheckpoint(every_n_train_steps=...) and resume from its last checkpoint.")


def check_early_copies(trainer: pl.Trainer) -> None:
    """Raises ConfigError for a callback that copied a module before `configure_model` builds its model.

    StochasticWeightAveraging would then average no weights, under any strategy, and say nothing.
    """
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "callbacks",
                expected="none that copies the module before it has weights",
                got=type(callback).__name__,
                remedy="Use ringflash.train.ExponentialMovingAverage.",
            )


class MetricGuard(Callback):
    """Compares logged metrics over ranks before other callbacks act on them.

    A metric that a callback or a scheduler monitors must be equal on all ranks, because each rank acts on its own
    value. An unmonitored loss that differs between ranks causes one warning.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the metrics before ModelCheckpoint and EarlyStopping read them."""
        strategy: ShardedStrategy = trainer.strategy  # pyright: ignore[reportAssignmentType]
        mine = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        gathered: list[Any] = [None] * strategy.world_size
        dist.all_gather_object(gathered, mine, group=strategy.cpu_group)
        monitored: set[Any] = {getattr(callback, "monitor", None) for callback in trainer.callbacks}  # pyright: ignore[reportAttributeAccessIssue]
        monitored |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
        for name in sorted(set[str].intersection(*(set(metrics) for metrics in gathered))):
            values = [metrics[name] for metrics in gathered]
            if are_equal(values):
                continue
            if name in monitored:
                raise ConfigError(
                    name, expected="one value on all ranks, as it is monitored", got=values, remedy=REMEDY
                )
            if "loss" in name and name not in self._warned:
                self._warned.add(name)
                if trainer.is_global_zero:
                    logger.warning("%s differs between ranks: %s. Each logs its own share. %s", name, values, REMEDY)

    on_train_epoch_end = on_validation_end


def are_equal(values: list[float]) -> bool:
    """Returns whether all ranks hold one value, up to rounding."""
    return all(math.isclose(values[0], value, rel_tol=TOLERANCE) for value in values) or all(map(math.isnan, values))
