"""Steps that are not finite, with an optimizer that skips them on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringflash.train.callbacks.nonfinite import NonFinite, NonFiniteError, StepResult
from ringflash.train.lightning import ring_module
from ringflash.train.lightning.optimizer import OptimizerConfig, can_skip_on_device, make_adamw
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_synchronisations import Fused, trained
from tests.train.runs import MODEL, Run


class Poisoned(Fused):
    """A model with a NaN in its loss at the steps `poisoned` of rank 1."""

    def __init__(self, poisoned: tuple[int, ...], action: Any) -> None:
        optimizer = OptimizerConfig(lr=3e-3, warmup_steps=1)
        super().__init__(MODEL, optimizer, nonfinite=NonFinite(action, max_consecutive=2))
        self.poisoned = poisoned
        self.losses: list[float] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if name == "train/loss":
            self.losses.append(float(value))
        super().log(name, value, *args, **kwargs)

    def _loss(self, batch: dict[str, Tensor]) -> Any:
        losses, num_valid = super()._loss(batch)
        is_bad = self.trainer.global_step in self.poisoned and dist.get_rank() == 1
        return losses._replace(total=losses.total * (torch.nan if is_bad else 1)), num_valid


class Save(Callback):
    """Saves after the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def run(steps: int, poisoned: tuple[int, ...], action: str, *callbacks: Callback) -> dict[str, Any]:
    """Returns the error of a run, its logged losses, its weights and moments, and when each result was read."""
    module, reads, error = Poisoned(poisoned, action), list[tuple[int, int]](), ""
    own = StepResult.error

    def read(result: StepResult) -> NonFiniteError | None:
        reads.append((result.step, module.trainer.global_step))
        return own(result)

    with mock.patch.object(StepResult, "error", read):
        try:
            trained(module, Run(steps=steps, max_norm=1.0), RingAttentionStrategy(), *callbacks)
        except NonFiniteError as raised:
            error = str(raised)
    optimizer: Any = module.trainer.optimizers[0]
    state = [x for entry in optimizer.state.values() for x in entry.values()]
    tensors = [x.to_local() if isinstance(x, DTensor) else x for x in (*module.decoder.parameters(), *state)]
    return {
        "error": error,
        "losses": module.losses,
        "state": [x.detach().clone() for x in tensors],
        "reads": reads,
        "condition": getattr(optimizer, "found_inf", None),
    }


def _runs(folder: str) -> dict[str, dict[str, Any]]:
    path = Path(folder) / "saved"
    outcomes = {
        "one step": run(1, (), "stop"),
        "finite": run(4, (), "stop"),
        "stopped": run(4, (1,), "stop"),
        "stopped at the end": run(2, (1,), "stop"),
        "stopped at a save": run(4, (1,), "stop", Save(path)) | {"saved": path.exists()},
        "skipped": run(5, (1, 2), "skip"),
        "too many": run(9, (1, 2, 3, 4), "skip"),
        "first": run(2, (0,), "skip"),
    }
    with mock.patch.object(ring_module, "can_skip_on_device", return_value=False):
        outcomes["skipped at once"] = run(5, (1, 2), "skip")
    return outcomes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, _runs, str(tmp_path_factory.mktemp("checkpoints")))


def is_same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a["state"], b["state"], strict=True))


@pytest.mark.parametrize("name", ["stopped", "stopped at the end", "stopped at a save"])
def test_a_run_stops_on_every_rank_with_the_state_before_the_step(ranks: Any, name: str) -> None:
    for runs in ranks:
        assert runs[name]["error"].startswith(
            "step 1, batch 1: loss nan, gradient norm nan, first seen on ranks [1]. The optimizer has not stepped."
        )
        assert is_same_state(runs[name], runs["one step"])
        assert not is_same_state(runs["finite"], runs["one step"])
        assert all(x.isfinite().all() for x in runs[name]["state"])


def test_no_checkpoint_follows_a_step_that_is_not_finite(ranks: Any) -> None:
    assert not any(runs["stopped at a save"]["saved"] for runs in ranks)


def test_a_step_skipped_on_the_device_leaves_the_bits_of_one_that_the_host_skips(ranks: Any) -> None:
    for runs in ranks:
        assert runs["skipped"]["error"] == ""
        assert is_same_state(runs["skipped"], runs["skipped at once"])
        first, *others = runs["skipped at once"]["losses"]
        assert runs["skipped"]["losses"] == [first, first, first, *others]


def test_too_many_skipped_steps_stop_the_run_before_the_next(ranks: Any) -> None:
    for runs in ranks:
        assert runs["too many"]["error"].startswith("step 3, batch 3: loss nan")
        assert is_same_state(runs["too many"], runs["one step"])


def test_a_first_step_that_is_not_finite_logs_nothing(ranks: Any) -> None:
    for runs in ranks:
        assert runs["first"]["error"] == ""
        assert len(runs["first"]["losses"]) == 1


def test_results_are_read_a_step_later(ranks: Any) -> None:
    for runs in ranks:
        assert runs["finite"]["reads"] == [(0, 0), (1, 2), (2, 3), (3, 4)]


def test_later_steps_of_the_optimizer_are_unconditional(ranks: Any) -> None:
    assert all(runs[name]["condition"] is None for runs in ranks for name in ("finite", "skipped", "stopped"))


def test_only_fused_optimizers_skip_on_the_device() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    assert not can_skip_on_device(make_adamw(weights, OptimizerConfig()))
    assert can_skip_on_device(torch.optim.AdamW(weights, fused=True))
    assert can_skip_on_device(torch.optim.Adam(weights, fused=True))
    assert not can_skip_on_device(torch.optim.SGD(weights, fused=True))
