"""The interface of a transport: a ring starts messages, does other work, and finishes the messages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

FAR = 16  # channels from here on use slow links, on which a message may take many hops


class Slot(NamedTuple):
    """Memory of a buffer, and views of it, which a transport that keeps the memory keeps with it.

    Args:
        memory: a contiguous vector.
        views: views of the memory by keys of the buffer's choice.
    """

    memory: Tensor
    views: dict[Hashable, Any]


class Span(NamedTuple):
    """Consecutive elements of a contiguous vector. A view of them takes microseconds, and few transports need one.

    Args:
        memory: the vector.
        start: index of the first element.
        numel: number of elements.
    """

    memory: Tensor
    start: int
    numel: int

    @staticmethod
    def of(vector: Tensor) -> Span:
        """Returns all elements of a vector."""
        return Span(vector, 0, vector.numel())

    @property
    def vector(self) -> Tensor:
        """Returns the elements as a view."""
        if self.numel == self.memory.numel():
            return self.memory
        return self.memory[self.start : self.start + self.numel]

    @property
    def address(self) -> int:
        """Returns the address of the first element."""
        return self.memory.data_ptr() + self.start * self.memory.itemsize

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return self.numel * self.memory.itemsize


class Message(NamedTuple):
    """One end of a message: `span` is sent to `peer` if `sends`, otherwise it is filled from `peer`.

    Both ends use the same `channel` and number of bytes. Until the message is finished, a sent span must not be
    written, and a received span must be neither read nor written.

    Args:
        peer: the rank at the other end.
        span: the elements that are sent or filled.
        channel: the kind of message; at most one message of a kind is under way from one rank to another.
        sends: True at the sender, False at the receiver.
        hop: the hop of the message, for errors.
        mirror: for a receiver, its own counterpart of the span that `peer` sends. It has the length of the message,
            and lies in the memory that `allocate` returned for the slot of the sent span.
    """

    peer: int
    span: Span
    channel: int
    sends: bool
    hop: int
    mirror: Span | None = None


class Transport(Protocol):
    """Point-to-point messages between the ranks of one ring."""

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Slot:
        """Returns memory to send messages from, `numel` elements on the device of `like`; its values are undefined.

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


class TwoLinks:
    """Sends messages of channels from `FAR` on over `far`, and other messages over `near`.

    Messages of many hops then do not delay messages due after one hop. Messages that start together are all near or all
    far.
    """

    def __init__(self, near: Transport, far: Transport) -> None:
        self._near, self._far = near, far

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Slot:
        """Returns memory of the near transport."""
        return self._near.allocate(slot, numel, like, dtype)

    def start(self, messages: Sequence[Message]) -> tuple[Transport, Any]:
        """Starts all messages on their transport."""
        transport = self._far if messages and messages[0].channel >= FAR else self._near
        return transport, transport.start(messages)

    def finish(self, handle: tuple[Transport, Any]) -> None:
        """Waits until the messages of `handle` are done, as their transport does."""
        transport, of_transport = handle
        transport.finish(of_transport)
