"""Exchanges between all ranks: rows of one size, which say what they are for."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ringflash.errors import GroupFailed, RankMismatch
from ringflash.train.exchange import Place, Purpose, exchange
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_synchronisations import trained
from tests.train.runs import MODEL, OPTIMIZER, Run

WORDS = [Place(Purpose.SIGNALS), Place(Purpose.TRAINING_BATCH, 7, 1, is_last=True), Place(Purpose.TEST_BATCH)]


@pytest.mark.parametrize("place", WORDS, ids=str)
def test_a_place_is_the_same_after_an_exchange(place: Place) -> None:
    assert Place.of(place.words) == place


def _exchanged() -> list[Any]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    found: list[Any] = [exchange(group, Place(Purpose.SAVES), rank, 2**62)]
    for place in (
        Place(Purpose.SIGNALS if rank == 1 else Purpose.CHECKPOINT),
        Place(Purpose.TRAINING_BATCH, 4, is_last=rank == 2),
        Place(Purpose.VALIDATION_BATCH, 4, loader=min(rank, 1)),
    ):
        with pytest.raises(RankMismatch) as error:
            exchange(group, place, *range(rank))  # even with unequal numbers of values
        found.append((error.value.odd_ranks, error.value.values))
    return [*found, exchange(group, Place(Purpose.SAVES))]


def test_ranks_at_different_places_all_raise_and_can_go_on() -> None:
    for found in run_ranks(3, _exchanged):
        assert found[0] == [[rank, 2**62] for rank in range(3)]
        assert found[1] == ([1], ["checkpoint to save", "comparison of signals", "checkpoint to save"])
        batch = "training batch 4 (from 0)"
        assert found[2] == ([2], [f"{batch}, not the last", f"{batch}, not the last", f"{batch}, the last"])
        batch = "validation batch 4 (from 0)"
        assert found[3] == ([0], [f"{batch}, not the last", *[f"{batch} of loader 1, not the last"] * 2])
        assert found[4] == [[], [], []]


def _awaited() -> str:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_rank() == 0:
        with pytest.raises(GroupFailed) as error:
            exchange(group, Place(Purpose.TRAINING_END))
        return str(error.value)
    return ""


def test_a_rank_that_does_not_come_ends_the_wait_at_the_timeout() -> None:
    text, _ = run_ranks(2, _awaited)
    assert "while its ranks exchanged numbers (this one: end of the training batches) (seen on rank 0)" in text
    assert "did not come until the group's timeout" in text


def _purposes() -> dict[str, int]:
    """Returns the number of exchanges in three steps of a run, by purpose."""
    counted: Counter[str] = Counter()

    def counting(group: Any, place: Place, *values: int) -> Any:
        counted[place.purpose.name] += 1
        return exchange(group, place, *values)

    with (
        mock.patch("ringflash.train.lightning.batch.exchange", counting),
        mock.patch("ringflash.train.lightning.sharded.exchange", counting),
    ):
        trained(LanguageModel(MODEL, OPTIMIZER), Run(steps=3), RingAttentionStrategy())
    return dict(counted)


def test_a_step_makes_two_exchanges() -> None:
    for counted in run_ranks(2, _purposes):
        memory = counted.pop("MEMORY", 0)
        assert memory <= 1
        assert counted == {"NEXT_BATCH": 3, "TRAINING_BATCH": 3, "TRAINING_END": 1}
