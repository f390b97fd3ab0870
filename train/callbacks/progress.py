"""Callback that shows the progress of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console

from ringflash.train.callbacks.observe import is_logging_step

LINE_SECONDS = 3.0


class RingProgressBar(RichProgressBar):
    """Lightning's Rich bar with loss, tokens/s and MFU; without a terminal it prints a line every few seconds.

    A metric that lies on the GPU makes the host wait for the step. The bar therefore reads metrics at logging steps and
    every few seconds only.
    """

    def __init__(self, refresh_rate: int = 4) -> None:
        # Steps are long, so a few refreshes a second show all of them at no cost.
        super().__init__(refresh_rate=refresh_rate, leave=True)
        self.lines = not Console().is_terminal
        self._printed_step, self._printed_at = 0, 0.0
        self._texts: dict[str, str] = {}
        self._read_at, self._in_step = 0.0, False
        if self.lines:
            super().disable()

    def enable(self) -> None:
        """Shows the bar, unless there is no terminal."""
        if not self.lines:
            super().enable()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Returns the texts after the bar; during training they may be a few seconds old."""
        now = time.monotonic()
        if not self._in_step or is_logging_step(trainer) or now - self._read_at >= LINE_SECONDS:
            self._texts, self._read_at = progress_texts(trainer.callback_metrics), now
        return self._texts

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Moves the bar, or prints the line."""
        self._in_step = True
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        self._in_step = False
        step, now = trainer.global_step, time.monotonic()
        if self.lines and trainer.is_global_zero and step != self._printed_step:
            due = is_logging_step(trainer) and now - self._printed_at >= LINE_SECONDS
            if due or step in (1, trainer.max_steps):
                self._printed_step, self._printed_at = step, now
                of = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
                texts = progress_texts(trainer.callback_metrics)
                # Printed, not logged: without a terminal this line is the progress bar, on stdout as the bar is.
                print(f"step {step}{of}", *(f"{name} {text}" for name, text in texts.items()), sep="  ", flush=True)


def progress_texts(metrics: Any) -> dict[str, str]:
    """Returns the main metrics as short texts."""
    formats = {
        "train/loss": ("loss", "{:.3f}"),
        "val/loss": ("val", "{:.3f}"),
        "train/tokens_per_second": ("tokens/s", "{:,.0f}"),
        "train/mfu": ("MFU", "{:.1%}"),
    }
    return {label: text.format(float(metrics[name])) for name, (label, text) in formats.items() if name in metrics}
