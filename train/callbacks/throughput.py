"""Callback that measures tokens/s, model FLOP/s utilisation and peak memory."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ringflash.errors import ConfigError
from ringflash.train.callbacks.observe import gathered, is_logging_step
from ringflash.train.lightning.batch import positions_of
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.flops import layer_windows, peak_flops, training_flops, visible_pairs

GIB = 2.0**30


class Throughput(Callback):
    """Logs train/tokens_per_second of all ranks, .../per_rank, train/mfu and the largest rank's train/peak_memory_gib.

    A rate covers the optimizer steps since the last logging step or the end of an epoch, including data loading and
    checkpoints, but not validation. It counts all tokens that pass through the model, with a label or without. MFU
    counts matrix products and the pairs visible under attention's mask (see `training_flops`). It is logged if the
    device's peak and the module's `model_config` are known. Between these steps the host does not wait for the device.

    Args:
        warmup_steps: first optimizer steps of this run that the averages exclude, because kernels are compiled in them.
    """

    def __init__(self, warmup_steps: int = 5) -> None:
        if warmup_steps < 0:
            raise ConfigError("warmup_steps", expected="at least 0", got=warmup_steps, remedy="Try 5.")
        self.warmup_steps = warmup_steps
        self.world_size, self.peak = 1, None
        self._config: ModelConfig | None = None
        self._adapters: int | None = None  # their parameters, if they alone train
        self._windows: list[int | None] = []
        self._steps, self._last_step = 0, 0
        self._mark = 0.0
        self._measured = _Work()
        self._start_window()

    @property
    def tokens_per_second(self) -> float:
        """Average over the measured steps, for all ranks; 0 before the first measured step."""
        return self._measured.rate(self._measured.tokens)

    @property
    def mfu(self) -> float | None:
        """Average fraction of the GPUs' peak that the model's FLOPs reach; None when the peak is unknown."""
        return self._mfu(self._measured)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks up the device and the model."""
        self.world_size = trainer.world_size
        config = getattr(pl_module, "model_config", None)
        self._config = config if isinstance(config, ModelConfig) else None  # the FLOPs of other models are unknown
        self._windows = layer_windows(self._config) if self._config is not None else []
        self._adapters = getattr(pl_module, "trained_size", None) if self._config is not None else None
        self.peak = None
        if pl_module.device.type == "cuda" and getattr(pl_module, "compute_dtype", None) in ("auto", "bfloat16"):
            self.peak = peak_flops(torch.cuda.get_device_name(pl_module.device), torch.bfloat16)
        self._steps, self._last_step = 0, trainer.global_step
        self._measured = _Work()
        self._start_window()
        self._mark = _now(pl_module.device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._seconds += _now(pl_module.device) - self._mark

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock again."""
        self._mark = _now(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch, and logs at the Trainer's logging steps."""
        self._count(batch)
        if trainer.global_step == self._last_step:  # in the middle of an accumulation window
            return
        self._last_step = trainer.global_step
        self._steps += 1
        if self._steps <= self.warmup_steps:
            self._start_window()
            self._mark = _now(pl_module.device)
        elif is_logging_step(trainer) or trainer.is_last_batch:
            work, peak_memory = self._close_window(trainer, pl_module.device)
            metrics = {
                "train/tokens_per_second": work.rate(work.tokens),
                "train/tokens_per_second/per_rank": work.rate(work.tokens) / self.world_size,
                "train/peak_memory_gib": peak_memory / GIB,
            }
            if (mfu := self._mfu(work)) is not None:
                metrics["train/mfu"] = mfu
            # All ranks hold the same values, so log_dict need not reduce. It stores float32, which is enough.
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, sync_dist=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the steps after the last logging step to the averages."""
        if self._tokens:
            self._close_window(trainer, pl_module.device)

    def _start_window(self) -> None:
        self._seconds, self._tokens = 0.0, 0
        self._pairs: Tensor | int = 0

    def _count(self, batch: Any) -> None:
        labels = batch["labels"]
        self._tokens += labels.numel()
        if self._windows:
            position_ids = positions_of(batch)
            rows = labels.shape[0] if position_ids.ndim == 1 else 1
            self._pairs = self._pairs + rows * visible_pairs(position_ids, self._windows)

    def _close_window(self, trainer: pl.Trainer, device: torch.device) -> tuple[_Work, float]:
        """Returns all ranks' work since the window began and the largest rank's bytes; begins the next window."""
        now = _now(device)
        pairs = torch.as_tensor(self._pairs, dtype=torch.float64, device=device)
        mine = [self._tokens, _peak_memory(device), self._seconds + now - self._mark]
        ranks = gathered(trainer, torch.stack([pairs, *map(pairs.new_tensor, mine)])).cpu()
        all_pairs, tokens = ranks[:, :2].sum(0).tolist()
        # The clocks of ranks differ a little. All of them log the rate by that of the slowest.
        peak_memory, seconds = ranks[:, 2:].amax(0).tolist()
        flops = 0.0 if self._config is None else training_flops(self._config, tokens, all_pairs, self._adapters)
        work = _Work(tokens, flops, seconds)
        self._measured += work
        self._start_window()
        self._mark = now
        return work, peak_memory

    def _mfu(self, work: _Work) -> float | None:
        if self.peak is None or self._config is None:
            return None
        return work.rate(work.flops) / (self.peak * self.world_size)


@dataclass(frozen=True)
class _Work:
    """Tokens and FLOPs of all ranks, and the seconds that they took."""

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.tokens + other.tokens, self.flops + other.flops, self.seconds + other.seconds)

    def rate(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0


def _now(device: torch.device) -> float:
    """Returns the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak_memory(device: torch.device) -> int:
    """Returns peak bytes: of the allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
