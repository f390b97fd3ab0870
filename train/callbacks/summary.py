"""Callback that prints the results of a run: losses, speed, a sample of text, and paths of its files."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ringflash.errors import ConfigError
from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.callbacks.report import Report
from ringflash.train.callbacks.run_log import METRICS
from ringflash.train.callbacks.throughput import Throughput
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.models.generate import Sampling, continue_prompts

LAST_STEPS = 10  # steps to average, because one step's loss comes from one batch


class RunSummary(Callback):
    """Prints the results of the run at the end of fit: losses, speed, a sample of text, and paths of its files.

    Args:
        prompt: text that the sample continues.
        sample_tokens: length of the sample; 0 for none.
        temperature: temperature of sampling.
        seed: seed of sampling, the same on all ranks, which compute the sample together.
    """

    def __init__(self, prompt: str = "def ", sample_tokens: int = 200, temperature: float = 0.7, seed: int = 0) -> None:
        if not prompt or sample_tokens < 0 or temperature < 0:
            raise ConfigError(
                "summary",
                expected="a prompt, and sample_tokens and temperature of at least 0",
                got=(prompt, sample_tokens, temperature),
                remedy="Set sample_tokens to 0 for no sample.",
            )
        self.prompt, self.sample_tokens, self.temperature, self.seed = prompt, sample_tokens, temperature, seed
        self.first_loss = math.nan
        self._last: deque[Any] = deque(maxlen=LAST_STEPS)  # on the device, so that no step waits for its loss
        self._step = -1
        self.trained = False

    @property
    def last_losses(self) -> list[float]:
        """Losses of the last steps; waits for the device."""
        return [float(loss) for loss in self._last]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records that there are steps to train; a run that resumes at its end has none."""
        self.trained = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Records the loss."""
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self._last.append(loss)
            if math.isnan(self.first_loss):
                self.first_loss = float(loss)

    def state_dict(self) -> dict[str, Any]:
        """Returns the first loss, because a resumed run cannot compute it."""
        return {"first_loss": self.first_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the first loss of the resumed run."""
        self.first_loss = state_dict["first_loss"]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Samples on all ranks and prints on the first.

        If the run was already at its end, it only prints a message that says so.
        """
        if not self.trained:
            if trainer.is_global_zero:
                step = trainer.global_step
                # Printed, not logged: it is what the console shows in place of the summary's table.
                print(f"Already trained to step {step}: nothing was left to do. Raise trainer.max_steps to go on.")
            return
        sample = self._sample(pl_module) if self.sample_tokens else None
        if trainer.is_global_zero:
            console = Console()
            console.print(Panel(self._table(trainer), title="run", title_align="left", expand=False))
            if sample is not None:
                text = Text.assemble((self.prompt, "bold"), sample)
                console.print(Panel(text, title="sample", title_align="left"))

    def _sample(self, pl_module: Any) -> str:
        was_training = pl_module.training
        pl_module.eval()
        tokenizer: Tokenizer = getattr(getattr(pl_module.trainer, "datamodule", None), "tokenizer", Tokenizer())
        (tokens,) = continue_prompts(
            pl_module.decoder,
            [torch.tensor(tokenizer.encode(self.prompt))],
            self.sample_tokens,
            Sampling(self.temperature, vocab_size=tokenizer.vocab_size),  # no stop token: all ranks end together
            generator=torch.Generator().manual_seed(self.seed),
            cache_dtype=_compute_dtype(pl_module),
        )
        pl_module.train(was_training)
        return tokenizer.decode(tokens)

    def _table(self, trainer: pl.Trainer) -> Table:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        if last_losses := self.last_losses:
            last = sum(last_losses) / len(last_losses)
            notes = [f"{last / self.first_loss:.0%} of the first"] if self.first_loss > 0 else []
            notes += [f"mean of {len(last_losses)} steps"]
            table.add_row("first loss", f"{self.first_loss:.4f}")
            table.add_row("last loss", f"{last:.4f} ({', '.join(notes)})")
        if (val := trainer.callback_metrics.get("val/loss")) is not None:
            table.add_row("held-out loss", f"{float(val):.4f}")
        for throughput in (c for c in trainer.callbacks if isinstance(c, Throughput)):  # pyright: ignore[reportAttributeAccessIssue]
            if not (rate := throughput.tokens_per_second):
                continue
            table.add_row("tokens/s", f"{rate:,.0f} ({rate / throughput.world_size:,.0f} a rank)")
            if throughput.mfu is not None:
                table.add_row("MFU", f"{throughput.mfu:.1%}")
        for label, path in self._places(trainer):
            if path.exists():
                table.add_row(label, _relative(path))
        return table

    @staticmethod
    def _places(trainer: pl.Trainer) -> list[tuple[str, Path]]:
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        places = [("checkpoint", c.path) for c in callbacks if isinstance(c, LastCheckpoint) and c.path is not None]
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                places += [("log", Path(logger.log_dir) / METRICS)]
                places += [("report", Path(logger.log_dir) / c.filename) for c in callbacks if isinstance(c, Report)]
        return places


def _compute_dtype(pl_module: Any) -> torch.dtype | None:
    """Returns the dtype to which FSDP casts gathered weights; None without FSDP or without a cast."""
    if pl_module.context is None:
        return None
    names = {"auto": torch.bfloat16 if pl_module.device.type == "cuda" else None, "bfloat16": torch.bfloat16}
    return names.get(pl_module.compute_dtype)


def _relative(path: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
