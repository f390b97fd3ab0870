"""A thread that ends the ring when messages between GPUs do not arrive in time.

On a GPU the stream waits for messages, not the process. A program that waits for the stream would wait for ever if a
peer is gone. The thread checks pending messages a few times a second, and costs nothing while messages arrive. It ends
the ring when a message is late, a peer has reported a failure, or the process of a peer has ended.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from ringflash.coordination import threads
from ringflash.coordination.cuda_driver import Driver
from ringflash.coordination.failures import INTERVAL, PATIENCE, Faults, Verdict
from ringflash.errors import RingflashError


@dataclass(frozen=True)
class _Pending:
    """Pending messages; `done` returns whether they have completed."""

    done: Callable[[], bool]
    hop: int
    peers: list[int]


class Watch:
    """Watches the messages of one ring in the order of their start."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._pending: deque[_Pending] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        faults.on_close(self._wake.set)

    def add(self, done: Callable[[], bool], hop: int, peers: Sequence[int]) -> None:
        """Adds messages to watch, unless a CUDA graph is being captured.

        Captured messages cannot be queried, because they run only when the graph is replayed.

        Args:
            done: returns whether the messages have completed.
            hop: hop of the messages, for errors.
            peers: ranks at the other ends; empty if they are all ranks.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._pending.append(_Pending(done, hop, list(peers)))
        if not self._wake.is_set():  # a query is faster than `set`
            self._wake.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threads.start(self._run, "ringflash-watch", self._wake.set)

    def under_way(self) -> list[Callable[[], bool]]:
        """Returns, for each pending entry, a function that returns whether its messages have completed."""
        return [pending.done for pending in self._pending]

    def _run(self) -> None:
        if torch.cuda.is_initialized():
            Driver().allow_queries()
        # `since`: when the wait for the first pending entry began; `asked`: when reports were last looked up.
        since = asked = time.monotonic()
        unasked: _Pending | None = None  # the last entry that completed since that look-up
        while self._faults.error is None and not self._faults.closed and not threads.is_ending():
            if not self._pending:
                self._wake.wait(None if unasked is None else PATIENCE)
                self._wake.clear()
                since = time.monotonic()
            while self._pending and self._pending[0].done():
                unasked = self._pending.popleft()
                since = time.monotonic()
            if self._pending:
                self._look(self._pending[0], time.monotonic() - since)
                time.sleep(INTERVAL)
            if unasked is not None and time.monotonic() - asked >= PATIENCE:
                # A rank that has given up completes messages without their data, so completion alone proves nothing.
                if self._faults.was_reported():
                    self._end("closed", unasked)
                asked, unasked = time.monotonic(), None
        self._pending.clear()

    def _look(self, pending: _Pending, waited: float) -> None:
        """Ends the ring if `pending` is not expected to complete any more after `waited` seconds."""
        verdict = self._faults.judge(waited, pending.peers)
        if verdict is not None:
            self._end(verdict, pending)

    def _end(self, verdict: Verdict, pending: _Pending) -> None:
        error = self._faults.broken(verdict, pending.hop, pending.peers)
        self._faults.raise_async(partial(_raise_in_main_thread, error), _cancel)
        self._faults.release()


def _raise_in_main_thread(error: RingflashError) -> None:
    """Raises `error` in the main thread as soon as that thread runs Python code again.

    The main thread may be waiting for the GPU in a call that does not involve the ring. Without the error, it would
    continue with the results of a broken ring once the GPU is released.
    """

    class Broken(type(error)):
        """Copy of the error that needs no arguments: `PyThreadState_SetAsyncExc` takes a class, not an object."""

        def __init__(self) -> None:
            self.__dict__.update(error.__dict__)
            Exception.__init__(self, str(error))

    Broken.__name__ = Broken.__qualname__ = type(error).__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(_main_thread(), ctypes.py_object(Broken))


class _CancelledError(BaseException):
    """Takes the place of an error that the main thread has not raised yet."""


def _cancel() -> None:
    """Cancels an error that the main thread has not raised yet.

    If no error replaces it, Python 3.11 goes on looking for one, and hangs under a profiler. So the main thread raises
    another error, and catches it.
    """
    if threading.current_thread() is not threading.main_thread():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(_main_thread(), None)
        return
    with suppress(_CancelledError):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(_main_thread(), ctypes.py_object(_CancelledError))
        for _ in range(10**6):  # the error comes at the end of a pass
            pass


def _main_thread() -> ctypes.c_ulong:
    main = threading.main_thread().ident
    assert main is not None
    return ctypes.c_ulong(main)
