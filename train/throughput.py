"""Callback that measures tokens/s, model FLOP/s utilisation and peak memory."""

from __future__ import annotations

import resource
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from ringflash.errors import ConfigError
from ringflash.train.flops import peak_flops, training_flops_per_token

GIB = 2.0**30


class Throughput(Callback):
    """Logs train/tokens_per_second of all ranks, .../per_rank, train/mfu and train/peak_memory_gib of rank 0.

    A rate is that of the optimizer steps since the last one logged, data loading and checkpoints included,
    validation not. MFU is logged where the device's peak is known.

    Args:
        warmup_steps: optimizer steps of this run that the averages leave out; kernels are compiled in them.
    """

    def __init__(self, warmup_steps: int = 5) -> None:
        if warmup_steps < 0:
            raise ConfigError("warmup_steps", expected="at least 0", got=warmup_steps, remedy="Try 5.")
        self.warmup_steps = warmup_steps
        self.world_size, self.flops_per_token, self.peak = 1, 0.0, None
        self._steps, self._last_step = 0, 0
        self._mark = 0.0
        self._window, self._measured = _Rate(), _Rate()
        self._valid: list[torch.Tensor] = []

    @property
    def tokens_per_second(self) -> float:
        """Average over the measured steps, all ranks; 0 before there is one."""
        return self._measured.value

    @property
    def mfu(self) -> float | None:
        """Average part of the GPUs' peak that the model's FLOPs come to; None when the peak is unknown."""
        return self._mfu(self.tokens_per_second)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks up the device and the model."""
        self.world_size = trainer.world_size
        config: Any = getattr(pl_module, "model_config", None)
        seqlen = getattr(trainer.datamodule, "context_length", None)  # pyright: ignore[reportAttributeAccessIssue]
        if config is not None and seqlen is not None:
            self.flops_per_token = training_flops_per_token(config, seqlen)
        self.peak = None
        if pl_module.device.type == "cuda" and getattr(pl_module, "compute_dtype", None) in ("auto", "bfloat16"):
            self.peak = peak_flops(torch.cuda.get_device_name(pl_module.device), torch.bfloat16)
        self._steps, self._last_step = 0, trainer.global_step
        self._window, self._measured, self._valid = _Rate(), _Rate(), []
        self._mark = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._window.seconds += time.perf_counter() - self._mark

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock again."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch, and logs at the Trainer's logging steps."""
        self._valid.append(_tokens(batch))
        if trainer.global_step == self._last_step:  # in the middle of an accumulation window
            return
        self._last_step = trainer.global_step
        self._steps += 1
        # A read of the device waits for it: the step has ended when the clock is read.
        self._window.tokens += int(torch.stack(self._valid).sum())
        self._valid = []
        now = time.perf_counter()
        self._window.seconds += now - self._mark
        self._mark = now
        if self._steps <= self.warmup_steps:
            self._window = _Rate()
            return
        interval: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if trainer.global_step % interval == 0 or trainer.is_last_batch:
            self._log(pl_module)
            self._close_window()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds what came after the last logged step to the averages."""
        self._close_window()

    def _close_window(self) -> None:
        self._measured.tokens += self._window.tokens
        self._measured.seconds += self._window.seconds
        self._window = _Rate()

    def _log(self, pl_module: pl.LightningModule) -> None:
        rate = self._window.value
        metrics = {"train/tokens_per_second": rate, "train/tokens_per_second/per_rank": rate / self.world_size}
        if (mfu := self._mfu(rate)) is not None:
            metrics["train/mfu"] = mfu
        metrics["train/peak_memory_gib"] = _peak_memory(pl_module.device) / GIB
        # log_dict would store float32, which is enough, and reduce over ranks, which share the clock already.
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, sync_dist=False)

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self.peak is None or not self.flops_per_token:
            return None
        return tokens_per_second * self.flops_per_token / (self.peak * self.world_size)


class _Rate:
    """Tokens of all ranks, and the seconds they took."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def _tokens(batch: Any) -> torch.Tensor:
    """Tokens with a label in the micro-batch of all ranks."""
    valid = batch.get("num_valid_tokens")
    return (batch["labels"] != -100).sum() if valid is None else valid


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
