"""The interface of a transport: a ring starts messages, does other work, and finishes the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

FAR = 16  # channels from here on use slow links, on which a message may take many hops


@dataclass(frozen=True)
class Message:
    """One end of a message: `buffer` is sent to `peer` if `sends`, otherwise it is filled from `peer`.

    Both ends use the same `channel` and number of bytes. Until the message is finished, a sent buffer must not be
    written, and a received buffer must be neither read nor written.

    Args:
        peer: the rank at the other end.
        buffer: a contiguous vector.
        channel: the kind of message; at most one message of a kind is under way from one rank to another.
        sends: True at the sender, False at the receiver.
        hop: the hop of the message, for errors.
        mirror: for a receiver, its own counterpart of the buffer that `peer` sends. It has the length of the message,
            and lies in the memory that `allocate` returned for the slot of the sent buffer.
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
        """Returns a vector to send messages from, on the device of `like`; its values are undefined.

        All ranks allocate in the same order and with the same sizes. A transport may return the memory of a `slot`
        (channel, number of the buffer) again for the same slot, once the previous pass is over.
        """
        ...

    def start(self, messages: Sequence[Message]) -> Any:
        """Starts all messages after the work already queued on the buffers, and returns a handle at once."""
        ...

    def finish(self, handle: Any) -> None:
        """Waits for the messages of `handle`: between GPUs the current stream waits, otherwise the process."""
        ...
