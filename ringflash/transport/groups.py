"""Process groups of a ring's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringflash.errors import GroupFailed, RingflashError

_GROUPS = itertools.count()  # numbers above those that names were made of


def new_group(ranks: Sequence[int], through: Sequence[dist.ProcessGroup], **options: Any) -> dist.ProcessGroup:
    """A group of `ranks`, made by these alone; a collective of them.

    Args:
        ranks: global ones, rising.
        through: groups that together join all of them.
        options: of `torch.distributed.new_group`.
    """
    with named_errors("made a context"), _one_name(through):
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="ringflash", **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def backend_of(group: dist.ProcessGroup, device: str) -> str | None:
    """The name of the backend that serves tensors on `device` in `group`."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((backend for name, backend in pairs if name == device), None)


@contextmanager
def named_errors(action: str) -> Iterator[None]:
    """Raises GroupFailed for an error of torch's in a collective of the program's group."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if isinstance(error, RingflashError):
            raise
        raise GroupFailed(action, str(error), dist.get_rank()) from error


def close(group: dist.ProcessGroup) -> None:
    """Takes a group that `new_group` made out of torch's lists; it ends when nothing refers to it."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:  # all groups were destroyed before
        return
    dist.destroy_process_group(group)


def all_have(number: int, groups: Sequence[dist.ProcessGroup]) -> bool:
    """Returns whether all ranks that the groups together join have the same number, other than 0; a collective."""
    device = "cuda" if backend_of(groups[0], "cpu") is None else "cpu"
    ends = torch.tensor([number, -number], device=device)
    with named_errors("made a context"):
        for group in groups:
            dist.all_reduce(ends, dist.ReduceOp.MIN, group=group)
        least, most = ends.tolist()
    return number != 0 and least == -most


@contextmanager
def _one_name(through: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Makes ranks that are in different numbers of groups give the next one the same name.

    torch makes that name of the ranks and of how many groups the process is in, and ranks with different names wait for
    each other until the deadline. A name that a closed group had is not given again, as the store still holds that
    group's addresses.
    """
    names = distributed_c10d._world.pg_names
    device = "cuda" if backend_of(through[0], "cpu") is None else "cpu"
    most = torch.tensor([max(len(names), next(_GROUPS))], device=device)
    for group in through:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    while next(_GROUPS) < int(most):
        pass
    fillers: dict[Any, Any] = {object(): f"ringflash {i}" for i in range(int(most) - len(names))}
    names.update(fillers)
    try:
        yield
    finally:
        for filler in fillers:
            del names[filler]
