"""End of a run by SIGTERM: all ranks stop after the same step and save it."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.exchange import Purpose
from ringflash.train.lightning.sharded import ShardedStrategy

log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM


class Preempted(SystemExit):
    """Exit of every rank after one of them received SIGTERM; the exit code is 143.

    Args:
        text: message of the exception.
    """

    def __init__(self, text: str) -> None:
        super().__init__(EXIT_CODE)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Preemption(Callback):
    """Ends training after a SIGTERM on any rank.

    At the end of a step all ranks save with `LastCheckpoint`, if it is in use. The signal handler only sets a flag. All
    ranks exchange their flags after every optimizer step and every validation batch, which costs one small exchange
    over gloo. The rest of the step and the save must therefore fit into the time before the launcher kills the
    processes. Loggers get the metrics of the last step. A run that has already finished training ends normally.
    """

    def __init__(self) -> None:
        self._requested, self._step = False, 0
        self._end: Preempted | None = None  # raised once Lightning has logged the step that was saved

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Moves this callback behind all but checkpoints, so that it saves what the others have made of the step."""
        trainer.callbacks = sorted(trainer.callbacks, key=lambda each: (isinstance(each, Checkpoint), each is self))

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records SIGTERM from now on."""
        self._listen()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records SIGTERM from now on."""
        self._step, self._end = trainer.global_step, None
        self._listen()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Saves after an optimizer step, if a rank received SIGTERM."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._end = self._save_if_told(trainer)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Raises Preempted, if the last step was saved after a SIGTERM."""
        self._raise_end()

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Raises Preempted, if the last step was saved after a SIGTERM."""
        self._raise_end()

    def on_validation_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Raises Preempted, if the last step was saved after a SIGTERM."""
        if _is_in_training(trainer):
            self._raise_end()

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Saves and raises Preempted, if a rank received SIGTERM."""
        if _is_in_training(trainer):
            self._end = self._save_if_told(trainer)
            self._raise_end()

    def _raise_end(self) -> None:
        if self._end is not None:
            raise self._end

    def _listen(self) -> None:
        # Replaces Lightning's handler, which runs a broadcast inside. The Trainer restores the old handler.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._requested = True

    def _save_if_told(self, trainer: pl.Trainer) -> Preempted | None:
        """Saves if a rank received SIGTERM, and returns the exception that ends the run; a collective of all ranks."""
        strategy, told = trainer.strategy, [self._requested]
        if isinstance(strategy, ShardedStrategy):
            told = [flags[0] for flags in strategy.exchange(Purpose.SIGNALS, self._requested)]
        if not any(told):
            return None
        ranks = [rank for rank, flag in enumerate(told) if flag]
        text = f"SIGTERM on {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: "
        text += f"stopped after step {trainer.global_step}"
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, LastCheckpoint):
                callback.save(trainer)
                text += f", saved as {callback.path}"
        if trainer.is_global_zero:
            log.warning(text)
        return Preempted(text)


def _is_in_training(trainer: pl.Trainer) -> bool:
    """Returns whether a validation is part of training, and not the check before it."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
