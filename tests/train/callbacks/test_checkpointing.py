"""LastCheckpoint, Preemption and skipped steps, in runs of two ranks that all tests of this file share."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.callbacks.nonfinite import NonFinite
from ringflash.train.checkpoint import random_state, save
from ringflash.train.checkpoint.load import load_decoder
from ringflash.train.checkpoint.manifest import STATE, complete_in, verify
from ringflash.train.data.module import TextDataModule
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.preemption import Preemption
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.loss import TokenLosses
from tests.helpers.distributed import run_ranks
from tests.train.runs import whole

pytestmark = pytest.mark.xdist_group("checkpointing")

MODEL = ModelConfig(vocab_size=257, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=48)


@dataclass
class Fitted:
    """Outcome of a run on one rank."""

    losses: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    random: float = 0.0
    step: int = 0
    error: str = ""
    said: str = ""


class Model(LanguageModel):
    """A model that records its loss of each step, and has a poisoned loss at the steps `poisoned` of rank 1."""

    def __init__(self, fitted: Fitted, poisoned: range, nonfinite: NonFinite | None) -> None:
        optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, max_steps=20)
        super().__init__(MODEL, optimizer, "float64", nonfinite=nonfinite)
        self.fitted, self.poisoned = fitted, poisoned

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if name == "train/loss":
            self.fitted.losses[self.trainer.global_step] = float(value)
        super().log(name, value, *args, **kwargs)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[TokenLosses, Tensor]:
        losses, num_valid = super()._loss(batch)
        bad = self.trainer.training and self.trainer.global_step in self.poisoned and dist.get_rank() == 1
        return TokenLosses(losses.total * (torch.nan if bad else 1), losses.tokens), num_valid


class At(Callback):
    """Runs `action` at the end of a step, or at the start of the validation after that step."""

    def __init__(self, step: int, action: Callable[[], None], validating: bool = False) -> None:
        self.step, self.action, self.validating = step, action, validating

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step and not self.validating:
            self.action()

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step and self.validating:
            self.action()


def fit(
    folder: Path,
    steps: int,
    *callbacks: Callback,
    resume: Path | None = None,
    poisoned: range = range(0),
    nonfinite: NonFinite | None = None,
    validate: bool = False,
    data_parallel: int = 1,
) -> Fitted:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RingAttentionStrategy(data_parallel_size=data_parallel),
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[*callbacks],
        default_root_dir=folder,
        limit_val_batches=2 if validate else 0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fitted = Fitted()
    module = Model(fitted, poisoned, nonfinite)
    data = TextDataModule(
        str(folder.parent / "text.txt"), 64, 2, val_fraction=0.1, cache_dir=str(folder.parent / "cache")
    )
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            trainer.fit(module, data, ckpt_path=resume and str(resume))
        except (Exception, SystemExit) as error:
            fitted.error = f"{type(error).__name__} {getattr(error, 'code', '')}: {error}"
    fitted.said, fitted.step, fitted.random = said.getvalue(), trainer.global_step, torch.rand(()).item()
    fitted.weights = {name: whole(parameter) for name, parameter in module.decoder.named_parameters()}
    return fitted


def damage(file: Path) -> None:
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    dist.barrier()


def terminate_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def disk_full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _all_runs(base: str) -> dict[str, Fitted]:
    runs: dict[str, Fitted] = {}
    root, write = Path(base), save._Writer.write_data
    # The writer of step 2 waits until step 3 is done. If training waited for the save, the writer would time out.
    gate = threading.Event()

    def gated(*args: Any) -> Any:
        assert gate.wait(20)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save._Writer, "write_data", gated)
        runs["straight"] = fit(root / "straight", 6, At(3, gate.set), LastCheckpoint(2, keep_every_n_steps=2))
    runs["two"] = fit(root / "half", 2, LastCheckpoint(every_n_steps=100))
    runs["half"] = fit(root / "half", 3, LastCheckpoint(every_n_steps=100), resume=root / "half/checkpoints/last")
    runs["resumed"] = fit(root / "resumed", 6, resume=root / "half/checkpoints/last")
    runs["other sizes"] = fit(root / "resumed", 6, resume=root / "half/checkpoints/last", data_parallel=2)

    if dist.get_rank() == 0:
        shutil.copytree(root / "straight", root / "damaged")
    dist.barrier()
    damage(root / "damaged/checkpoints/last" / STATE)
    runs["damaged"] = fit(root / "nothing", 8, resume=root / "damaged/checkpoints/last")
    runs["fallen back"] = fit(root / "nothing", 6, resume=root / "damaged/checkpoints")

    saver = LastCheckpoint(every_n_steps=2, keep=1)
    with pytest.MonkeyPatch.context() as patch:
        break_it = At(3, lambda: patch.setattr(save._Writer, "write_data", disk_full) if dist.get_rank() else None)
        runs["full"] = fit(root / "full", 12, break_it, saver)
    runs["space again"] = fit(root / "full", 4, saver, resume=root / "full/checkpoints")

    runs["by the clock"] = fit(root / "clock", 2, LastCheckpoint(100, every_n_minutes=1e-9, keep=3))

    told = At(3, terminate_on_rank_1)
    runs["preempted"] = fit(root / "preempted", 9, told, Preemption(), LastCheckpoint(every_n_steps=2))
    told = At(3, terminate_on_rank_1)
    callbacks = [told, Preemption(), LastCheckpoint(every_n_steps=2)]
    runs["preempted in the last step"] = fit(root / "in the last step", 3, *callbacks)
    callbacks = [At(4, terminate_on_rank_1), Preemption(), LastCheckpoint(every_n_steps=3)]
    runs["preempted before validation"] = fit(root / "before validation", 9, *callbacks, validate=True)
    told = At(4, terminate_on_rank_1, validating=True)
    callbacks = [told, Preemption(), LastCheckpoint(every_n_steps=3)]
    runs["preempted in validation"] = fit(root / "validating", 9, *callbacks, validate=True)
    runs["after that"] = fit(root / "after", 6, resume=root / "validating/checkpoints", validate=True)

    skip = NonFinite("skip", max_consecutive=2)
    runs["skipped"] = fit(root / "nothing", 5, poisoned=range(1, 3), nonfinite=skip)
    runs["too many"] = fit(root / "nothing", 9, poisoned=range(1, 9), nonfinite=skip)
    return runs


@dataclass
class Runs:
    """Outcomes of `_all_runs` by rank, and the folder with the checkpoints."""

    folder: Path
    ranks: list[dict[str, Fitted]]

    def __getitem__(self, name: str) -> Fitted:
        first, second = (rank[name] for rank in self.ranks)
        assert first.losses == second.losses
        assert (first.error, first.step) == (second.error, second.step)
        return first


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(60)))
    return Runs(folder, run_ranks(2, _all_runs, str(folder)))


def steps(folder: Path) -> list[tuple[str, int | None]]:
    return [(path.name, verify(path).step) for path in complete_in(folder / "checkpoints")]


def test_training_goes_on_while_a_checkpoint_is_written(runs: Runs) -> None:
    assert runs["straight"].error == ""
    assert steps(runs.folder / "straight") == [("last", 6), ("step-00000004", 4), ("step-00000002", 2)]


def test_what_is_written_later_is_of_its_own_step(runs: Runs) -> None:
    saved = load_decoder(runs.folder / "straight/checkpoints/step-00000002", dtype=torch.float64)
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, runs["two"].weights[name])


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(runs: Runs) -> None:
    straight, resumed = runs["straight"], runs["resumed"]
    assert runs["half"].losses == {2: straight.losses[2]}
    assert resumed.losses == {step: straight.losses[step] for step in (3, 4, 5)}
    for name, weight in straight.weights.items():
        assert torch.equal(weight, resumed.weights[name])
    for rank in runs.ranks:
        assert rank["resumed"].random == rank["straight"].random
    assert len({rank["resumed"].random for rank in runs.ranks}) == 2


def test_resume_in_the_middle_of_an_epoch_with_other_parallel_sizes(runs: Runs) -> None:
    straight, other = runs["straight"], runs["other sizes"]
    assert [*other.losses] == [3, 4, 5]
    assert [*other.losses.values()] == pytest.approx([straight.losses[step] for step in (3, 4, 5)], rel=1e-8)
    for name, weight in straight.weights.items():
        torch.testing.assert_close(other.weights[name], weight, atol=1e-8, rtol=0)


def test_damage_falls_back_only_where_asked_for_the_newest(runs: Runs) -> None:
    assert runs["damaged"].error.startswith("CheckpointCorrupt")
    assert "damaged/checkpoints/last/state.pt" in runs["damaged"].error
    assert runs["fallen back"].losses == {step: runs["straight"].losses[step] for step in (4, 5)}
    said = [rank["fallen back"].said for rank in runs.ranks]
    assert "last/state.pt: expected the file that was saved, got other content" in said[0]
    assert "going on from" in said[0]
    assert "step-00000004" in said[0]
    assert said[1] == ""


def test_saves_by_the_clock(runs: Runs) -> None:
    assert runs["by the clock"].error == ""
    assert steps(runs.folder / "clock") == [("last", 2), ("step-00000001", 1)]


def test_a_failure_in_the_background_is_raised_by_all_at_one_step(runs: Runs) -> None:
    error = runs["full"].error
    assert error.startswith("CheckpointError")
    assert "got rank 1: OSError: [Errno 28] No space left" in error
    assert 4 < runs["full"].step < 12
    assert runs["space again"].losses == {step: runs["straight"].losses[step] for step in (2, 3)}
    assert steps(runs.folder / "full") == [("last", 4)]


def test_sigterm_on_one_rank_ends_all_after_the_same_step(runs: Runs) -> None:
    preempted = runs["preempted"]
    assert preempted.error.startswith("Preempted 143: SIGTERM on rank 1: stopped after step")
    assert preempted.step in (3, 4)  # depends on the order of the sending and the checking callback
    assert steps(runs.folder / "preempted")[0] == ("last", preempted.step)
    assert [rank["preempted"].said.count("SIGTERM on rank 1") for rank in runs.ranks] == [1, 0]


@pytest.mark.parametrize(("when", "step"), [("in the last step", 3), ("before validation", 4)])
def test_sigterm_in_a_step_that_no_other_follows(runs: Runs, when: str, step: int) -> None:
    error = runs[f"preempted {when}"].error
    assert error.startswith(f"Preempted 143: SIGTERM on rank 1: stopped after step {step}")
    assert steps(runs.folder / when)[0] == ("last", step)


def test_sigterm_in_a_validation(runs: Runs) -> None:
    assert runs["preempted in validation"].error.startswith("Preempted 143: SIGTERM on rank 1: stopped after step 4")
    assert steps(runs.folder / "validating")[0] == ("last", 4)
    after = runs["after that"]
    assert after.error == ""
    assert after.losses == {step: runs["straight"].losses[step] for step in (4, 5)}


def test_steps_that_are_not_finite_are_skipped_up_to_a_limit(runs: Runs) -> None:
    skipped = runs["skipped"]
    assert [*skipped.losses] == [0, 3, 4]
    assert skipped.step == 5
    assert all(torch.isfinite(weight).all() for weight in skipped.weights.values())
    assert runs.ranks[0]["skipped"].said.count("skipped step") == 2
    assert (
        "skipped step 1, batch 1: loss nan, gradient norm nan, first seen on ranks [1]" in runs.ranks[0]["skipped"].said
    )
    assert runs["too many"].error.startswith("NonFiniteError : step 3")


def test_random_numbers_elsewhere_are_new() -> None:
    states = {"cpu": torch.get_rng_state().expand(2, -1)}
    before = torch.get_rng_state()
    numbers = []
    for world_size, step in ((2, 5), (3, 5), (3, 6)):
        torch.manual_seed(1)
        random_state.restore(states, 1, world_size, torch.device("cpu"), step)
        numbers.append(torch.rand(()).item())
    torch.manual_seed(1)
    assert len({*numbers, torch.rand(()).item()}) == 4
    torch.set_rng_state(before)
    assert numbers[0] == torch.rand(()).item()


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: LastCheckpoint(every_n_steps=0), "every_n_steps"),
        (lambda: LastCheckpoint(every_n_minutes=0.0), "every_n_minutes"),
        (lambda: LastCheckpoint(keep=0), "keep"),
        (lambda: LastCheckpoint(keep_every_n_steps=0), "keep_every_n_steps"),
        (lambda: NonFinite("ignore"), "action"),  # type: ignore[arg-type]
        (lambda: NonFinite("skip", 0), "max_consecutive"),
    ],
)
def test_bad_options(make: Callable[[], Any], argument: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.argument == argument


def test_urls_are_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = pl.Trainer(default_root_dir="memory://runs", logger=False, accelerator="cpu", devices=1)
    with pytest.raises(CheckpointError, match="default_root_dir: expected a folder .*got memory://runs"):
        LastCheckpoint().on_train_start(trainer, pl.LightningModule())
    with pytest.raises(CheckpointError, match="filepath: expected a folder .*got s3://bucket/last"):
        RingAttentionStrategy().save_checkpoint({}, "s3://bucket/last")
    assert not list(tmp_path.iterdir())
