"""The order of rows: all ranks of all rings read that of rank 0, whatever random numbers each has drawn.

accelerate gives the ranks one order only where it shards data over them. Ranks of a ring get the same batches, but each
rank's sampler draws from the numbers of its own process. Dropout on shards of unequal length leaves these in other
states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

CHUNK = 4096  # rows that rank 0 sends at once; a sampler may have no end


class SharedOrder(Sampler[Any]):
    """A sampler that yields what rank 0's sampler yields; iterating is a collective.

    Each rank iterates over its own sampler as well, so that its random numbers go on as in a single process. Other
    attributes are those of that sampler.
    """

    def __init__(self, sampler: Any, group: dist.ProcessGroup | None) -> None:
        self.sampler, self._group = sampler, group

    def __iter__(self) -> Iterator[Any]:
        own = iter(self.sampler)
        chunk = [None] * CHUNK
        while len(chunk) == CHUNK:
            chunk = _of_first_rank(list(islice(own, CHUNK)), self._group)
            yield from chunk

    def __len__(self) -> int:
        return len(cast("Sized", self.sampler))

    def __getattr__(self, name: str) -> Any:
        # accelerate sets the epoch of a sampler that has `set_epoch`, and of the dataset behind another one.
        if name == "sampler":  # not set yet, as in unpickling
            raise AttributeError(name)
        return getattr(self.sampler, name)


def share_order(loader: DataLoader[Any], group: dist.ProcessGroup) -> None:
    """Makes all ranks read the rows of a prepared loader in rank 0's order, in place; a collective.

    Nothing changes for data without indices, for rows in their own order, and for a batch sampler without `.sampler`.
    """
    if isinstance(loader.dataset, IterableDataset):
        return
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate's part of a ring
        batches = batches.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if hasattr(sampler, "initial_seed"):  # accelerate's SeedableRandomSampler, which it finds by class in checkpoints
        sampler.initial_seed = _of_first_rank(sampler.initial_seed, group)
    elif sampler is not None and not isinstance(sampler, SequentialSampler | SharedOrder):
        batches.sampler = SharedOrder(sampler, group)


def _of_first_rank(value: Any, group: dist.ProcessGroup | None) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]
