"""Keys of Triton's on-disk cache that do not depend on the order in which a process first uses its kernels.

The key of a kernel contains the global constants of the functions it calls. Triton reads the constants of a function
before it has visited that function (`DependenciesFinder._update_hash`, in 3.6 to 3.9). Constants are thereby missing if
no other kernel has visited the function before. So a process that compiles the backward first stores it under another
key than a run that computes a forward first, and the run compiles it again.

`settle` visits the functions that a kernel calls before the kernel itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

_settled: set[int] = set()


def settle(kernel: Any) -> None:
    """Makes Triton derive the key of `kernel`, a `triton.jit` or `gluon.jit` function, after those of its callees.

    In Triton's interpreter, which compiles nothing, it does nothing.
    """
    if id(kernel) in _settled or not _has_key(kernel):
        return
    _settled.add(id(kernel))  # before its callees, which may call it
    for callee in _callees(kernel):
        settle(callee)
    _ = kernel.cache_key  # the property derives the key and keeps it


def _callees(kernel: Any) -> Iterator[Any]:
    """Yields the functions that `kernel` names, in the order in which its code first names them."""
    for name in kernel.fn.__code__.co_names:
        named = kernel.fn.__globals__.get(name)
        yield from (each for each in (named, *getattr(named, "hash_attrs", ())) if _has_key(each))


def _has_key(value: Any) -> bool:
    return isinstance(value, triton.JITFunction)
