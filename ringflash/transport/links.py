"""Fast links and slow ones: what may take many hops does not stand in the way of what is due after one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ringflash.transport.base import FAR, Message, Transport


class TwoLinks:
    """Messages of channels from `FAR` on go over `far`, others over `near`; all that start together are of one kind."""

    def __init__(self, near: Transport, far: Transport) -> None:
        self._near, self._far = near, far

    def start(self, messages: Sequence[Message]) -> tuple[Transport, Any]:
        """Starts all messages where they belong."""
        transport = self._far if messages and messages[0].channel >= FAR else self._near
        return transport, transport.start(messages)

    def finish(self, handle: tuple[Transport, Any]) -> None:
        """Waits as the transport of `handle` does."""
        transport, of_transport = handle
        transport.finish(of_transport)


def far_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks whose messages do not queue behind those of `group`; making one is a collective.

    gloo has no queue. NCCL's is a communicator's, and torch splits new ones off the default group's where that is bound
    to a device, which takes all its ranks: then a group of fewer is used as it is, exact but without that overlap.
    """
    default = dist.group.WORLD
    assert default is not None
    bound_to_fewer = default.bound_device_id is not None and dist.get_world_size(group) < dist.get_world_size()
    if dist.get_backend(group) == "gloo" or bound_to_fewer:
        return group
    far = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    assert isinstance(far, dist.ProcessGroup)
    return far
