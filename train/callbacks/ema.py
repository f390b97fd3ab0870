"""Exponential moving average of sharded weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringflash.errors import ArgumentError, CheckpointError, ConfigError
from ringflash.train.checkpoint.load import FOLDER, read_tensors
from ringflash.train.checkpoint.save import SHARDED
from ringflash.train.lightning.strategy import reshard
from ringflash.train.torchao_private import plain

PREFIX = "ema"
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile and activation checkpointing add these


class ExponentialMovingAverage(Callback):
    """Averages the weights, shadow = decay * shadow + (1 - decay) * weight after each optimizer step.

    Each rank averages its own shards, in float32 or better, which takes the memory of the sharded weights once more.
    Validation and test use the averages. Checkpoints hold the weights and the averages, and a resumed run restores
    both. Only parameters that need gradients are averaged. Commands that read checkpoints, such as `ringflash export`,
    take the weights; `averaged` gives a script the averages.

    Args:
        decay: fraction of the average that remains after a step.

    Raises:
        ConfigError: `decay` is not from 0 to below 1.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ConfigError("decay", expected="from 0 to below 1", got=decay, remedy="Try 0.999.")
        self.decay = decay
        self._shadows: dict[str, Tensor] = {}
        self._backups: dict[str, Tensor] = {}
        self._step = self._swaps = 0
        self._averaged: weakref.ref[pl.LightningModule] | None = None  # the module of the averages

    @property
    def averages(self) -> dict[str, Tensor]:
        """Averages by parameter name, sharded like the parameters; empty before training."""
        return self._shadows

    @contextmanager
    def averaged(self, pl_module: pl.LightningModule) -> Iterator[None]:
        """Runs the body with the averages as weights, for instance to evaluate or export them.

        A checkpoint that the Trainer saves in the body still holds the weights as the model's, beside the averages.

        Raises:
            ArgumentError: the averages are those of another module.
        """
        if self._averaged is not None and self._averaged() is not pl_module:
            expected, remedy = "the module whose weights were averaged", "Pass the module that was trained."
            raise ArgumentError("pl_module", expected=expected, got=type(pl_module).__name__, remedy=remedy)
        self._swap_in(pl_module)
        try:
            yield
        finally:
            self._swap_out(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts from the weights, unless a checkpoint held averages or an earlier fit averaged the same module."""
        self._step = trainer.global_step
        if self._averaged is None or self._averaged() is not pl_module:
            self._start(pl_module)
        for name, parameter in _trained(pl_module):  # a checkpoint may be loaded before the module moves to its device
            self._shadows[name] = self._shadows[name].to(parameter.device)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Updates the averages after an optimizer step."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        reshard(pl_module)
        for name, parameter in _trained(pl_module):
            shadow = _local(self._shadows[name])
            shadow.lerp_(_local(parameter).to(shadow.dtype), 1 - self.decay)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replaces the weights with the averages."""
        self._swap_in(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restores the weights."""
        self._swap_out(pl_module)

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restores the weights."""
        self._swaps = 0
        self._swap_out(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Returns a state that marks the checkpoint as holding averages."""
        return {"decay": self.decay}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the averages. If they currently replace the weights, saves the original weights as the model's.

        Raises:
            CheckpointError: the checkpoint lacks a weight that is averaged.
        """
        if not self._shadows:
            return
        checkpoint.setdefault(SHARDED, {})[PREFIX] = dict(self._shadows)
        if missing := sorted(self._backups.keys() - checkpoint["state_dict"].keys()):
            remedy = "Save when validation has ended."
            raise CheckpointError("state_dict", expected="all averaged weights", got=f"no {missing[0]}", remedy=remedy)
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **self._backups}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores the averages; if the checkpoint has none, they start from its weights.

        Raises:
            CheckpointError: the averages belong to another model.
        """
        self._start(pl_module)
        if self.state_key not in checkpoint.get("callbacks", {}):
            return
        if FOLDER in checkpoint:
            read_tensors(PREFIX, self._shadows, Path(checkpoint[FOLDER]))
        else:
            for name, saved in checkpoint.get(SHARDED, {}).get(PREFIX, {}).items():
                self._shadows[name].copy_(saved)

    def _start(self, pl_module: pl.LightningModule) -> None:
        self._shadows, self._averaged = _copies(pl_module), weakref.ref(pl_module)

    @torch.no_grad()
    def _swap_in(self, pl_module: pl.LightningModule) -> None:
        """Replaces the weights with the averages, unless that was done; each call is followed by a `_swap_out`.

        Another module than the one that was trained keeps its weights.
        """
        self._swaps += 1
        if not self._shadows or self._backups or self._averaged is None or self._averaged() is not pl_module:
            return
        reshard(pl_module)
        for name, parameter in _trained(pl_module):
            self._backups[name] = plain(parameter).clone()
            _local(parameter).copy_(_local(self._shadows[name]))

    @torch.no_grad()
    def _swap_out(self, pl_module: pl.LightningModule) -> None:
        """Restores the weights at the end of the outermost swap."""
        self._swaps = max(self._swaps - 1, 0)
        if not self._backups or self._swaps:
            return
        reshard(pl_module)
        for name, parameter in _trained(pl_module):
            _local(parameter).copy_(_local(self._backups[name]))
        self._backups = {}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            yield name, parameter


@torch.no_grad()
def _copies(model: nn.Module) -> dict[str, Tensor]:
    reshard(model)
    return {
        name: plain(parameter).clone().to(torch.promote_types(parameter.dtype, torch.float32))
        for name, parameter in _trained(model)
    }


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
