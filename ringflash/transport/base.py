"""What a ring asks of a transport: start some messages, do other work, finish them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

FAR = 16  # channels from here on are those of slow links, which a message may take many hops to cross


@dataclass(frozen=True)
class Message:
    """One tensor on its way: `buffer` goes to `peer` when `sends`, else it is filled from there.

    Both ends use the same `channel` and number of bytes. Until the message is finished a sent buffer must not be
    written, and a received one neither read nor written.
    """

    peer: int
    buffer: Tensor
    channel: int
    sends: bool


class Transport(Protocol):
    """Point-to-point messages between the ranks of one ring."""

    def start(self, messages: Sequence[Message]) -> Any:
        """Starts all messages and returns a handle at once; work already queued on the buffers comes first."""
        ...

    def finish(self, handle: Any) -> None:
        """Waits until the messages of `handle` are done, in the order of the device's queue where there is one."""
        ...
