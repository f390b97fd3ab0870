"""All-to-all exchange of heads for rows within a group of ranks: processes or virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.coordination.failures import Faults
from ringflash.coordination.watch import Watch
from ringflash.transport.base import Message, Span, Transport

_CHANNEL = -1  # channels of a ring are counted from 0


class HeadsTransport(Protocol):
    """All-to-all among the ranks of one group."""

    def start(self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]) -> Any:
        """Starts one exchange after the work already queued on the vectors, and returns a handle at once.

        Args:
            outgoing: a vector with the elements for each rank in rank order, this rank included.
            sent: number of elements for each rank.
            incoming: a vector for the elements from each rank in rank order, this rank included.
            received: number of elements from each rank.
        """
        ...

    def finish(self, handle: Any) -> None:
        """Waits until the exchange is done: on NCCL in the current stream, on gloo in the process."""
        ...


class ProcessGroupHeads:
    """Exchanges over a gloo or NCCL group, one collective each. `watch` ends the ring if a message of NCCL is late."""

    def __init__(self, group: dist.ProcessGroup, faults: Faults, watch: Watch | None) -> None:
        self._group, self._faults, self._watch = group, faults, watch

    def start(
        self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]
    ) -> dist.Work | None:
        """Starts one collective of bytes, because gloo supports few dtypes."""
        self._faults.check()
        work = dist.all_to_all_single(
            incoming.view(torch.uint8),
            outgoing.view(torch.uint8),
            [n * incoming.itemsize for n in received],
            [n * outgoing.itemsize for n in sent],
            group=self._group,
            async_op=True,
        )
        if self._watch is not None and work is not None:
            self._watch.add(work.is_completed, 0, [])
        return work

    def finish(self, handle: dist.Work | None) -> None:
        """Makes the process wait on gloo, or the current stream on NCCL."""
        if handle is None:
            return
        if self._watch is None:
            self._faults.wait_for(handle)
        else:
            handle.wait()


class LocalHeads:
    """Exchanges between virtual ranks, as messages over their network; peers are counted within the group."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def start(self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]) -> Any:
        """Posts a message to and from each rank."""
        messages = []
        for vector, sizes, sends in ((outgoing, sent, True), (incoming, received, False)):
            for peer, part in enumerate(vector.split(list(sizes))):
                messages.append(Message(peer, Span.of(part), _CHANNEL, sends, hop=0))
        return self._transport.start(messages)

    def finish(self, handle: Any) -> None:
        """Finishes the messages of the exchange."""
        self._transport.finish(handle)
