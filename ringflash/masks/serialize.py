"""Restores a mask from its `.spec`, a string and tensors, and describes masks as text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from ringflash.masks.base import Full, Mask
from ringflash.masks.intervals import Causal, Documents, KeyPadding, PrefixLM, SlidingWindow
from ringflash.masks.sparse import BlockSparse, Tree

_TABLES = {kind.word: kind for kind in (KeyPadding, PrefixLM)}


def mask_from_spec(words: str, tensors: Sequence[Tensor]) -> Mask:
    """Returns the mask with this `.spec`; masks pass the boundary of a custom op this way."""
    return _made(words, tensors) if tensors else _of_words(words)


@lru_cache(maxsize=256)
def _of_words(words: str) -> Mask:
    """Returns a mask without tensors; cached, because every call uses the same few."""
    return _made(words, ())


def _made(words: str, tensors: Sequence[Tensor]) -> Mask:
    remaining = iter(tensors)
    mask: Mask = Full()
    for part in filter(None, words.split(" & ")):
        name, *numbers = part.split()
        if name == "causal":
            mask &= Causal()
        elif name == "window":
            left, right = (None if limit == "None" else int(limit) for limit in numbers)
            mask &= SlidingWindow(left, right)
        elif name == "documents":
            mask &= Documents(next(remaining))
        elif name == "block_sparse":
            mask &= BlockSparse(next(remaining), int(numbers[0]))
        elif name == "tree":
            mask &= Tree(next(remaining), int(numbers[0]))
        else:
            mask &= _TABLES[name](next(remaining))
    return mask


def described(mask: Mask) -> str:
    """Returns a mask as text, which differs if any value of the mask differs."""
    words, tensors = mask.spec
    digest = zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    return f"{mask!r} (checksum {digest:08x})" if tensors else words or "full"
