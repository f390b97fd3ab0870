"""A thread that sees to it that messages between GPUs come in time.

On a GPU the process does not wait for messages: the stream does, and a program that waits for the stream would wait for
ever for a peer that is gone. The thread looks at what is under way a few times a second, costs nothing while messages
come, and ends the ring when one is late, a peer has left word, or its process is gone.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ringflash.coordination import threads
from ringflash.coordination.cuda_driver import Driver
from ringflash.coordination.failures import INTERVAL, PATIENCE, Faults, Verdict
from ringflash.errors import RingflashError


@dataclass(frozen=True)
class _Pending:
    """Messages under way, and how to tell when they are done."""

    done: Callable[[], bool]
    hop: int
    peers: list[int]


class Watch:
    """Watches the messages of one ring, in the order in which they were started."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._pending: deque[_Pending] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        faults.on_close(self._wake.set)

    def add(self, done: Callable[[], bool], hop: int, peers: Sequence[int]) -> None:
        """Takes note of messages; of those in a CUDA graph nothing can be asked, they run when it is replayed."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._pending.append(_Pending(done, hop, list(peers)))
        if not self._wake.is_set():  # which is sooner asked than set
            self._wake.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threads.start(self._run, "ringflash-watch", self._wake.set)

    def under_way(self) -> list[Callable[[], bool]]:
        """How to tell of each of the messages that are watched whether they are done."""
        return [pending.done for pending in self._pending]

    def _run(self) -> None:
        if torch.cuda.is_initialized():
            Driver().allow_queries()
        since = asked = time.monotonic()  # when the first of those pending could have come; when others' word was asked
        unasked: _Pending | None = None  # done since then
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
                # Who has given up lets messages go that have nothing in them.
                if self._faults.was_reported():
                    self._end("closed", unasked)
                asked, unasked = time.monotonic(), None
        self._pending.clear()

    def _look(self, pending: _Pending, waited: float) -> None:
        """Ends the ring if a message that has been awaited for `waited` seconds is not to be expected any more."""
        verdict = self._faults.judge(waited, pending.peers)
        if verdict is not None:
            self._end(verdict, pending)

    def _end(self, verdict: Verdict, pending: _Pending) -> None:
        error = self._faults.broken(verdict, pending.hop, pending.peers)
        self._faults.raise_async(partial(_raise_in_main_thread, error), _cancel)
        self._faults.release()


def _raise_in_main_thread(error: RingflashError) -> None:
    """Raises `error` in the main thread as soon as it is back in Python.

    It may be waiting for the GPU in a call that knows nothing of the ring. Released from there it would go on with
    what a broken ring has computed.
    """

    class Broken(type(error)):
        """The error, made anew without arguments, as Python wants it here."""

        def __init__(self) -> None:
            self.__dict__.update(error.__dict__)
            Exception.__init__(self, str(error))

    Broken.__name__ = Broken.__qualname__ = type(error).__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(_main_thread(), ctypes.py_object(Broken))


def _cancel() -> None:
    """Takes back what the main thread has not yet raised."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(_main_thread(), None)


def _main_thread() -> ctypes.c_ulong:
    main = threading.main_thread().ident
    assert main is not None
    return ctypes.c_ulong(main)
