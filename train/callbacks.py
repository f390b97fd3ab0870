"""Callbacks around a run: its checkpoint and its end by Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint

from ringflash.errors import ConfigError


def run_dir(trainer: pl.Trainer) -> Path:
    """The folder that everything of a run goes to, the first logger's."""
    return Path(trainer.log_dir or trainer.default_root_dir)


class LastCheckpoint(Checkpoint):
    """Keeps the newest state as checkpoints/last in the run's folder; the strategy replaces it atomically.

    Args:
        every_n_steps: optimizer steps between saves; there is always one at the end.
    """

    def __init__(self, every_n_steps: int = 500) -> None:
        if every_n_steps < 1:
            raise ConfigError("every_n_steps", expected="at least 1", got=every_n_steps, remedy="Try 500.")
        self.every_n_steps, self.path = every_n_steps, Path()
        self._saved_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Settles the path: ranks that started apart could name the run's folder differently."""
        self.path = Path(trainer.strategy.broadcast(str(run_dir(trainer) / "checkpoints" / "last")))
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves at every n-th optimizer step."""
        if trainer.global_step % self.every_n_steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves the final state."""
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != self._saved_step and not trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            self._saved_step = trainer.global_step
            trainer.save_checkpoint(self.path)


class Interrupt(Callback):
    """Ends training on an interrupt that Python has dropped.

    An exception that a signal raises while a finalizer runs is printed and forgotten, and Ctrl-C would do nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._previous: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes note of interrupts from here on, unless the program has a handler of its own."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._note)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raises the interrupt again that did not come through."""
        if self._pending:
            raise KeyboardInterrupt

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the handler back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: Any) -> None:
        self._pending = True
        raise KeyboardInterrupt
