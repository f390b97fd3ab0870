"""Training steps do not wait for the GPU."""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ProgressBar

from ringflash.train.callbacks import progress
from ringflash.train.callbacks.ema import ExponentialMovingAverage
from ringflash.train.callbacks.loss_by_position import LossByPosition
from ringflash.train.callbacks.progress import RingProgressBar
from ringflash.train.callbacks.summary import RunSummary
from ringflash.train.callbacks.throughput import Throughput
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.preemption import Preemption
from ringflash.train.lightning.ring_module import RingModule
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_model import TransformersModel
from tests.helpers.distributed import run_ranks
from tests.train.runs import MODEL, Data, Run
from tests.train.synchronisations import Synchronisations


class Strategy(RingAttentionStrategy):
    """Marks each batch as lying on the GPU once it was moved."""

    seen: Synchronisations

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        moved = super().batch_to_device(batch, *args, **kwargs)
        self.seen.mark({name: value for name, value in moved.items() if name != "cu_seqlens"})
        return moved


class Watch(Callback):
    """Counts from the end of step `first` to the end of step `last`."""

    def __init__(self, seen: Synchronisations, first: int, last: int) -> None:
        self.seen, self.first, self.last = seen, first, last

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.mark(list(pl_module.parameters()))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.seen.counting = self.first <= trainer.global_step < self.last


def fused(configured: Any) -> Any:
    """Makes the optimizer of `configure_optimizers` the one that a module has on a GPU."""
    for group in configured["optimizer"].param_groups:
        group["fused"], group["foreach"] = True, None
    return configured


class Fused(LanguageModel):
    def configure_optimizers(self) -> Any:
        return fused(super().configure_optimizers())


class FusedTransformers(TransformersModel):
    def configure_optimizers(self) -> Any:
        return fused(super().configure_optimizers())


@dataclass(frozen=True)
class Seen:
    """Places at which steps 3 and 4 of a run would wait for a GPU, and the operators of these steps."""

    places: list[str]
    operators: dict[str, int]


def watched(module: RingModule, run: Run, *callbacks: Callback) -> Seen:
    """Trains for five steps and watches steps 3 and 4."""
    seen, strategy = Synchronisations(), Strategy()
    strategy.seen = seen
    with seen.watched():
        trained(module, replace(run, steps=5), strategy, Watch(seen, 2, 4), *callbacks)
    return Seen(seen.places, dict(seen.operators))


def trained(
    module: RingModule, run: Run, strategy: RingAttentionStrategy, *callbacks: Callback, accelerator: str = "cpu"
) -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=run.steps,
        accumulate_grad_batches=run.micro_batches,
        gradient_clip_val=run.max_norm,
        callbacks=[*callbacks],
        log_every_n_steps=100,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
    )
    trainer.fit(module, Data(run))


RUNS = {
    "plain": Run(max_norm=1.0),
    "accumulated": Run(micro_batches=2, max_norm=1.0),
    "packed": Run(packed=True),
}


def _decoder() -> dict[str, Seen]:
    optimizer = OptimizerConfig(warmup_steps=1)
    bar = RingProgressBar()
    bar.lines = False
    bar.enable()
    callbacks = [bar, RunSummary(sample_tokens=0), LossByPosition(), Throughput(0), ExponentialMovingAverage()]
    seen = {name: watched(Fused(MODEL, optimizer), run) for name, run in RUNS.items()}
    with mock.patch.object(progress, "LINE_SECONDS", 60.0):
        seen["callbacks"] = watched(Fused(MODEL, optimizer), RUNS["plain"], Preemption(), *callbacks)
    return seen


def _on_ranks() -> Seen:
    return watched(Fused(MODEL), RUNS["accumulated"])


def _transformers() -> dict[str, Seen]:
    from transformers import Gemma3TextConfig, LlamaConfig

    shape: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    configs = {
        "one mask": LlamaConfig(**shape),
        "two masks": Gemma3TextConfig(
            **shape, sliding_window=8, layer_types=["sliding_attention", "full_attention"], pad_token_id=0
        ),
    }
    return {name: watched(FusedTransformers(config), RUNS["packed"]) for name, config in configs.items()}


