"""Configuration of a training run without the run: its module, its data, its strategy and the number of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringflash.errors import ConfigError
from ringflash.train.commands.finetune import DpoCLI, FinetuneCLI
from ringflash.train.commands.train import STRATEGY, NoLanguageModel, RingCLI, quieten
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.config import ModelConfig

OF_DPO = ("model.beta", "model.label_smoothing")  # options of DpoModel alone


def configured(arguments: Sequence[str]) -> Configured:
    """Returns the run that `ringflash train fit`, `finetune fit` or `dpo fit` would start with `arguments`.

    Raises:
        ConfigError: as these commands, or the number of GPUs is unknown.
    """
    try:
        return Configured(arguments)
    except NoLanguageModel:
        pass
    try:
        return ConfiguredFinetuning(arguments)
    except ConfigError as error:
        if error.argument not in OF_DPO:
            raise
        return ConfiguredDpo(arguments)


class Configured(RingCLI):
    """Builds the module and the data of `ringflash train fit`, but no Trainer, which would need all GPUs.

    Args:
        arguments: as `ringflash train fit` takes them.

    Raises:
        ConfigError: as `ringflash train`, or the number of GPUs is unknown.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        quieten()
        super().__init__(["fit", *arguments], [])
        settings: Any = self.trainer
        self.accelerator, self.deterministic = settings.accelerator, bool(settings.deterministic)
        self.strategy = RingAttentionStrategy() if settings.strategy == STRATEGY else settings.strategy
        self.ranks_of_a_host = self._ranks_of_a_host(settings.devices)
        self.ranks = self.ranks_of_a_host * settings.num_nodes

    @property
    def shape(self) -> ModelConfig:
        """The decoder that has the model's shape. Raises ConfigError if there is none."""
        module: Any = self.model
        if module.estimated_config is None:
            raise ConfigError(
                "model",
                expected="the shape of Llama, Mistral, Qwen 2 or Qwen 3",
                got=f"another one, of {module.init_from}",
                remedy="Begin the run without this command: it does not need it.",
            )
        return module.estimated_config

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Returns the Trainer's configuration."""
        return self.configured("trainer")

    def after_instantiate_classes(self) -> None:
        """Does nothing: there is no Trainer to check."""

    def run_subcommand(self, subcommand: str) -> None:
        """Does nothing."""

    def _ranks_of_a_host(self, devices: Any) -> int:
        if isinstance(devices, list):
            return len(devices)
        if devices not in ("auto", -1, "-1"):
            return int(devices)
        if not (found := torch.cuda.device_count()):
            remedy = "Pass --trainer.devices=N: this machine has no GPU to count."
            raise ConfigError("trainer.devices", expected="a number of GPUs", got=devices, remedy=remedy)
        return found


class ConfiguredFinetuning(Configured, FinetuneCLI):
    """Builds the module and the data of `ringflash finetune fit` in the same way."""


class ConfiguredDpo(Configured, DpoCLI):
    """Builds the module and the data of `ringflash dpo fit` in the same way."""
