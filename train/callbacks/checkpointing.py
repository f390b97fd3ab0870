"""Callback that decides when a run saves its state, and which of its checkpoints stay."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from ringflash.errors import ConfigError
from ringflash.train.checkpoint.collective import on_every_rank
from ringflash.train.checkpoint.manifest import Keep, is_url, local_path
from ringflash.train.checkpoint.save import Progress, SaveOptions
from ringflash.train.exchange import Purpose
from ringflash.train.lightning.sharded import ShardedStrategy
from ringflash.train.remote import check_remote


def run_dir(trainer: pl.Trainer) -> Path:
    """Returns the folder of all files of a run, the first logger's."""
    return local_path(trainer.log_dir or trainer.default_root_dir, "default_root_dir")


class LastCheckpoint(Checkpoint):
    """Keeps the newest state as checkpoints/last in the run's folder, and older ones as checkpoints/step-00000500.

    It also saves at the end, and when `Preemption` ends the run. Each checkpoint replaces the previous one atomically.
    A run that is killed at any moment can therefore resume from the newest complete one, with `ckpt_path` set to the
    folder `checkpoints`. Under another strategy than RingAttentionStrategy a checkpoint is one file, which training
    waits for. The Trainer then keeps only the newest.

    Args:
        every_n_steps: optimizer steps between saves.
        every_n_minutes: minutes after which it saves in any case, by the first rank's clock; None: steps decide.
        keep: number of newest checkpoints to keep; if one is damaged, a run can fall back to another.
        keep_every_n_steps: keep forever the checkpoints of steps that are multiples of this; None: keep none forever.
        remote: URL of a folder, such as s3://bucket/run, to which each complete checkpoint is copied as step-00000500,
            through fsspec. `keep` and `keep_every_n_steps` hold there too. None: no copies.
        asynchronous: training continues while a checkpoint is written from a copy in host memory. Only one is written
            at a time: the next save waits for it, as does the end of the run. A failure is raised on every rank after
            the next step.

    Raises:
        ConfigError: a number out of range, or `remote` is no URL.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        every_n_minutes: float | None = None,
        keep: int = 2,
        keep_every_n_steps: int | None = None,
        asynchronous: bool = True,
        remote: str | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError("every_n_steps", expected="at least 1", got=every_n_steps, remedy="Try 500.")
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise ConfigError("every_n_minutes", expected="more than 0", got=every_n_minutes, remedy="Try 30.")
        if remote is not None and not is_url(remote):
            remedy = "Checkpoints are in the run's folder in any case."
            raise ConfigError("remote", expected="a URL, such as s3://bucket/run", got=remote, remedy=remedy)
        self.remote = remote
        self.every_n_steps, self.every_n_minutes, self.asynchronous = every_n_steps, every_n_minutes, asynchronous
        self.keep = Keep(keep, keep_every_n_steps)
        self.path: Path | None = None  # set when training begins
        self._step = self._saved_step = 0
        self._saved_at = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the path, because ranks that started apart could name the run's folder differently.

        Raises:
            ConfigError: `remote` with another strategy.
            CheckpointError: on every rank, when `remote` cannot be written or has checkpoints of another run.
        """
        if self.remote is not None:
            self._check_remote(self.remote, trainer)
        self.path = Path(trainer.strategy.broadcast(str(run_dir(trainer) / "checkpoints" / "last")))
        self._step = self._saved_step = trainer.global_step
        self._saved_at = time.monotonic()

    @staticmethod
    def _check_remote(url: str, trainer: pl.Trainer) -> None:
        strategy, fresh = trainer.strategy, trainer.global_step == 0
        if not isinstance(strategy, ShardedStrategy):
            remedy = 'Pass strategy="ring_attention", or leave remote out.'
            got = f"{type(strategy).__name__} with remote={url}"
            raise ConfigError("strategy", expected="RingAttentionStrategy for copies at a URL", got=got, remedy=remedy)
        check = partial(check_remote, url, fresh=fresh) if trainer.is_global_zero else lambda: None
        on_every_rank(check, Path(url), strategy.cpu_group)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Saves when a checkpoint is due.

        Raises:
            CheckpointError: on every rank, when a save that was under way has failed on one.
        """
        if trainer.global_step == self._step:  # within an accumulation window
            return
        self._step = trainer.global_step
        if self._exchange(trainer) or trainer.global_step % self.every_n_steps == 0:
            self.save(trainer, asynchronous=self.asynchronous)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves the final state."""
        self.save(trainer)

    def save(self, trainer: pl.Trainer, *, asynchronous: bool = False) -> None:
        """Saves the state of this step, unless it is saved already or this is a fast_dev_run; every rank calls it."""
        strategy = trainer.strategy
        if trainer.global_step != self._saved_step and not trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
            assert self.path is not None, "training has begun"
            options = (
                SaveOptions(asynchronous, self.keep, self.remote) if isinstance(strategy, ShardedStrategy) else None
            )
            trainer.save_checkpoint(self.path, storage_options=options)
        elif isinstance(strategy, ShardedStrategy) and not asynchronous:
            strategy.saver.wait()

    def _exchange(self, trainer: pl.Trainer) -> bool:
        """Returns whether the first rank's clock calls for a save. Also ends a save that has failed or is done."""
        strategy = trainer.strategy
        minutes = (time.monotonic() - self._saved_at) / 60
        due = self.every_n_minutes is not None and minutes >= self.every_n_minutes
        if not isinstance(strategy, ShardedStrategy):
            return self.every_n_minutes is not None and strategy.broadcast(due)
        if self.every_n_minutes is None and strategy.saver.progress == Progress.IDLE:
            return False
        rows = strategy.exchange(Purpose.SAVES, strategy.saver.progress, due)
        progress = {row[0] for row in rows}
        if Progress.FAILED in progress or progress == {Progress.DONE}:
            strategy.saver.wait()
        return bool(rows[0][1])
