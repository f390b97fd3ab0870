"""Transport of ring messages as point-to-point operations of NCCL: one batch a hop, on a separate stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash import torch_private
from ringflash.coordination.failures import Faults
from ringflash.coordination.watch import Watch
from ringflash.transport import groups
from ringflash.transport.base import Message, Slot


class NcclTransport:
    """Messages over an NCCL `group`, ordered after the work in the current stream; the process never waits.

    `watch` ends the ring if a message does not arrive.
    """

    def __init__(self, group: dist.ProcessGroup, faults: Faults, watch: Watch) -> None:
        self._group, self._faults, self._watch = group, faults, watch
        self._rank = dist.get_rank(group)
        faults.on_release(self._abort)

    def allocate(self, slot: tuple[int, int], numel: int, like: Tensor, dtype: torch.dtype) -> Slot:
        """Returns new memory from the caching allocator."""
        return Slot(like.new_empty(numel, dtype=dtype), {})

    def start(self, messages: Sequence[Message]) -> list[dist.Work]:
        """Posts all messages as one batch."""
        self._faults.check()
        if not messages:
            return []
        works = post(in_order(messages, self._rank), self._group)
        for work in works:
            self._watch.add(work.is_completed, messages[0].hop, [message.peer for message in messages])
        return works

    def finish(self, handle: list[dist.Work]) -> None:
        """Makes the current stream wait for the batch."""
        for work in handle:
            work.wait()

    def _abort(self) -> None:
        abort(self._group)


def abort(group: dist.ProcessGroup) -> None:
    """Ends the kernels that wait for a peer, so that waits for the GPU end too; `group` is unusable afterwards."""
    torch_private.abort(group, torch.device("cuda"))


def close(group: dist.ProcessGroup) -> None:
    """Ends a group of `new_group` on this rank; the peers need not take part."""
    abort(group)
    groups.close(group)


def in_order(messages: Sequence[Message], rank: int) -> list[Message]:
    """Sorts messages: sends come first on even ranks, and last on odd ranks.

    NCCL cannot deadlock in any order within a batch. The order serves backends that run one operation after another.
    """
    return sorted(messages, key=lambda message: message.sends == (rank % 2 == 1))


def post(messages: Sequence[Message], group: dist.ProcessGroup) -> list[dist.Work]:
    """Posts messages to and from ranks of `group` as one batch."""
    operations = [
        dist.P2POp(
            dist.isend if message.sends else dist.irecv,
            message.span.vector.view(torch.uint8),  # bytes: gloo supports few dtypes
            group=group,
            group_peer=message.peer,
            tag=message.channel,
        )
        for message in messages
    ]
    return dist.batch_isend_irecv(operations)


def new_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """Makes an NCCL group of the ranks of `group`, with its own communicator and stream; a collective of these ranks.

    The stream has high priority, so its kernels start as soon as attention tiles leave an SM. The kernels use no
    clusters, because the blocks of a cluster would need room on neighbouring SMs at once. NCCL chooses the number of
    channels, because it knows the links. The communicator is made at once, and not by the first batch: that would need
    messages from every rank, and under a sliding window some ranks have none.

    If the default group is bound to a device, torch splits communicators off it, and all its ranks must take part. Then
    a `group` of fewer ranks is returned as it is, and is unusable after the ring breaks.
    """
    default = dist.group.WORLD
    assert default is not None
    if default.bound_device_id is not None and dist.get_world_size(group) < dist.get_world_size():
        return group
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    torch_private.set_timeout(options, timeout)
    if hasattr(options, "config"):
        options.config.cga_cluster_size = 0
    ranks = dist.get_process_group_ranks(group)
    return groups.new_group(ranks, [group], timeout=timeout, backend="nccl", pg_options=options, device_id=device)
