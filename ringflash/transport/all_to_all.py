"""All-to-all within a group of ranks, heads against rows: between processes or virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.coordination.failures import Faults
from ringflash.coordination.watch import Watch
from ringflash.transport.base import Message, Transport

_CHANNEL = -1  # those of a ring are counted from 0


class HeadsTransport(Protocol):
    """All-to-all among the ranks of one group."""

    def start(self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]) -> Any:
        """Starts one exchange and returns a handle at once; work already queued on the vectors comes first.

        Args:
            outgoing: a vector, in it what goes to each rank one after another, this one too.
            sent: its elements for each rank.
            incoming: a vector that is filled likewise, from each rank.
            received: its elements from each rank.
        """
        ...

    def finish(self, handle: Any) -> None:
        """Waits until the exchange is done, in the order of the device's queue where there is one."""
        ...


class ProcessGroupHeads:
    """Exchanges over `group`, each one collective: gloo, or NCCL, whose exchanges `watch` sees to come in time."""

    def __init__(self, group: dist.ProcessGroup, faults: Faults, watch: Watch | None) -> None:
        self._group, self._faults, self._watch = group, faults, watch

    def start(
        self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]
    ) -> dist.Work | None:
        """One collective of bytes: gloo knows few dtypes."""
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
        """Waits: the process on gloo, the current stream on NCCL."""
        if handle is None:
            return
        if self._watch is None:
            self._faults.wait_for(handle)
        else:
            handle.wait()


class LocalHeads:
    """Exchanges between virtual ranks, as messages over the network that joins them; peers are those of the group."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def start(self, outgoing: Tensor, sent: Sequence[int], incoming: Tensor, received: Sequence[int]) -> Any:
        """Posts a message to and from each rank."""
        messages = []
        for vector, sizes, sends in ((outgoing, sent, True), (incoming, received, False)):
            for peer, part in enumerate(vector.split(list(sizes))):
                messages.append(Message(peer, part, _CHANNEL, sends, hop=0))
        return self._transport.start(messages)

    def finish(self, handle: Any) -> None:
        """As the messages do."""
        self._transport.finish(handle)
