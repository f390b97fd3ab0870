"""The thread that watches messages of GPUs, with fake messages: its conclusions, and the errors that it raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from ringflash.coordination.failures import Faults
from ringflash.coordination.watch import Watch
from ringflash.errors import PeerLost, RingflashError, RingTimeout


class OfThreeRanks(Faults):
    """Faults of rank 0 in a world of three ranks, with fake reports and ends of the other ranks."""

    def __init__(self, deadline: float) -> None:
        super().__init__(cast("Any", None), 0, 3, deadline)
        self.others_gave_up, self.released = False, False
        self.on_release(lambda: setattr(self, "released", True))

    def ended(self) -> list[int]:
        return []

    def was_reported(self) -> bool:
        return self.others_gave_up

    def broken(self, kind: Any, hop: int | None, peers: Any = ()) -> RingflashError:
        self.error = (
            PeerLost(list(peers), hop, [], rank=0) if kind == "closed" else RingTimeout([1], hop, 1, [], rank=0)
        )
        return self.error


def _raised(action: Callable[[], None], seconds: float) -> RingflashError | None:
    """Returns the error that is raised in the main thread within `seconds`, or None."""
    try:
        action()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
    except RingflashError as error:
        return error
    return None


def test_messages_that_come_are_no_fault() -> None:
    faults = OfThreeRanks(deadline=1.5)
    watch, start = Watch(faults), time.monotonic()
    for hop in range(4):  # each message takes less than the deadline, all together take more
        watch.add(lambda hop=hop: time.monotonic() > start + 0.6 * hop, hop, [1])
    assert _raised(lambda: None, 2.5) is None
    assert not faults.released


def test_a_message_that_does_not_come() -> None:
    faults = OfThreeRanks(deadline=0.3)
    error = _raised(lambda: Watch(faults).add(lambda: False, 2, [1]), 5)
    assert isinstance(error, RingTimeout)
    assert error.hop == 2
    assert faults.released


@pytest.mark.parametrize("seconds", [0.0, 0.7])
@pytest.mark.parametrize("comes", [False, True])
def test_ranks_that_gave_up(comes: bool, seconds: float) -> None:
    """Checks that completed messages fail too: a rank that gave up has released waiting messages without their data."""
    faults = OfThreeRanks(deadline=60)
    watch = Watch(faults)
    watch.add(lambda: True, 0, [1])
    time.sleep(seconds)
    faults.others_gave_up = True
    error = _raised(lambda: watch.add(lambda: comes, 1, [2]), 5)
    assert isinstance(error, PeerLost)
    assert error.hop == 1 or seconds == 0
