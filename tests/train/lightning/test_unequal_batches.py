"""Data-parallel groups with unequal numbers of batches: every rank raises an error that names the place of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.preemption import Preemption
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.distributed import run_ranks
from tests.test_token_mean import make_batches
from tests.train.lightning.test_user_modules import UserModule, quiet
from tests.train.runs import MODEL, OPTIMIZER

Counts = tuple[int, int]  # batches of the two data-parallel groups


class SaveAlone(Callback):
    """Saves a checkpoint on the first rank alone, as a user may by mistake."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint("nowhere")


@dataclass(frozen=True)
class Case:
    """A run of two data-parallel groups.

    Args:
        training: batches of training.
        held_out: batches of each loader of an evaluation.
        has_length: whether the loaders have a length.
        module: "own", a user's own module, or "language model".
        stage: method of the Trainer.
        callbacks: classes of callbacks.
        options: options of the Trainer.
    """

    training: Counts = (3, 3)
    held_out: tuple[Counts, ...] = ((2, 2),)
    has_length: bool = False
    module: str = "own"
    stage: str = "fit"
    callbacks: tuple[type[Callback], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


# The place of each group in the error; None where both train to the end.
CASES: dict[str, tuple[Case, tuple[str, str] | None]] = {
    "streams": (
        Case((4, 3)),
        ("training batch 2 (from 0), not the last", "training batch 2 (from 0), the last"),
    ),
    "streams of one batch": (
        Case((2, 1), options={"limit_val_batches": 0}),
        ("training batch 0 (from 0), not the last", "training batch 0 (from 0), the last"),
    ),
    "an empty stream": (
        Case((2, 0)),
        ("training batch 0 (from 0), not the last", "end of the training batches"),
    ),
    "loaders with lengths": (
        Case((3, 4), has_length=True),
        ("training batch 2 (from 0), the last", "training batch 2 (from 0), not the last"),
    ),
    "a limit that one stream does not reach": (
        Case((6, 3), options={"limit_train_batches": 4}),
        ("training batch 3 (from 0), the last", "end of the training batches"),
    ),
    "validation at other steps": (
        Case((8, 4), has_length=True, options={"val_check_interval": 0.25}),
        ("request for the next training batch", "validation batch 0 (from 0), not the last"),
    ),
    "a language model": (
        Case((4, 3), module="language model", callbacks=(LastCheckpoint, Preemption)),
        ("training batch 2 (from 0), not the last", "training batch 2 (from 0), the last"),
    ),
    "accumulation": (
        Case((4, 3), module="language model", options={"accumulate_grad_batches": 2}),
        ("training batch 2 (from 0), not the last", "training batch 2 (from 0), the last"),
    ),
    "streams of validation": (
        Case(held_out=((3, 2),)),
        ("validation batch 1 (from 0), not the last", "validation batch 1 (from 0), the last"),
    ),
    "a limit that one validation does not reach": (
        Case(held_out=((4, 2),), module="language model", options={"limit_val_batches": 3}),
        ("validation batch 2 (from 0), the last", "end of the validation batches"),
    ),
    "a sanity check": (
        Case(held_out=((3, 1),), options={"num_sanity_val_steps": 2}),
        ("sanity-check batch 1 (from 0), the last", "end of the validation batches"),
    ),
    "a sanity check with lengths": (
        Case(held_out=((3, 1),), has_length=True, options={"num_sanity_val_steps": 2}),
        ("sanity-check batch 0 (from 0), not the last", "sanity-check batch 0 (from 0), the last"),
    ),
    "lengths of validation": (
        Case(held_out=((3, 2),), has_length=True),
        ("validation batch 1 (from 0), not the last", "validation batch 1 (from 0), the last"),
    ),
    "two loaders with lengths": (
        Case(held_out=((1, 2), (2, 1)), has_length=True, stage="validate"),
        ("metric of an evaluation", "validation batch 1 (from 0), not the last"),
    ),
    "a test": (
        Case(held_out=((4, 2),), stage="test", options={"limit_test_batches": 3}),
        ("test batch 2 (from 0), the last", "metric of an evaluation"),
    ),
    "a test of a language model": (
        Case(held_out=((4, 2),), module="language model", stage="test", options={"limit_test_batches": 3}),
        ("test batch 2 (from 0), the last", "end of the test batches"),
    ),
    "predictions": (
        Case(held_out=((4, 2),), stage="predict", options={"limit_predict_batches": 3}),
        ("prediction batch 2 (from 0), the last", "end of the prediction batches"),
    ),
    "a checkpoint of one rank": (
        Case(callbacks=(SaveAlone,)),
        ("checkpoint to save", "request for the next training batch"),
    ),
    "limits that all reach": (
        Case((4, 3), ((4, 2),), options={"limit_train_batches": 3, "limit_val_batches": 2}),
        None,
    ),
    "max_steps before an end": (Case((4, 3), options={"max_steps": 2}), None),
    "max_steps at an end": (Case((4, 3), options={"max_steps": 3, "limit_val_batches": 0}), None),
    "equal streams": (Case(options={"num_sanity_val_steps": 2}), None),
}


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows without a length."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


class Evaluated(UserModule):
    """A module with every kind of evaluation, over several loaders."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"], batch["labels"], self._context())


def _loader(case: Case, count: int) -> DataLoader[Any]:
    tokens, labels = make_batches(2)[dist.get_rank() * 2 // dist.get_world_size()]
    rows = [{"input_ids": tokens[0], "labels": labels[0]}] * count
    return DataLoader(cast("Any", rows if case.has_length else Stream(rows)), batch_size=1)


def _outcome(case: Case) -> str:
    """Returns the error of this rank, or its number of steps."""
    group = dist.get_rank() * 2 // dist.get_world_size()
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=RingAttentionStrategy(data_parallel_size=2),
        logger=False,
        enable_checkpointing=any(issubclass(each, LastCheckpoint) for each in case.callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[each() for each in case.callbacks],
        **options | case.options,
    )
    module = LanguageModel(MODEL, OPTIMIZER) if case.module == "language model" else Evaluated("value")
    held_out = [_loader(case, counts[group]) for counts in case.held_out]
    try:
        if case.stage == "fit":
            trainer.fit(module, _loader(case, case.training[group]), held_out)
        else:
            getattr(trainer, case.stage)(module, held_out)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{trainer.global_step} steps"


def _outcomes(names: list[str]) -> dict[str, str]:
    quiet()
    return {name: _outcome(CASES[name][0]) for name in names}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(2, _outcomes, [*CASES])


def _check(outcome: str, places: tuple[str, str] | None, ranks_of_group: int) -> None:
    if places is None:
        assert outcome.endswith(" steps")
        return
    assert outcome.startswith("RankMismatch: ranks disagree on their place in the run")
    lines = [line.replace("   <-- differs", "") for line in outcome.splitlines() if line.startswith("  rank ")]
    assert lines == [f"  rank {rank}: {places[rank // ranks_of_group]}" for rank in range(2 * ranks_of_group)]
    assert "need equal numbers of batches" in outcome
    assert "drop_last=True" in outcome


@pytest.mark.parametrize("name", CASES)
def test_every_rank_names_the_places_of_all(outcomes: list[dict[str, str]], name: str) -> None:
    for rank in outcomes:
        _check(rank[name], CASES[name][1], 1)


def test_rings_of_two_ranks() -> None:
    names = ["streams", "a limit that one stream does not reach", "equal streams"]
    for rank in run_ranks(4, _outcomes, names):
        for name in names:
            _check(rank[name], CASES[name][1], 2)
