"""Process groups that a ring creates and owns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ringflash.errors import GroupFailed, RingflashError
from ringflash.torch_private import number_of_groups, numbered_group

_GROUPS = itertools.count()  # numbers that no group name was made from yet


def new_group(ranks: Sequence[int], through: Sequence[dist.ProcessGroup], **options: Any) -> dist.ProcessGroup:
    """Makes a group of `ranks`; a collective of these ranks alone.

    Args:
        ranks: global ranks, in ascending order.
        through: existing groups that together connect all of `ranks`.
        options: options of `torch.distributed.new_group`.
    """
    with named_errors("made a context"), _one_name(through):
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="ringflash", **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def backend_of(group: dist.ProcessGroup, device: str) -> str | None:
    """Returns the name of the backend of `group` for tensors on `device`, or None without such a backend."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((backend for name, backend in pairs if name == device), None)


@contextmanager
def named_errors(action: str) -> Iterator[None]:
    """Raises GroupFailed for errors of torch in a collective of the program's group."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if isinstance(error, RingflashError):
            raise
        raise GroupFailed(action, str(error), dist.get_rank()) from error


def close(group: dist.ProcessGroup) -> None:
    """Removes a group of `new_group` from torch's lists. The group ends when nothing refers to it any more."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:  # the program has destroyed all groups
        return
    dist.destroy_process_group(group)


def all_have(number: int, groups: Sequence[dist.ProcessGroup]) -> bool:
    """Returns whether all ranks of the groups pass the same `number`, other than 0; a collective."""
    device = "cuda" if backend_of(groups[0], "cpu") is None else "cpu"
    ends = torch.tensor([number, -number], device=device)
    with named_errors("made a context"):
        for group in groups:
            dist.all_reduce(ends, dist.ReduceOp.MIN, group=group)
        least, most = ends.tolist()
    return number != 0 and least == -most


@contextmanager
def _one_name(through: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Makes ranks that belong to different numbers of groups give the next group the same name.

    torch derives a group's name from the ranks and from a number that each process counts. Ranks with different names
    for one group would wait for each other until the deadline. The name of a closed group is never used again, because
    the store still holds the addresses of that group.
    """
    device = "cuda" if backend_of(through[0], "cpu") is None else "cpu"
    most = torch.tensor([max(number_of_groups(), next(_GROUPS))], device=device)
    for group in through:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    while next(_GROUPS) < int(most):
        pass
    with numbered_group(int(most)):
        yield