def test_a_transformers_model_reads_each_mask_and_the_positions_once() -> None:
    pytest.importorskip("transformers")
    for seen in run_ranks(2, _transformers):
        for name, masks in (("one mask", 1), ("two masks", 2)):
            places = [place.split(":")[0] for place in seen[name].places]
            own = "ringflash.integrations.transformers"
            # transformers itself looks for packed documents, once for each mask.
            assert Counter(places) == {
                f"{own}.mask": 2 * masks,  # in two steps
                f"{own}.positions": 2,
                "transformers.masking_utils": 2 * masks,
            }


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    return {**run_ranks(1, _decoder)[0], "two ranks": run_ranks(2, _on_ranks)[1]}


@pytest.mark.parametrize("name", [*RUNS, "callbacks", "two ranks"])
def test_a_step_does_not_wait_for_the_gpu(seen: dict[str, Seen], name: str) -> None:
    assert not seen[name].places, "\n".join(seen[name].places)


@pytest.mark.parametrize("name", RUNS)
def test_a_step_computes_one_norm_of_its_gradients(seen: dict[str, Seen], name: str) -> None:
    assert seen[name].operators["aten::_foreach_norm"] == 2  # in two steps


def test_gradients_of_a_window_are_rescaled_together(seen: dict[str, Seen]) -> None:
    assert "aten::mul_" not in seen["accumulated"].operators
    assert seen["accumulated"].operators["aten::_foreach_mul_"] == 2 * 2  # for the window's tokens, and to clip


class Clipped(LanguageModel):
    """A model that compares its clipped gradients with those of `clip_grad_norm_`."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.equal: list[bool] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.grad.clone() for p in parameters]
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        clipped = [p.grad for p in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        each = list(zip(parameters, clipped, before, strict=True))
        self.equal.append(all(torch.equal(p.grad.to_local(), x.to_local()) for p, x, _ in each))
        assert not all(torch.equal(x.to_local(), y.to_local()) for _, x, y in each)


def _clipped() -> list[bool]:
    module = Clipped()
    trained(module, Run(steps=2, max_norm=0.3), RingAttentionStrategy())
    return module.equal


def test_clipped_gradients_have_the_bits_of_torch() -> None:
    assert run_ranks(2, _clipped) == [[True, True]] * 2


class Refuse(Callback):
    """Makes torch raise in steps 3 and 4 where an operator of PyTorch waits for the GPU."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error" if 2 <= trainer.global_step < 4 else "default")


def _on_gpu(name: str) -> str:
    module = LanguageModel(MODEL, OptimizerConfig(warmup_steps=1), compute_dtype="bfloat16")
    try:
        trained(module, replace(RUNS[name], steps=5), RingAttentionStrategy(), Refuse(), accelerator="gpu")
    except RuntimeError:
        return traceback.format_exc()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["plain", "accumulated"])
def test_a_step_on_a_gpu_waits_nowhere(name: str) -> None:
    assert run_ranks(1, _on_gpu, name, backend="nccl") == [""]


def test_a_place_does_not_depend_on_where_a_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "reading.py").write_text("def read(x):\n    return x.item()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen, x = Synchronisations(), torch.ones(1)
    seen.mark(x)
    seen.counting = True
    with seen.watched():
        importlib.import_module("elsewhere.reading").read(x)
    assert seen.places == ["elsewhere.reading:2 aten::_local_scalar_dense"]


def test_waits_are_seen() -> None:
    seen, x = Synchronisations(), torch.arange(3.0)
    seen.mark(x)
    seen.counting = True
    with seen.watched():
        (x.sum() > 1).item()
        x[x > 1]
        bool((x * 2).any())
        (x + 1).tolist()
        torch.tensor(1, device="cpu")
        host = torch.empty(3).copy_(x, non_blocking=True)
        host.tolist()
        torch.ones(3).sum().item()
    names = [place.split(" ", 1)[1] for place in seen.places]
    scalar = "aten::_local_scalar_dense"
    assert names == [scalar, "aten::index", scalar, "tolist", "tensor from the host"]
