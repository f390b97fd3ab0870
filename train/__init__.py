"""The trainer's public names. Each is imported when it is first used, because Lightning takes seconds to import."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringflash.train.checkpointing import LastCheckpoint
    from ringflash.train.data import TextDataModule
    from ringflash.train.ema import ExponentialMovingAverage
    from ringflash.train.model_config import ModelConfig
    from ringflash.train.module import LanguageModel
    from ringflash.train.optimizer import OptimizerConfig
    from ringflash.train.strategy import RingAttentionStrategy
    from ringflash.train.throughput import Throughput
    from ringflash.train.transformers_model import TransformersModel

__all__ = [
    "RingAttentionStrategy",
    "LanguageModel",
    "TransformersModel",
    "TextDataModule",
    "ModelConfig",
    "OptimizerConfig",
    "ExponentialMovingAverage",
    "LastCheckpoint",
    "Throughput",
]

_MODULES = {
    "RingAttentionStrategy": "strategy",
    "LanguageModel": "module",
    "TransformersModel": "transformers_model",
    "TextDataModule": "data",
    "ModelConfig": "model_config",
    "OptimizerConfig": "optimizer",
    "ExponentialMovingAverage": "ema",
    "LastCheckpoint": "checkpointing",
    "Throughput": "throughput",
}


def __getattr__(name: str) -> object:
    """Imports a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ringflash.train' has no attribute {name!r}")
    return getattr(import_module(f"ringflash.train.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return sorted({*globals(), *__all__})
