"""Callback that traces chosen steps: a Chrome trace a rank, the costliest kernels, exposed communication."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ringflash.errors import ConfigError
from ringflash.train.callbacks.checkpointing import run_dir
from ringflash.train.callbacks.observe import gathered
from ringflash.train.callbacks.trace import Cost, Timeline, costliest, timeline

log = logging.getLogger(__name__)

ROWS = 20  # kernels in the table
LONGEST_NAME = 100  # characters of a kernel's name


class Profile(Callback):
    """Traces some optimizer steps with torch.profiler; at any other step it does nothing.

    It writes profile/steps-FIRST-LAST-rank0.json.gz, and one such file for each other rank, in the run's folder; they
    open in ui.perfetto.dev. profile/steps-FIRST-LAST.md holds each rank's times of computing, communicating and idling,
    and rank 0's costliest kernels. On GPUs it logs train/exposed_communication: the fraction of the time, averaged over
    ranks, in which messages travelled and no other kernel ran (see `timeline`). The steps' throughput includes the
    overhead of the profiler.

    Args:
        steps: first and last step to trace, counted from 1 as in the progress bar; the step before the first warms the
            profiler up. None: no trace. A run that resumes after the step before the first traces nothing.

    Raises:
        ConfigError: `steps` is no such pair.
    """

    def __init__(self, steps: tuple[int, int] | None = None) -> None:
        if steps is not None and (len(steps) != 2 or not 2 <= steps[0] <= steps[1]):
            remedy = "Try [10, 12]: both are traced, and the step before them warms the profiler up."
            raise ConfigError("profile.steps", expected="the first, from 2 on, and the last", got=steps, remedy=remedy)
        self.steps = steps
        self._profiler: profile | None = None
        self._folder, self._step = Path(), 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the folder of the traces.

        Raises:
            ConfigError: the run ends before the last step to trace.
        """
        if self.steps is None:
            return
        if 0 <= trainer.max_steps < self.steps[1]:
            expected, got = f"steps of a run of {trainer.max_steps}", list(self.steps)
            raise ConfigError("profile.steps", expected=expected, got=got, remedy="Name earlier steps.")
        self._folder = Path(trainer.strategy.broadcast(str(run_dir(trainer) / "profile")))
        self._step = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the profiler at the step before the first traced step."""
        if self.steps is None or self._profiler is not None or trainer.global_step + 2 != self.steps[0]:
            return
        activities = [ProfilerActivity.CPU]
        if pl_module.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # One cycle is recorded, so keeping events across cycles changes nothing but torch's warning that it does not.
        self._profiler = profile(activities=activities, schedule=_warm_up_then_record, acc_events=True)
        self._profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Advances the profiler at each optimizer step, and writes the trace after the last one."""
        if self._profiler is None or trainer.global_step == self._step:  # in the middle of an accumulation window
            self._step = trainer.global_step
            return
        self._step = trainer.global_step
        assert self.steps is not None
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # the step ends when its kernels have ended
        if trainer.global_step < self.steps[1]:
            self._profiler.step()
        else:
            self._write(trainer, pl_module.device)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Drops a trace that an error has cut short: Lightning calls no `teardown` after one."""
        self._drop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Drops a trace that an early end has cut short."""
        self._drop()

    def _drop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, trainer: pl.Trainer, device: torch.device) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        assert self.steps is not None
        profiler.stop()
        first, last = self.steps
        name, rank = f"steps-{first}-{last}", trainer.global_rank
        trace, seen = self._folder / f"{name}-rank{rank}.json", None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            if device.type == "cuda":
                seen = timeline(json.loads(trace.read_bytes())["traceEvents"])
            with trace.open("rb") as stream, gzip.open(f"{trace}.gz", "wb", compresslevel=3) as packed:
                shutil.copyfileobj(stream, packed)  # torch compresses line by line, which takes minutes for long traces
        except (OSError, ValueError) as error:  # a full disk ends the trace, not the training
            log.warning("no trace of rank %d: %s", rank, error)
        trace.unlink(missing_ok=True)
        figures = _figures(seen) if seen is not None else [math.nan] * 5
        ranks: list[list[float]] = gathered(trainer, torch.tensor(figures, dtype=torch.float64, device=device)).tolist()
        if trainer.is_global_zero and self._folder.is_dir():
            costs = seen.kernels if seen is not None else _operators(profiler)
            with contextlib.suppress(OSError):  # the error is printed above
                (self._folder / f"{name}.md").write_text(summary(first, last, ranks, costs))
        parts = [exposed / seconds for seconds, _, _, exposed, _ in ranks if seconds > 0]
        if parts:
            metrics = {"train/exposed_communication": sum(parts) / len(parts)}
            for logger in trainer.loggers:  # logs even between logging steps; loggers write on rank 0
                logger.log_metrics(metrics, step=trainer.global_step - 1)


def summary(first: int, last: int, ranks: list[list[float]], costs: tuple[Cost, ...]) -> str:
    """Returns the page: for each rank a row (seconds, compute, communication, exposed, idle), then the costs.

    A row is NaN without a GPU.
    """
    steps = last - first + 1
    lines = [f"# Steps {first} to {last}", ""]
    if any(math.isfinite(row[0]) for row in ranks):
        lines += [
            "Milliseconds a step. Exposed is communication during which no other kernel ran; idle, nothing ran.",
            "",
            "| rank | step | compute | communication | exposed | idle |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for rank, row in enumerate(ranks):
            cells = [f"{1e3 * value / steps:.2f}" for value in row]
            cells[3] += f" ({row[3] / row[0]:.1%})"
            lines.append(f"| {rank} | {' | '.join(cells)} |")
    else:
        lines.append("No GPU in the trace: operators of the CPU, without those that they call.")
    total = sum(cost.seconds for cost in costs) or 1.0
    lines += ["", "| rank 0 | ms a step | calls a step | part |", "| --- | --- | --- | --- |"]
    for cost in costs[:ROWS]:
        name = cost.name if len(cost.name) <= LONGEST_NAME else cost.name[: LONGEST_NAME - 3] + "..."
        figures = f"{1e3 * cost.seconds / steps:.3f} | {cost.calls / steps:.1f} | {cost.seconds / total:.1%}"
        lines.append(f"| `{name.replace('|', '/')}` | {figures} |")
    return "\n".join(lines) + "\n"


def _warm_up_then_record(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD if step else ProfilerAction.WARMUP


def _figures(seen: Timeline) -> list[float]:
    return [seen.seconds, seen.compute, seen.communication, seen.exposed, seen.idle]


def _operators(profiler: profile) -> tuple[Cost, ...]:
    averages: Any = profiler.key_averages()
    return costliest({event.key: (event.self_cpu_time_total / 1e6, event.count) for event in averages})
