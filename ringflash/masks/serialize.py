"""Restores a mask from its `.operands`, a string and tensors, and describes masks as text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from operator import is_
from weakref import WeakValueDictionary

from torch import Tensor

from ringflash.masks.base import Full, Mask, is_traced
from ringflash.masks.intervals import Causal, Documents, KeyPadding, PrefixLM, SlidingWindow
from ringflash.masks.sparse import BlockSparse, Tree

_TABLES = {kind.word: kind for kind in (KeyPadding, PrefixLM)}

# Masks with tensors that calls have used, by their words and the id of their first tensor, for as long as they live.
_in_use: WeakValueDictionary[tuple[str, int], Mask] = WeakValueDictionary()


def spec_of(mask: Mask) -> tuple[str, list[Tensor]]:
    """Returns `mask.operands`. While the mask lives, `mask_from_spec` finds it by the same tensor objects."""
    words, tensors = mask.operands
    if tensors and not is_traced():
        _in_use[words, id(tensors[0])] = mask
    return words, tensors


def mask_from_spec(words: str, tensors: Sequence[Tensor]) -> Mask:
    """Returns the mask with these `.operands`; masks pass the boundary of a custom op this way.

    The mask is the one that `spec_of` was called for, if it lives. It has its hash and its tables already. Tensors of
    masks are copies that nothing writes to.
    """
    if not tensors:
        return _of_words(words)
    mask = _in_use.get((words, id(tensors[0])))
    if mask is not None and all(map(is_, mask.operands[1], tensors)):
        return mask
    return _made(words, tensors)


@lru_cache(maxsize=256)
def validated(mask: Mask, seqlen_k: int) -> Mask:
    """Returns `mask` after `mask.validate(seqlen_k)`, which runs once for masks that are in use."""
    mask.validate(seqlen_k)
    return mask


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
        elif name == "unchecked_documents":
            mask &= Documents(next(remaining), device_check=False)
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
