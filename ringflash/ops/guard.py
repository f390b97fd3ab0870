"""Announces every error of a rank in a collective call to its peers, which would otherwise wait until the deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import TracebackType

import torch

from ringflash.context import ContextParallel
from ringflash.errors import ArgumentError, RingflashError
from ringflash.ring.plan import Plan


class Phase(Enum):
    """Progress of a rank in a call."""

    PREPARING = "its peers do not know of the call yet"
    AGREEING = "an error that follows from what all ranks have posted comes on all of them"
    RUNNING = "peers may wait for its messages"


class Guard:
    """Surrounds a call on the ranks of `context`, or a part of it; None is a single device, which has no peers.

    Peers raise PeerFailed within a second of an error here. An error in the arguments leaves the ring whole as long as
    no data has moved; any other breaks the ring. Guards may be nested: an error is announced once.
    """

    def __init__(self, context: ContextParallel | None) -> None:
        self._context = context
        self.phase = Phase.PREPARING

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._context is not None:
            announce(self._context, error, self.phase)


def announce(context: ContextParallel, error: BaseException, phase: Phase) -> None:
    """Announces `error` of this rank to the peers of `context`, unless they know of it or raise the same one."""
    known = isinstance(error, RingflashError) and not isinstance(error, ArgumentError)
    if context.faults is None or known or (context.graphs is not None and context.graphs.is_attempt):
        return
    # A recomputed forward may raise inside of a backward: both guards see the error, and peers read it only once.
    handled: set[str] = error.__dict__.setdefault("_ringflash_contexts", set())
    if context.name in handled:
        return
    handled.add(context.name)
    if phase is Phase.PREPARING and isinstance(error, Exception):
        context.announce_failure(error)
        return
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if isinstance(error, ArgumentError) and (phase is Phase.AGREEING or capturing):
        return  # in a capture no message moves yet: memory that cannot grow is refused on every rank
    context.faults.raised(error)


@contextmanager
def in_ring(context: ContextParallel, plan: Plan) -> Iterator[None]:
    """Surrounds a pass of `plan`, and raises at its end what the peers have concluded meanwhile.

    Raises:
        PeerFailed: another rank raised in it.
        PeerLost: another rank's process is gone.
        RingTimeout: another rank did not do its part in time.
        RankMismatch: in debug mode, when ranks follow different plans.
    """
    faults = context.begin_pass(plan)
    started = time.monotonic()
    try:
        yield
        if faults is not None:
            faults.look_back(started)
    except BaseException as error:  # here, before the buffers of messages under way are freed
        announce(context, error, Phase.RUNNING)
        raise
