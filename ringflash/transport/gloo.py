"""Ring messages over gloo, between CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.transport.base import Message
from ringflash.transport.faults import Faults
from ringflash.transport.nccl import in_order, post

_NEVER_SENT = 1 << 20  # a tag that no message has


@dataclass(frozen=True)
class _Posted:
    """Messages under way, with a work for each."""

    messages: Sequence[Message]
    works: list[dist.Work]


class GlooTransport:
    """Messages over a gloo `group` of the ring's own; a wait blocks the process, until the deadline at most."""

    def __init__(self, group: dist.ProcessGroup, faults: Faults) -> None:
        self._group, self._faults, self._rank = group, faults, dist.get_rank(group)

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A fresh vector."""
        return like.new_empty(numel, dtype=dtype)

    def start(self, messages: Sequence[Message]) -> _Posted:
        """Posts all messages."""
        if not messages:
            return _Posted((), [])
        messages = in_order(messages, self._rank)
        with self._faults.waiting(messages[0].hop, [message.peer for message in messages]):
            return _Posted(messages, post(messages, self._group))

    def finish(self, handle: _Posted) -> None:
        """Waits for each message in turn."""
        for message, work in zip(handle.messages, handle.works, strict=True):
            with self._faults.waiting(message.hop, [message.peer]):
                work.wait(timedelta(seconds=self._faults.deadline))


def close(group: dist.ProcessGroup) -> None:
    """Closes all connections of this rank in a gloo `group`: every wait of it, here and on peers, ends with an error.

    gloo does so when a wait for a message ends in vain; its own `abort` leaves the connections as they are. A wait on a
    connection that a peer has closed ends at once, and then leaves the other connections open.
    """
    for peer in range(dist.get_world_size(group)):
        if peer != dist.get_rank(group):
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
