"""Queries to the Trainer, apart from the callbacks because the LightningModules below them ask too."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor

from ringflash.train.exchange import all_ranks
from ringflash.train.lightning.strategy import RingAttentionStrategy


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Returns whether the metrics of the optimizer step that has just ended go to the loggers."""
    interval: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    return interval > 0 and trainer.global_step % interval == 0


def gathered(trainer: pl.Trainer, local: Tensor) -> Tensor:
    """Gathers (n,) of this rank into (world_size, n) of all, in rank order; every rank calls it."""
    strategy = trainer.strategy
    if not isinstance(strategy, RingAttentionStrategy):  # under another strategy LanguageModel trains on one rank
        return local[None]
    return all_ranks(local, strategy.world_group)
