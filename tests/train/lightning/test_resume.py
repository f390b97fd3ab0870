"""Resumed runs: hyperparameters of the new configuration, the same module again, and averages of weights alone."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.callbacks.ema import ExponentialMovingAverage
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.preemption import Preemption
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_user_modules import quiet
from tests.train.runs import MODEL, sequences, whole
from tests.train.runs import Run as Sequences

FIRST = OptimizerConfig(lr=1e-3, weight_decay=0.1, warmup_steps=1, max_steps=4)
CHANGED = OptimizerConfig(lr=5e-2, betas=(0.8, 0.9), weight_decay=0.7, warmup_steps=1, max_steps=8)


class Recorded(LanguageModel):
    """Records the hyperparameters of each step."""

    def __init__(self, optimizer: OptimizerConfig) -> None:
        super().__init__(MODEL, optimizer, "float64")
        self.steps = list[list[dict[str, Any]]]()

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        names = "lr", "betas", "weight_decay"
        groups = cast("Any", self.optimizers()).param_groups
        self.steps.append([{name: group[name] for name in names} for group in groups])


def _trainer(steps: int, *callbacks: Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=RingAttentionStrategy(),
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        limit_test_batches=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def _loader() -> DataLoader[Any]:
    return DataLoader(cast("Any", sequences(Sequences())), batch_size=2)


def _everything(folder: str) -> dict[str, Any]:
    quiet()
    warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch")
    seen, texts = dict[str, Any](), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("ringflash").addHandler(handler)

    module, trainer = Recorded(FIRST), _trainer(2)
    trainer.fit(module, _loader(), _loader())
    trainer.save_checkpoint(f"{folder}/two")
    trainer = _trainer(4)
    trainer.fit(module, _loader(), _loader(), ckpt_path=f"{folder}/two")  # the module still has gradients
    seen["same module"] = {name: whole(p) for name, p in module.named_parameters()}

    texts.clear()
    module = Recorded(FIRST)
    _trainer(4).fit(module, _loader(), _loader(), ckpt_path=f"{folder}/two")
    seen["other module"] = {name: whole(p) for name, p in module.named_parameters()}
    seen["unchanged"] = [text for text in texts if "Resumed" in text]

    module = Recorded(CHANGED)
    _trainer(4).fit(module, _loader(), _loader(), ckpt_path=f"{folder}/two")
    seen["changed"] = module.steps, [text for text in texts if "Resumed" in text]

    module, averages = Recorded(FIRST), ExponentialMovingAverage(0.5)
    trainer = _trainer(2, averages)
    trainer.fit(module, _loader(), _loader())
    trainer.save_checkpoint(f"{folder}/alone", weights_only=True)
    trainer = _trainer(4, averages)
    trainer.fit(module, _loader(), _loader())
    tested = trainer.test(module, _loader(), ckpt_path=f"{folder}/alone", verbose=False)
    fresh = _trainer(4).test(Recorded(FIRST), _loader(), ckpt_path=f"{folder}/alone", verbose=False)
    seen["tested"] = tested, fresh
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, _everything, str(tmp_path_factory.mktemp("resume")))[0]


pytestmark = pytest.mark.xdist_group("resume")


def test_the_same_module_resumes_as_a_new_one(seen: dict[str, Any]) -> None:
    for name, expected in seen["other module"].items():
        assert seen["same module"][name].equal(expected)
    assert seen["unchanged"] == []


def test_a_changed_configuration_takes_the_place_of_the_checkpoint_s(seen: dict[str, Any]) -> None:
    steps, texts = seen["changed"]
    assert len(steps) == 2
    for step, groups in enumerate(steps, start=2):
        assert [group["lr"] for group in groups] == pytest.approx([5e-2 * CHANGED.lr_scale(step)] * 2)
        assert [group["betas"] for group in groups] == [(0.8, 0.9)] * 2
        assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    (text,) = texts
    rates = "lr 0.05 (0.001 in the checkpoint)", "max_steps 8 (4 in the checkpoint)"
    for part in (*rates, "weight_decay 0.7 (0.1 in the checkpoint)", "betas"):
        assert part in text
    assert "warmup_steps" not in text


def test_weights_that_were_saved_alone_are_tested_after_training_with_averages(seen: dict[str, Any]) -> None:
    (tested,), (fresh,) = seen["tested"]
    assert tested == fresh


@pytest.mark.parametrize("place", range(3))
def test_preemption_saves_after_other_callbacks(place: int) -> None:
    others: list[Callback] = [ExponentialMovingAverage(0.5), LastCheckpoint()]
    preemption = Preemption()
    trainer = SimpleNamespace(callbacks=[*others[:place], preemption, *others[place:]])
    preemption.setup(trainer, cast("Any", None), "fit")
    assert trainer.callbacks == [others[0], preemption, others[1]]
