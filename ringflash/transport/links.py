"""Separate transports for fast and slow links: messages of many hops do not delay messages due after one hop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringflash.transport.base import FAR, Message, Slot, Transport


class TwoLinks:
    """Sends messages of channels from `FAR` on over `far`, and other messages over `near`.

    Messages that start together are all near or all far.
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
