"""Masks as values: row i sees the keys in [lo_i, hi_i), in global positions, except for those that a bitmap hides.

Causal, sliding window, packed documents, key padding and prefix-LM are intervals, and an intersection of intervals is
an interval. Block-sparse masks and trees are bitmaps over few rows and columns, and an intersection of bitmaps is a
bitmap. All masks compose with `&`.
"""

from ringflash.masks.base import Full, Intersection, Mask, as_mask, find_packing
from ringflash.masks.bitmap import Bitmap
from ringflash.masks.intervals import Causal, Documents, KeyPadding, PrefixLM, SlidingWindow
from ringflash.masks.serialize import described, mask_from_spec, spec_of, validated
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
    "described",
    "find_packing",
    "mask_from_spec",
    "spec_of",
    "validated",
]
