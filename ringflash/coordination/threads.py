"""Threads beside the program's own, which end before the interpreter does.

A daemon thread that comes back from C++ while the interpreter is taken down is ended in the middle of it, and with it
the process: "terminate called without an active exception", an abort after a run that went well. Only a thread that C++
holds for longer than the program's end waits, as after a ring has broken, is still left to that.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable

PATIENCE = 1.0  # seconds that the end of the program waits for all of them

_helpers: dict[threading.Thread, Callable[[], None]] = {}  # and how to wake each
_ending_since: float | None = None


def start(run: Callable[[], None], name: str, wake: Callable[[], None]) -> threading.Thread:
    """Starts a thread that `run`s until `is_ending`; `wake` is called then, should it wait for something else."""

    def whole() -> None:
        _helpers[threading.current_thread()] = wake
        try:
            run()
        finally:
            del _helpers[threading.current_thread()]

    thread = threading.Thread(target=whole, name=name, daemon=True)
    thread.start()
    return thread


def is_ending(grace: float = 0.0) -> bool:
    """Whether the program has waited for its threads to end for `grace` seconds."""
    return time.monotonic() >= (math.inf if _ending_since is None else _ending_since + grace)


def end() -> None:
    """Has all threads come to their ends; those that start later, in what else runs then, are not awaited."""
    global _ending_since
    _ending_since = time.monotonic()
    helpers = list(_helpers.items())
    for _, wake in helpers:
        wake()
    for thread, _ in helpers:
        thread.join(max(0.0, _ending_since + PATIENCE - time.monotonic()))
    _ending_since = None


atexit.register(end)
