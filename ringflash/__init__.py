"""ringflash: exact attention for sequences longer than one GPU can hold, and the trainer that uses it."""

from ringflash.checkout import check_folders

check_folders(__name__, __path__)  # before any other import, which could find another copy's files

from ringflash import train
from ringflash.context import ContextParallel
from ringflash.dropout import Dropout
from ringflash.integrations.transformers import attention as hf
from ringflash.masks import BlockSparse, Causal, Documents, Full, KeyPadding, PrefixLM, SlidingWindow, Tree
from ringflash.ops.attention import AttentionOptions, flash_attention, ring_attention
from ringflash.ops.decode import DecodeOptions, DecodeTiles, flash_decode
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
    "Full",
    "Causal",
    "SlidingWindow",
    "Documents",
    "KeyPadding",
    "PrefixLM",
    "BlockSparse",
    "Tree",
    "ContextParallel",
    "hf",
    "train",
]

__version__ = "0.1.0"
