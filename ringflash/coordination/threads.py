"""Helper threads of the library, which end before the interpreter does.

Python ends a daemon thread that returns from C++ while the interpreter shuts down. The process then aborts after a
successful run, with "terminate called without an active exception". The end of the program therefore waits up to
`PATIENCE` seconds for these threads. The abort remains possible only if C++ holds a thread for longer, for example
after a ring has broken.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable

PATIENCE = 1.0  # seconds that the end of the program waits for all threads together

_helpers: dict[threading.Thread, Callable[[], None]] = {}  # the function that wakes each thread
_ending_since: float | None = None


def start(run: Callable[[], None], name: str, wake: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that calls `run`.

    Args:
        run: the function; it returns soon after `wake` is called or `is_ending` becomes true.
        name: name of the thread.
        wake: called when the program ends, in case `run` waits for something else.
    """

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
    """Returns whether the program has waited for at least `grace` seconds for its threads to end."""
    return time.monotonic() >= (math.inf if _ending_since is None else _ending_since + grace)


def end() -> None:
    """Ends all threads. Threads that other exit handlers start later are not waited for."""
    global _ending_since
    _ending_since = time.monotonic()
    helpers = list(_helpers.items())
    for _, wake in helpers:
        wake()
    for thread, _ in helpers:
        thread.join(max(0.0, _ending_since + PATIENCE - time.monotonic()))
    _ending_since = None


atexit.register(end)
