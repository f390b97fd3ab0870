"""Which samples a data-parallel rank sees, in an order that survives a restart at another world size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ringflash.errors import ConfigError
from ringflash.train.data.samples import TokenSamples

PADDING = -1


class BatchSampler(DistributedSampler[list[int]]):
    """Batches of an epoch for one data-parallel rank.

    The epoch's order is a pure function of (seed, epoch). It is cut into batches of `batch_size` samples over all
    ranks, and rank r takes rows r, r + num_replicas, ... of each. The last batch is filled up with `PADDING`, so that
    every sample is seen exactly once an epoch and every rank has the same number of equal batches. What has been
    handed out is counted in samples over all ranks, and so carries over to another number of ranks or batch size.

    It is a DistributedSampler so that Lightning, which replaces samplers of other classes, leaves it alone; but it
    counts epochs itself, because Lightning's count moves on when a run ends in the middle of one.

    Args:
        num_samples: in the data set.
        batch_size: samples a batch, over all data-parallel ranks.
        rank: data-parallel rank.
        num_replicas: data-parallel size.
        seed: of the order.
        shuffle: False: in order, every iteration from the first sample on.

    Raises:
        ConfigError: `batch_size` is not a positive multiple of `num_replicas`.
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, rank: int = 0, num_replicas: int = 1, seed: int, shuffle: bool
    ) -> None:
        if batch_size < 1 or batch_size % num_replicas:
            raise ConfigError(
                "batch_size",
                expected=f"a positive multiple of the data-parallel size, {num_replicas}",
                got=batch_size,
                remedy="batch_size counts the sequences of all data-parallel ranks together.",
            )
        super().__init__(range(num_samples), num_replicas, rank, shuffle, seed)  # pyright: ignore[reportArgumentType]
        self.total, self.batch_size = num_samples, batch_size
        self.consumed = self.batches_before = self.handed_out = 0

    def __len__(self) -> int:
        """Batches of the whole epoch, those handed out before this iteration included."""
        return self.batches_before + -(-(self.total - self.consumed) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        order = np.arange(self.total)
        if self.shuffle:
            order = np.random.Generator(np.random.PCG64((self.seed, self.epoch))).permutation(order)
        for start in range(self.consumed, self.total, self.batch_size):
            batch = order[start : start + self.batch_size].tolist()
            batch += [PADDING] * (self.batch_size - len(batch))
            yield batch[self.rank :: self.num_replicas]

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: `begin` knows which epoch it is."""

    def begin(self) -> None:
        """Starts an iteration: the next epoch when the last one was handed out to its end, else the rest of it."""
        state = self.state_dict()
        if not self.shuffle:
            state = {"epoch": 0, "consumed": 0, "batches": 0}
        elif state["consumed"] == self.total:
            state = {"epoch": state["epoch"] + 1, "consumed": 0, "batches": 0}
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, int]:
        """What a sampler at another world size or batch size needs to go on after the batches handed out so far."""
        consumed = min(self.total, self.consumed + self.handed_out * self.batch_size)
        return {"epoch": self.epoch, "consumed": consumed, "batches": self.batches_before + self.handed_out}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after what a sampler of the same data set, seed and shuffle had handed out."""
        self.epoch, self.consumed, self.batches_before = state["epoch"], state["consumed"], state["batches"]
        self.handed_out = 0


class ResumableLoader(DataLoader[Any]):
    """Batches (batch, seqlen) of `samples`, and their sampler's state, which Lightning stores in checkpoints."""

    def __init__(self, samples: TokenSamples, sampler: BatchSampler) -> None:
        # The sampler gives whole batches, and the samples are slices of a mapped file: no worker would be faster.
        super().__init__(samples, batch_size=None, sampler=sampler, num_workers=0)
        self.order = sampler

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.order.begin()
        for batch in super().__iter__():
            # Counted here and not in the sampler, which may be asked ahead.
            self.order.handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """See `BatchSampler.state_dict`."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """See `BatchSampler.load_state_dict`."""
        self.order.load_state_dict(state)
