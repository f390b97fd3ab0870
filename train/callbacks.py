"""Callbacks around a run: progress, a picture of the loss, a summary."""

from __future__ import annotations

import csv
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ringflash.errors import ConfigError
from ringflash.train.checkpointing import LastCheckpoint
from ringflash.train.generate import generate
from ringflash.train.throughput import Throughput
from ringflash.train.tokenizer import Tokenizer

LINE_SECONDS = 3.0
LAST_STEPS = 10  # one step's loss is its one sequence's
TRAIN_COLOR, HELD_OUT_COLOR = "#4c78a8", "#e45756"


def log_every_n_steps(trainer: pl.Trainer) -> int:
    """The Trainer's logging interval, which it sets without declaring it."""
    return trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]


class RingProgressBar(RichProgressBar):
    """Lightning's Rich bar with loss, tokens/s and MFU; on anything but a terminal, a line every few seconds."""

    def __init__(self, refresh_rate: int = 4) -> None:
        # Steps are long here: a few refreshes a second show all of them and cost nothing.
        super().__init__(refresh_rate=refresh_rate, leave=True)
        self.lines = not Console().is_terminal
        self._printed_step, self._printed_at = 0, 0.0
        if self.lines:
            super().disable()

    def enable(self) -> None:
        """Shows the bar, unless there is no terminal."""
        if not self.lines:
            super().enable()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What follows the bar."""
        return progress_texts(trainer.callback_metrics)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the bar, or prints the line."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        step, now = trainer.global_step, time.monotonic()
        if self.lines and trainer.is_global_zero and step != self._printed_step:
            due = step % log_every_n_steps(trainer) == 0 and now - self._printed_at >= LINE_SECONDS
            if due or step in (1, trainer.max_steps):
                self._printed_step, self._printed_at = step, now
                of = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
                texts = progress_texts(trainer.callback_metrics)
                print(f"step {step}{of}", *(f"{name} {text}" for name, text in texts.items()), sep="  ", flush=True)


def progress_texts(metrics: Any) -> dict[str, str]:
    """The figures worth watching, as short texts."""
    formats = {
        "train/loss": ("loss", "{:.3f}"),
        "val/loss": ("val", "{:.3f}"),
        "train/tokens_per_second": ("tokens/s", "{:,.0f}"),
        "train/mfu": ("MFU", "{:.1%}"),
    }
    return {label: text.format(float(metrics[name])) for name, (label, text) in formats.items() if name in metrics}


class LossPlot(Callback):
    """Draws the CSV log's train and val loss to a PNG in the run's folder, at the end of fit.

    Args:
        filename: of the picture.
    """

    def __init__(self, filename: str = "loss.png") -> None:
        self.filename = filename

    @rank_zero_only
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws it, if there is a CSV log."""
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.save()
                draw_losses(metrics_file(logger), Path(logger.log_dir) / self.filename)


def metrics_file(logger: CSVLogger) -> Path:
    """Where Lightning's CSVLogger writes."""
    return Path(logger.log_dir) / "metrics.csv"


def read_losses(log: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) by name of the losses in a CSV log."""
    losses: dict[str, list[tuple[int, float]]] = {"train/loss": [], "val/loss": []}
    if log.is_file():
        with log.open(newline="") as stream:
            for row in csv.DictReader(stream):
                for name, points in losses.items():
                    if row.get(name):
                        points.append((int(row["step"]), float(row[name])))
    return losses


def draw_losses(log: Path, picture: Path) -> None:
    """Draws the losses in the CSV `log`, in nats a token, over optimizer steps; train loss with its running mean."""
    # Not pyplot, which keeps figures and picks a window system; imported here because fonts take a second to load.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    losses = read_losses(log)
    if train := losses["train/loss"]:
        steps, values = zip(*train, strict=True)
        axes.plot(steps, values, color=TRAIN_COLOR, linewidth=0.8, alpha=0.4)
        axes.plot(steps, running_mean(values, max(1, len(values) // 16)), color=TRAIN_COLOR, label="train")
    if held_out := losses["val/loss"]:
        axes.plot(*zip(*held_out, strict=True), color=HELD_OUT_COLOR, marker="o", markersize=4, label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if any(losses.values()):
        axes.legend(frameon=False)
    figure.savefig(picture)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the up to `window - 1` before it."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


class RunSummary(Callback):
    """Prints, at the end of fit, what the run came to: losses, speed, a sample of text, and where things lie.

    Args:
        prompt: that the sample continues.
        sample_tokens: length of the sample; 0 for none.
        temperature: of sampling.
        seed: of sampling, the same on all ranks, which compute the sample together.
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
        self.last_losses: deque[float] = deque(maxlen=LAST_STEPS)
        self._step = -1

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the loss."""
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self.last_losses.append(float(loss))
            if math.isnan(self.first_loss):
                self.first_loss = float(loss)

    def state_dict(self) -> dict[str, Any]:
        """The first loss, of which a resumed run has no other memory."""
        return {"first_loss": self.first_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the first loss of the run that is resumed."""
        self.first_loss = state_dict["first_loss"]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Samples on all ranks, prints on the first."""
        sample = self._sample(pl_module) if self.sample_tokens else None
        if trainer.is_global_zero:
            console = Console()
            console.print(Panel(self._table(trainer), title="run", title_align="left", expand=False))
            if sample is not None:
                text = Text.assemble((self.prompt, "bold"), sample)
                console.print(Panel(text, title="sample", title_align="left"))

    def _sample(self, pl_module: Any) -> str:
        tokenizer: Tokenizer = getattr(getattr(pl_module.trainer, "datamodule", None), "tokenizer", Tokenizer())
        was_training = pl_module.training
        pl_module.eval()
        tokens = generate(
            pl_module.decoder,
            torch.tensor(tokenizer.encode(self.prompt)),
            self.sample_tokens,
            temperature=self.temperature,
            generator=torch.Generator().manual_seed(self.seed),
            cache_dtype=_compute_dtype(pl_module),
            vocab_size=tokenizer.vocab_size,
        )
        pl_module.train(was_training)
        return tokenizer.decode(tokens)

    def _table(self, trainer: pl.Trainer) -> Table:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        last = sum(self.last_losses) / len(self.last_losses) if self.last_losses else math.nan
        notes = [f"{last / self.first_loss:.0%} of the first"] if self.first_loss > 0 else []
        notes += [f"mean of {len(self.last_losses)} steps"]
        table.add_row("first loss", f"{self.first_loss:.4f}")
        table.add_row("last loss", f"{last:.4f} ({', '.join(notes)})")
        if (val := trainer.callback_metrics.get("val/loss")) is not None:
            table.add_row("held-out loss", f"{float(val):.4f}")
        for throughput in (c for c in trainer.callbacks if isinstance(c, Throughput)):  # pyright: ignore[reportAttributeAccessIssue]
            rate = throughput.tokens_per_second
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
        places = [("checkpoint", c.path) for c in callbacks if isinstance(c, LastCheckpoint)]
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                places += [("log", metrics_file(logger))]
                places += [("picture", Path(logger.log_dir) / c.filename) for c in callbacks if isinstance(c, LossPlot)]
        return places


def _compute_dtype(pl_module: Any) -> torch.dtype | None:
    """What FSDP casts gathered weights to; None where it keeps their dtype, or where there is no FSDP."""
    if pl_module.context is None:
        return None
    names = {"auto": torch.bfloat16 if pl_module.device.type == "cuda" else None, "bfloat16": torch.bfloat16}
    return names.get(pl_module.compute_dtype)


def _relative(path: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
