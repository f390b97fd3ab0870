"""End of a run by Ctrl-C."""

from __future__ import annotations

import signal
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class Interrupt(Callback):
    """Ends training on an interrupt that Python has dropped.

    Python prints and drops an exception that a signal handler raises while a finalizer runs. Ctrl-C would then do
    nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._previous: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records interrupts from now on, unless the program has its own handler."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._note)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Raises an interrupt that was dropped."""
        if self._pending:
            raise KeyboardInterrupt

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restores the previous handler."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: Any) -> None:
        self._pending = True
        raise KeyboardInterrupt
