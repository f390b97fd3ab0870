"""What a ring asks of a transport: start some messages, do other work, finish them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

FAR = 16  # channels from here on are those of slow links, which a message may take many hops to cross


@dataclass(frozen=True)
class Message:
    """One tensor on its way: `buffer` goes to `peer` when `sends`, else it is filled from there.

    Both ends use the same `channel` and number of bytes. Until the message is finished a sent buffer must not be
    written, and a received one neither read nor written.

    Args:
        peer: the rank at the other end.
        buffer: a contiguous vector.
        channel: what kind of message it is; of each kind one is under way between two ranks.
        sends: which end this is.
        hop: when; errors name it.
        mirror: where this rank receives, its own counterpart of the buffer that `peer` sends: what `allocate` gave for
            the same slot, as long as the message.
    """

    peer: int
    buffer: Tensor
    channel: int
    sends: bool
    hop: int
    mirror: Tensor | None = None


class Transport(Protocol):
    """Point-to-point messages between the ranks of one ring."""

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A vector for messages to be sent from, on the device of `like`; its values are undefined.

        All ranks allocate in the same order and alike. A transport may give the same memory for the same `slot`
        (channel, number of the buffer) again, once the pass before is over.
        """
        ...

    def start(self, messages: Sequence[Message]) -> Any:
        """Starts all messages and returns a handle at once; work already queued on the buffers comes first."""
        ...

    def finish(self, handle: Any) -> None:
        """Waits until the messages of `handle` are done, in the order of the device's queue where there is one."""
        ...
