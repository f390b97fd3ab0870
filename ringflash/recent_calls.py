"""The recent calls of attention by key, so that a call that was made before is not checked and planned again."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MOST = 256  # calls that are kept


class CacheInfo(NamedTuple):
    """Use of prepared calls.

    Args:
        hits: calls that were prepared already.
        misses: calls that were prepared by this call.
        size: prepared calls that are kept, at most `MOST`.
    """

    hits: int
    misses: int
    size: int


class RecentCalls(Generic[T]):
    """The `MOST` recent calls by key; the oldest is dropped first."""

    def __init__(self) -> None:
        self._values: dict[Hashable, T] = {}
        self._hits = self._misses = 0
        self._lock = Lock()

    def get(self, key: Hashable) -> T | None:
        """Returns the call of `key`, if it is kept."""
        value = self._values.get(key)
        if value is not None:
            self._hits += 1
        return value

    def put(self, key: Hashable, value: T) -> T:
        """Keeps `value`, and returns it."""
        with self._lock:
            self._misses += 1
            while len(self._values) >= MOST:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return value

    def __reduce__(self) -> tuple[type[RecentCalls[T]], tuple[()]]:
        """Makes an unpickled copy empty: an unpickled context prepares its own calls."""
        return RecentCalls, ()

    def info(self) -> CacheInfo:
        """Returns the use of these calls."""
        return CacheInfo(self._hits, self._misses, len(self._values))
