"""Sampler of a data-parallel rank's samples, in an order that survives a restart at another world size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ringflash.errors import ConfigError
from ringflash.train.data.permutation import BlockPermutation
from ringflash.train.data.samples import Positions, TokenSamples

PADDING = -1


class BatchSampler(DistributedSampler[list[int]]):
    """Batches of an epoch for one data-parallel rank.

    The epoch's order is a keyed permutation, a pure function of (seed, epoch) that is computed batch by batch, so that
    memory does not grow with the number of samples. It is cut into batches of `batch_size` samples over all
    ranks, and rank r takes rows r, r + num_replicas, ... of each. The last batch is padded with `PADDING`. Every sample
    is thus seen exactly once an epoch, and every rank has the same number of equal batches. Progress is counted in
    samples over all ranks, and so carries over to another number of ranks or batch size.

    It is a DistributedSampler because Lightning replaces samplers of other classes. It counts epochs itself, because
    Lightning's count moves on when a run ends in the middle of one.

    Args:
        num_samples: number of samples in the data set.
        batch_size: samples a batch, over all data-parallel ranks.
        rank: data-parallel rank.
        num_replicas: data-parallel size.
        seed: seed of the order.
        shuffle: if False, samples come in order, and every iteration starts at the first sample.
        edges: (blocks + 1,) see `TokenSamples.edges`. The order takes one block after another; None is one block.

    Raises:
        ConfigError: `batch_size` is not a positive multiple of `num_replicas`.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        num_replicas: int = 1,
        seed: int,
        shuffle: bool,
        edges: Positions | None = None,
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
        self._edges = np.array([0, num_samples]) if edges is None else edges
        self.consumed = self.batches_before = self.handed_out = 0

    def __len__(self) -> int:
        """Returns the number of batches from the start of the trainer's epoch to the end of the data set.

        The length includes batches that a checkpoint counts as done.
        """
        return self.batches_before + -(-(self.total - self.consumed) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        order = BlockPermutation(self._edges, self.seed, self.epoch) if self.shuffle else None
        for start in range(self.consumed, self.total, self.batch_size):
            places = np.arange(start, min(start + self.batch_size, self.total))
            batch = (places if order is None else order(places)).tolist()
            batch += [PADDING] * (self.batch_size - len(batch))
            yield batch[self.rank :: self.num_replicas]

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: `begin` sets the epoch."""

    def begin(self) -> None:
        """Starts an iteration: the rest of the epoch, or the next epoch if this one is finished."""
        state = self.state_dict()
        if not self.shuffle:
            state = {"epoch": 0, "consumed": 0, "batches": 0}
        elif state["consumed"] == self.total:
            state = {"epoch": state["epoch"] + 1, "consumed": 0, "batches": 0}
        elif self.handed_out:
            state["batches"] = 0  # the trainer ended its epoch early, and counts the batches that are left from zero
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a sampler at any world size or batch size to continue after the last batch."""
        consumed = min(self.total, self.consumed + self.handed_out * self.batch_size)
        return {"epoch": self.epoch, "consumed": consumed, "batches": self.batches_before + self.handed_out}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the batches of a sampler with the same data set, seed and shuffle."""
        self.epoch, self.consumed, self.batches_before = state["epoch"], state["consumed"], state["batches"]
        self.handed_out = 0


class ResumableLoader(DataLoader[Any]):
    """Loader of batches (batch, seqlen) of `samples`; Lightning stores its sampler's state in checkpoints."""

    def __init__(self, samples: TokenSamples, sampler: BatchSampler) -> None:
        # The sampler yields whole batches, and the samples are slices of a mapped file, so workers would not be faster.
        super().__init__(samples, batch_size=None, sampler=sampler, num_workers=0)
        self.order = sampler
        self._start: dict[str, int] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._start is not None:
            self.load_state_dict(self._start)
        self.order.begin()  # now and not at the first batch, because the trainer asks for the length before
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            # Counts here and not in the sampler, because the loader may fetch from it in advance.
            self.order.handed_out += 1
            yield batch

    def start_after(self, state: dict[str, int]) -> None:
        """Makes the first iteration continue after the batches of `state`, as the first ones of the trainer's epoch.

        Until then the length is that of a whole epoch, to which Lightning limits all later epochs.
        """
        self._start = state | {"batches": 0}

    def state_dict(self) -> dict[str, int]:
        """Returns `BatchSampler.state_dict`."""
        return self.order.state_dict() if self._start is None else self._start

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Calls `BatchSampler.load_state_dict`."""
        self._start = None
        self.order.load_state_dict(state)
