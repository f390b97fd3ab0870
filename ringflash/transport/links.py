"""Fast links and slow ones: what may take many hops does not stand in the way of what is due after one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringflash.transport.base import FAR, Message, Transport


class TwoLinks:
    """Messages of channels from `FAR` on go over `far`, others over `near`; all that start together are of one kind."""

    def __init__(self, near: Transport, far: Transport) -> None:
        self._near, self._far = near, far

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """As the near transport does."""
        return self._near.allocate(slot, numel, like, dtype)

    def start(self, messages: Sequence[Message]) -> tuple[Transport, Any]:
        """Starts all messages where they belong."""
        transport = self._far if messages and messages[0].channel >= FAR else self._near
        return transport, transport.start(messages)

    def finish(self, handle: tuple[Transport, Any]) -> None:
        """Waits as the transport of `handle` does."""
        transport, of_transport = handle
        transport.finish(of_transport)
