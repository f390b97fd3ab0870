"""Epochs of unequal length: where they end and validate, in a run and after a resume."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.data.module import TextDataModule
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.config import ModelConfig
from tests.helpers.distributed import run_ranks

TEXT = "".join(chr(33 + i % 90) for i in range(940))
MODEL = ModelConfig(vocab_size=257, dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=16)


Steps = tuple[list[int], list[int]]  # after which epochs end, and after which validations run


class Seen(Callback):
    """Records the steps after which epochs end and validations run."""

    def __init__(self) -> None:
        self.epochs, self.validations = list[int](), list[int]()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validations.append(trainer.global_step)


def _train(folder: Path, start: int | None, batch_size: int = 2, *callbacks: Callback, **options: Any) -> Steps:
    """Trains on 42 batches of 2 samples, from the checkpoint of step `start`; without one it saves every fifth step."""
    seen = Seen()
    saves = [] if start is not None else [LastCheckpoint(every_n_steps=5, keep=99)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=RingAttentionStrategy(),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[seen, *saves, *callbacks],
        **options,
    )
    model = LanguageModel(MODEL, OptimizerConfig(warmup_steps=1, max_steps=99), "float64")
    corpus: Any = {"corpus": str(folder / "text.txt"), "cache_dir": str(folder / "cache"), "documents": "joined"}
    data = TextDataModule(**corpus, context_length=10, batch_size=batch_size, val_fraction=0.1)
    path = None if start is None else str(folder / f"checkpoints/step-{start:08d}")
    trainer.fit(model, data, ckpt_path=path, weights_only=False)
    return seen.epochs, seen.validations


def _all(folder: Path) -> dict[str, Steps]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name in ("parts", "whole", "growing"):
        (folder / name).mkdir()
        (folder / name / "text.txt").write_text(TEXT)
    found: dict[str, Steps] = {}
    for start in (None, 25, 35, 40, 45):
        found[f"parts {start}"] = _train(folder / "parts", start, limit_train_batches=11, max_epochs=8)
    found["whole None"] = _train(folder / "whole", None, max_epochs=1)
    for start, batch_size in ((20, 4), (20, 6), (30, 4), (40, 1)):
        found[f"whole {start} {batch_size}"] = _train(folder / "whole", start, batch_size, max_epochs=3)
    for start in (None, 50):
        scheduler = GradientAccumulationScheduler({0: 1, 1: 3})
        found[f"growing {start}"] = _train(folder / "growing", start, 2, scheduler, max_epochs=3)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    return run_ranks(1, _all, tmp_path_factory.mktemp("epochs"))[0]


pytestmark = pytest.mark.xdist_group("epochs")


@pytest.mark.parametrize("start", [None, 25, 35, 40, 45])
def test_parts_of_the_data_end_and_validate_where_they_did(found: dict[str, Steps], start: int | None) -> None:
    ends = [11, 22, 33, 42, 53, 64, 75, 84]  # 42 batches in parts of 11
    left = [end for end in ends if end > (start or 0)]
    assert found[f"parts {start}"] == (left, left)


@pytest.mark.parametrize(
    ("start", "batch_size", "ends"),
    [(20, 4, [31, 52, 73]), (20, 6, [28, 42, 56]), (30, 4, [36, 57, 78]), (40, 1, [44, 128, 212])],
)
def test_another_batch_size_trains_whole_epochs(
    found: dict[str, Steps], start: int, batch_size: int, ends: list[int]
) -> None:
    assert found[f"whole {start} {batch_size}"] == (ends, ends)  # the rest of 84 samples, then twice all of them


def test_accumulation_of_an_epoch_is_resumed(found: dict[str, Steps]) -> None:
    assert found["growing None"] == ([42, 56, 70], [42, 56, 70])
    assert found["growing 50"] == ([56, 70], [56, 70])
