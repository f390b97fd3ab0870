"""Collective work of all ranks on a checkpoint: an error on one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringflash.errors import CheckpointError, RingflashError


def on_every_rank(function: Callable[[], Any], path: Path, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Calls `function` on each rank of `group` and gathers the results; an error on one rank is raised on all.

    Raises:
        RingflashError: the library's own error of `function`, as `function` raised it.
        CheckpointError: any other error of `function`; it names the rank and its exception.
    """
    rank, result, failure, own = dist.get_rank(group), None, None, None
    try:
        result = function()
    except Exception as raised:  # any error, because the other ranks wait for the result
        own = raised
        where = f"rank {rank}: {type(raised).__name__}: {raised}"
        failure = raised if isinstance(raised, RingflashError) else failed(path, where)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with among_ranks(path, group):
        dist.all_gather_object(gathered, (result, failure), group=group)
    for place, (_, found) in enumerate(gathered):
        if found is None:
            continue
        if own is not None and failure is own and place == rank:
            raise own  # and not its copy, which lacks the traceback and the cause
        found.add_note(f"Raised on rank {place}.")  # the message of the library's own error may not say so
        raise found from own
    return [value for value, _ in gathered]


@contextmanager
def among_ranks(path: Path, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises CheckpointError when another rank is gone during a collective, because gloo's error names no rank."""
    rank = dist.get_rank(group)
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            str(path),
            expected="every rank to read and write it",
            got=f"a rank that is gone, or did not answer: {reason}",
            remedy="See the output of the other ranks: one has ended; earlier checkpoints are untouched.",
            rank=rank,
        ) from error


def failed(path: Path, what: str) -> CheckpointError:
    """Makes the error for a checkpoint that some rank could not read or write."""
    return CheckpointError(
        str(path),
        expected="every rank to read and write it",
        got=what,
        remedy="Look at that rank, and at the space and rights on its file system; earlier checkpoints are untouched.",
    )
