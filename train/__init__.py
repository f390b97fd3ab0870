"""The trainer's public names. Each is imported when it is first used, because Lightning takes seconds to import."""

from importlib import import_module
from typing import TYPE_CHECKING

from ringflash.extras import require

if TYPE_CHECKING:
    from ringflash.train.callbacks.checkpointing import LastCheckpoint
    from ringflash.train.callbacks.ema import ExponentialMovingAverage
    from ringflash.train.callbacks.throughput import Throughput
    from ringflash.train.data.module import TextDataModule
    from ringflash.train.lightning.language_model import LanguageModel
    from ringflash.train.lightning.optimizer import OptimizerConfig
    from ringflash.train.lightning.strategy import RingAttentionStrategy
    from ringflash.train.lightning.transformers_model import TransformersModel
    from ringflash.train.models.config import ModelConfig
    from ringflash.train.models.lora import Lora
    from ringflash.train.preference.data import PreferenceDataModule
    from ringflash.train.preference.module import DpoModel
    from ringflash.train.trainer.ring_trainer import RingTrainer
    from ringflash.train.trainer.rings import AcceleratorRing

__all__ = [
    "RingAttentionStrategy",
    "LanguageModel",
    "TransformersModel",
    "DpoModel",
    "RingTrainer",
    "AcceleratorRing",
    "TextDataModule",
    "PreferenceDataModule",
    "ModelConfig",
    "Lora",
    "OptimizerConfig",
    "ExponentialMovingAverage",
    "LastCheckpoint",
    "Throughput",
]

_MODULES = {
    "RingAttentionStrategy": "lightning.strategy",
    "LanguageModel": "lightning.language_model",
    "TransformersModel": "lightning.transformers_model",
    "DpoModel": "preference.module",
    "RingTrainer": "trainer.ring_trainer",
    "AcceleratorRing": "trainer.rings",
    "TextDataModule": "data.module",
    "PreferenceDataModule": "preference.data",
    "ModelConfig": "models.config",
    "Lora": "models.lora",
    "OptimizerConfig": "lightning.optimizer",
    "ExponentialMovingAverage": "callbacks.ema",
    "LastCheckpoint": "callbacks.checkpointing",
    "Throughput": "callbacks.throughput",
}


def __getattr__(name: str) -> object:
    """Imports a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ringflash.train' has no attribute {name!r}")
    module = _MODULES[name]
    require("trainer" if module.startswith("trainer.") else "train", f"ringflash.train.{name}")
    return getattr(import_module(f"ringflash.train.{module}"), name)


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return sorted({*globals(), *__all__})
