"""Ring messages between virtual ranks of one process, which run every schedule without a distributed start-up.

All virtual ranks run in lockstep in one thread. Each rank is a generator that yields before it finishes messages. Once
all ranks have yielded, the network delivers the messages that they started, and the ranks continue.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ringflash.transport.base import Message, Slot

T = TypeVar("T")


class LocalNetwork:
    """Network between virtual ranks."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self._awaited: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)

    def transport(self, rank: int, members: Sequence[int] | None = None) -> LocalTransport:
        """Returns the transport of `rank`; peers are indices into `members`, which is all ranks by default."""
        return LocalTransport(self, rank, members)

    def post(self, rank: int, members: Sequence[int] | None, messages: Sequence[Message]) -> None:
        """Records messages of `rank`, whose peers are indices into `members`, if given; nothing is copied yet."""
        for message in messages:
            peer = message.peer if members is None else members[message.peer]
            memory, start, numel = message.span
            vector = memory[start : start + numel]
            if message.sends:
                self._sent[rank, peer, message.channel].append(vector)
            else:
                self._awaited[peer, rank, message.channel].append(vector)

    def deliver(self) -> None:
        """Copies every message that both ends have posted."""
        for route, awaited in self._awaited.items():
            sent = self._sent[route]
            while awaited and sent:
                awaited.popleft().copy_(sent.popleft())

    def check_drained(self) -> None:
        """Asserts that no message is left with one end only when all ranks are done."""
        ends = (("nobody receives", self._sent), ("nobody sends", self._awaited))
        left = [
            f"{source} -> {target}: {what}" for what, table in ends for (source, target, _), q in table.items() if q
        ]
        assert not left, f"plans do not match: {left}"


class LocalTransport:
    """One virtual rank's end of a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, rank: int, members: Sequence[int] | None = None) -> None:
        self._network, self._rank, self._members = network, rank, members

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Slot:
        """Returns new memory; virtual ranks share a device, so it needs no special memory."""
        return Slot(like.new_empty(numel, dtype=dtype), {})

    def start(self, messages: Sequence[Message]) -> None:
        """Posts all messages."""
        self._network.post(self._rank, self._members, messages)

    def finish(self, handle: None) -> None:
        """Does nothing: the network delivered the messages while all ranks had yielded."""


def run_alone(rank: Generator[None, None, T]) -> T:
    """Runs one rank to its end, and returns its result; its transport does the waiting."""
    while True:
        try:
            next(rank)
        except StopIteration as stop:
            return stop.value


def run_lockstep(ranks: Sequence[Generator[None, None, T]], network: LocalNetwork) -> list[T]:
    """Runs all virtual ranks, from yield to yield, and returns their results in rank order.

    Their plans have the same number of steps, so they all end in the same round.
    """
    results: list[T] = []
    while not results:
        for rank in ranks:
            try:
                next(rank)
            except StopIteration as stop:
                results.append(stop.value)
        network.deliver()
    assert len(results) == len(ranks), "virtual ranks of one ring took different numbers of steps"
    network.check_drained()
    return results
