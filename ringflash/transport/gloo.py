"""Transport of ring messages between CPUs, over gloo."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.coordination import threads
from ringflash.coordination.failures import Faults
from ringflash.transport.base import Message, Slot
from ringflash.transport.nccl import in_order, post

_NEVER_SENT = 1 << 20  # a tag that no message has


class _Waiter:
    """A thread that waits for gloo's messages.

    gloo cannot report whether a message is done, and a wait that times out closes the connections. When a connection
    closes, gloo does not fail messages that were half sent or received: a wait for these lasts until the deadline.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[dist.Work, timedelta, Future[None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def done(self, work: dist.Work, deadline: timedelta) -> Future[None]:
        """Returns a future that completes with `work`, or raises the error of `work`."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threads.start(self._run, "ringflash-gloo", lambda: self._jobs.put(None))
        future: Future[None] = Future()
        self._jobs.put((work, deadline, future))
        return future

    def stop(self) -> None:
        """Ends the thread after the waits that are already queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, deadline, future = job
            try:
                work.wait(deadline)
            except Exception as error:  # the caller that waits for the future raises it
                future.set_exception(error)
            else:
                future.set_result(None)
            del job, work, future  # these references would keep the group's connections open


class GlooTransport:
    """Messages over a gloo `group` that the ring owns. A wait blocks the process, until the deadline at most."""

    def __init__(self, group: dist.ProcessGroup, faults: Faults) -> None:
        self._group, self._faults, self._rank = group, faults, dist.get_rank(group)
        self._waiter = _Waiter()
        faults.on_close(self._close)

    def _close(self) -> None:
        self._waiter.stop()
        del self._group  # the last reference frees its descriptors and threads

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Slot:
        """Returns new memory."""
        return Slot(like.new_empty(numel, dtype=dtype), {})

    def start(self, messages: Sequence[Message]) -> list[tuple[Message, dist.Work]]:
        """Posts all messages."""
        works: list[dist.Work] = []
        messages = in_order(messages, self._rank)

        def attempt(_: float) -> bool:
            works.extend(post(messages, self._group))
            return True

        if messages:
            self._faults.wait(attempt, messages[0].hop, [message.peer for message in messages])
        return list(zip(messages, works, strict=True))

    def finish(self, handle: list[tuple[Message, dist.Work]]) -> None:
        """Waits for one message after another."""
        deadline = timedelta(seconds=self._faults.deadline)
        for message, work in handle:
            done = self._waiter.done(work, deadline)

            def attempt(seconds: float, done: Future[None] = done) -> bool:
                if not wait([done], seconds).done:
                    return False
                done.result()
                return True

            self._faults.wait(attempt, message.hop, [message.peer])


def close(group: dist.ProcessGroup) -> None:
    """Closes all connections of this rank in a gloo `group`: every wait on them, here and on peers, raises an error.

    gloo closes the connections when a wait for a message times out; its own `abort` leaves them open. A wait on a
    connection that a peer has closed ends at once, and leaves the other connections open. So this function waits 1 ms
    for a message of each peer, which no rank sends.
    """
    for peer in range(dist.get_world_size(group)):
        if peer != dist.get_rank(group):
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=peer, tag=_NEVER_SENT)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
