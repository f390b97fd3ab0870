"""Small exchanges of integers between all ranks. Each carries its purpose, so that unlike ones end in an error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.errors import GroupFailed, RankMismatch, RingflashError

ROW = 16  # integers of a rank's row: gloo ends the process if ranks exchange tensors of different sizes
UNEQUAL = (
    "Data-parallel groups need equal numbers of batches, for training and for each evaluation. Cut or fill streams, "
    "leave the rest of the data out (drop_last=True), or set limit_train_batches and limit_val_batches to the smallest "
    "number. What one rank alone does, such as trainer.save_checkpoint(), all ranks must do."
)


class Purpose(Enum):
    """Purposes of exchanges, as the error names them if those of the ranks differ."""

    MEMORY = "comparison of memory"
    NEXT_BATCH = "request for the next training batch"
    TRAINING_BATCH = "training batch"
    SANITY_BATCH = "sanity-check batch"
    VALIDATION_BATCH = "validation batch"
    TEST_BATCH = "test batch"
    PREDICTION_BATCH = "prediction batch"
    METRIC = "metric of an evaluation"
    TRAINING_END = "end of the training batches"
    VALIDATION_END = "end of the validation batches"
    TEST_END = "end of the test batches"
    PREDICTION_END = "end of the prediction batches"
    SIGNALS = "comparison of signals"
    SAVES = "comparison of saves under way"
    CHECKPOINT = "checkpoint to save"


_PURPOSES = (*Purpose,)
_BATCHES = {purpose for purpose in Purpose if purpose.name.endswith("_BATCH")} - {Purpose.NEXT_BATCH}


@dataclass(frozen=True)
class Place:
    """Place of a rank in the run, which must be that of all ranks in each exchange.

    Args:
        purpose: what the exchange is for.
        index: number of batches before this one in its epoch; -1 where they are not counted.
        loader: index of the batch's loader.
        is_last: whether the batch is the last one of its epoch, or of the run.
    """

    purpose: Purpose
    index: int = -1
    loader: int = 0
    is_last: bool = False

    @property
    def words(self) -> list[int]:
        """The place as four integers."""
        return [_PURPOSES.index(self.purpose), self.index, self.loader, int(self.is_last)]

    @staticmethod
    def of(words: list[int]) -> Place:
        """Returns the place that the four integers `words` stand for."""
        purpose, index, loader, is_last = words
        return Place(_PURPOSES[purpose], index, loader, bool(is_last))

    def __str__(self) -> str:
        if self.purpose not in _BATCHES:
            return self.purpose.value
        number = f" {self.index} (from 0)" if self.index >= 0 else ""
        loader = f" of loader {self.loader}" if self.loader else ""
        return f"{self.purpose.value}{number}{loader}, {'' if self.is_last else 'not '}the last"


def all_ranks(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers (n,) of this rank into (world_size, n) of all ranks, in rank order."""
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered)


def exchange(group: dist.ProcessGroup, place: Place, *values: int) -> list[list[int]]:
    """Returns the `values` of every rank, in rank order; one collective over `group`, which must serve CPU tensors.

    Args:
        group: group of all ranks of the run. A group of GPUs would make the host wait for the work of its GPU.
        place: place of this rank in the run. It is part of the row that is sent.
        values: at most 12 integers of 64 bits, equally many for the same purpose.

    Raises:
        RankMismatch: on every rank, if the ranks are at different places, as with unequal numbers of batches.
        GroupFailed: a rank has ended, or did not come until the timeout of the group.
    """
    row, size = [*place.words, *map(int, values)], len(place.words)
    assert len(row) <= ROW, "a row has one size for all purposes"
    rank = dist.get_rank(group)
    try:
        padded = torch.tensor(row + [0] * (ROW - len(row)), dtype=torch.int64)
        rows: list[list[int]] = all_ranks(padded, group).tolist()
    except RingflashError:  # of a ring that another thread watches
        raise
    except RuntimeError as error:
        raise GroupFailed(f"exchanged numbers (this one: {place})", str(error), dist.get_rank()) from error
    if any(each[:size] != row[:size] for each in rows):
        places = [Place.of(each[:size]) for each in rows]
        usual = max(places, key=places.count)
        odd = [other for other, found in enumerate(places) if found != usual]
        raise RankMismatch("their place in the run", [*map(str, places)], odd, rank=rank, remedy=UNEQUAL)
    return [each[size : len(row)] for each in rows]
