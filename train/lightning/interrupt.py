"""The end of a run by Ctrl-C."""

from __future__ import annotations

import signal
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


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
