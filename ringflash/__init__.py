"""ringflash: exact attention for sequences longer than one GPU can hold, and the trainer that uses it."""

from importlib import import_module

from ringflash import hf, train
from ringflash.attention import AttentionOptions, flash_attention, ring_attention
from ringflash.context import ContextParallel
from ringflash.decode import DecodeOptions, DecodeTiles, flash_decode
from ringflash.dropout import Dropout
from ringflash.masks import BlockSparse, Causal, Documents, KeyPadding, PrefixLM, SlidingWindow, Tree
from ringflash.state import AttentionState

__all__ = [
    "flash_attention",
    "ring_attention",
    "flash_decode",
    "AttentionOptions",
    "DecodeOptions",
    "DecodeTiles",
    "Dropout",
    "AttentionState",
    "Causal",
    "SlidingWindow",
    "Documents",
    "KeyPadding",
    "PrefixLM",
    "BlockSparse",
    "Tree",
    "ContextParallel",
    "hf",
]

__version__ = "0.1.0"


def _train_name(name: str) -> object:
    """Finds `ringflash.train.RingAttentionStrategy` and its like: a folder without __init__ has no names of its own."""
    modules = {
        "RingAttentionStrategy": "strategy",
        "ExponentialMovingAverage": "ema",
        "LastCheckpoint": "checkpointing",
        "ModelConfig": "model_config",
        "OptimizerConfig": "optimizer",
        "Throughput": "throughput",
        "LanguageModel": "module",
        "TransformersModel": "transformers_model",
        "TextDataModule": "data",
    }
    if name not in modules:
        raise AttributeError(f"module 'ringflash.train' has no attribute {name!r}")
    return getattr(import_module(f"ringflash.train.{modules[name]}"), name)


train.__getattr__ = _train_name  # pyright: ignore[reportAttributeAccessIssue] - Lightning is imported when asked for
