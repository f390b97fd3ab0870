"""Masks as values: row i sees the keys of one interval [lo_i, hi_i), in global positions, less what a bitmap hides.

Causal, sliding window, packed documents, key padding and prefix-LM are intervals, and an intersection of intervals is
one too. Block-sparse masks and trees are bitmaps over few rows and columns, and so is an intersection of bitmaps. All
compose with `&`.
"""

from ringflash.masks.base import Full, Intersection, Mask, as_mask
from ringflash.masks.bitmap import Bitmap
from ringflash.masks.intervals import Causal, Documents, KeyPadding, PrefixLM, SlidingWindow
from ringflash.masks.serialize import mask_from_spec
from ringflash.masks.sparse import BlockSparse, Tree

__all__ = [
    "Mask",
    "Full",
    "Intersection",
    "Bitmap",
    "Causal",
    "SlidingWindow",
    "Documents",
    "KeyPadding",
    "PrefixLM",
    "BlockSparse",
    "Tree",
    "as_mask",
    "mask_from_spec",
]
