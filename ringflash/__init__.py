"""ringflash: exact attention for sequences longer than one GPU can hold, and the trainer that uses it."""

from ringflash.attention import AttentionOptions, flash_attention, ring_attention
from ringflash.context import ContextParallel
from ringflash.masks import Causal
from ringflash.state import AttentionState

__all__ = [
    "flash_attention",
    "ring_attention",
    "AttentionOptions",
    "AttentionState",
    "Causal",
    "ContextParallel",
]

__version__ = "0.1.0"
