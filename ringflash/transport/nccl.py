"""Ring messages as point-to-point operations of a torch.distributed group: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ringflash.transport.base import Message


class ProcessGroupTransport:
    """Messages over `group`; NCCL runs them on its own stream, ordered after what the current stream holds."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, messages: Sequence[Message]) -> list[dist.Work]:
        """Posts all messages as one batch."""
        if not messages:
            return []
        operations = [
            dist.P2POp(
                dist.isend if message.sends else dist.irecv,
                message.buffer.view(torch.uint8),  # bytes: gloo knows few dtypes
                group=self._group,
                group_peer=message.peer,
                tag=message.channel,
            )
            for message in messages
        ]
        return dist.batch_isend_irecv(operations)

    def finish(self, handle: list[dist.Work]) -> None:
        """Waits for the batch: the process on gloo, the current stream on NCCL."""
        for work in handle:
            work.wait()
