"""ExponentialMovingAverage: an average of sharded weights that is saved, resumed and used for validation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ringflash.errors import ArgumentError, ConfigError
from ringflash.train.callbacks.ema import ExponentialMovingAverage
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.distributed import run_ranks
from tests.test_token_mean import make_batches, make_model
from tests.train.lightning.test_user_modules import UserModule, quiet
from tests.train.runs import whole

DECAY, STEPS = 0.75, 4


class Trained(UserModule):
    """A module that trains with large steps and records the weights after each step and each validation batch."""

    def __init__(self) -> None:
        super().__init__("value")
        self.seen: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append({name: whole(p) for name, p in self.named_parameters()})

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.validated.append({name: whole(p) for name, p in self.named_parameters()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def _fit(steps: int, save: str | None = None, resume: str | None = None) -> dict[str, Any]:
    quiet()
    ema = ExponentialMovingAverage(DECAY)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=RingAttentionStrategy(),
        max_steps=steps,
        limit_val_batches=1,
        max_epochs=-1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[ema],
    )
    module = Trained()
    rows = [{"input_ids": t[row], "labels": y[row]} for t, y in make_batches(STEPS // 2) for row in range(6)]
    loader = DataLoader(cast("Any", rows), batch_size=6)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    if save is not None:
        with ema.averaged(module):  # the checkpoint must hold the weights, not the average
            trainer.save_checkpoint(save)
    return {
        "seen": module.seen,
        "validated": module.validated,
        "weights": {name: whole(p) for name, p in module.named_parameters()},
        "averages": {name: whole(average) for name, average in ema.averages.items()},
    }


def _runs(folder: str) -> dict[str, Any]:
    path = f"{folder}/{dist.get_world_size()}"
    return {"straight": _fit(STEPS), "first": _fit(2, save=path), "resumed": _fit(STEPS, resume=path)}


def plain(seen: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    shadow = {f"model.{name}": p.detach().clone() for name, p in make_model().named_parameters()}
    averages = []
    for weights in seen:
        shadow = {name: DECAY * shadow[name] + (1 - DECAY) * weights[name] for name in shadow}
        averages.append(shadow)
    return averages


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plain_average_saved_resumed_and_validated(world_size: int, tmp_path: Path) -> None:
    outcome = run_ranks(world_size, _runs, str(tmp_path))[0]
    straight, first, resumed = (outcome[name] for name in ("straight", "first", "resumed"))
    averages = plain(straight["seen"])
    for name, expected in averages[-1].items():
        torch.testing.assert_close(straight["averages"][name], expected, atol=1e-12, rtol=0)
        assert (expected - straight["weights"][name]).abs().max() > 1e-3
        assert torch.equal(straight["weights"][name], straight["seen"][-1][name])
        torch.testing.assert_close(first["averages"][name], averages[1][name], atol=1e-12, rtol=0)
        torch.testing.assert_close(resumed["averages"][name], expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(resumed["weights"][name], straight["weights"][name], atol=1e-12, rtol=0)
        for validated, average in zip(straight["validated"], averages[1::2], strict=True):
            torch.testing.assert_close(validated[name], average[name], atol=1e-12, rtol=0)


class Line(pl.LightningModule):
    """A line that trains by SGD in this process, with one batch of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.line(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader(cast("Any", torch.ones(8, 3)))

    def val_dataloader(self) -> Any:
        return DataLoader(cast("Any", torch.ones(1, 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(ema: ExponentialMovingAverage, steps: int) -> pl.Trainer:
    quiet()
    return pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ema],
    )


def test_a_second_module_gets_averages_of_its_own() -> None:
    ema = ExponentialMovingAverage(DECAY)
    _trainer(ema, 3).fit(Line())
    second = Line()
    before = whole(second.line.weight)
    _trainer(ema, 1).fit(second)
    expected = DECAY * before + (1 - DECAY) * second.line.weight
    torch.testing.assert_close(ema.averages["line.weight"], expected, check_dtype=False)


def test_a_validation_leaves_the_averages_of_the_code_around_it() -> None:
    ema, module = ExponentialMovingAverage(DECAY), Line()
    trainer = _trainer(ema, 3)
    trainer.fit(module)
    weight = whole(module.line.weight)
    with ema.averaged(module):
        trainer.validate(module, verbose=False)
        assert torch.equal(module.line.weight, ema.averages["line.weight"])
    assert torch.equal(module.line.weight, weight)
    assert not torch.equal(module.line.weight, ema.averages["line.weight"])


def test_another_module_keeps_its_weights() -> None:
    ema = ExponentialMovingAverage(DECAY)
    other: Any = Line()
    trainer, weight = _trainer(ema, 3), whole(other.line.weight)
    trainer.fit(Line())
    seen: list[Tensor] = []
    other.validation_step = lambda batch, batch_idx: seen.append(whole(other.line.weight))
    trainer.validate(other, verbose=False)
    assert torch.equal(seen[0], weight)
    with pytest.raises(ArgumentError, match="pl_module: expected the module whose weights were averaged, got Line"):
        ema.averaged(other).__enter__()


def test_averages_of_a_checkpoint_follow_the_module_to_its_device() -> None:
    ema, module, trainer = ExponentialMovingAverage(DECAY), Line(), cast("Any", SimpleNamespace(global_step=1))
    ema.on_load_checkpoint(trainer, module, {})  # before the strategy moves the module
    module.to("meta")
    ema.on_train_start(trainer, module)
    assert {average.device.type for average in ema.averages.values()} == {"meta"}


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_is_none(decay: float) -> None:
    with pytest.raises(ConfigError, match="decay: expected from 0 to below 1"):
        ExponentialMovingAverage(decay)
