"""Training steps do not wait for the GPU."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.distributed import run_ranks
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


class Fused(LanguageModel):
    """A model with the optimizer that it has on a GPU."""

    def configure_optimizers(self) -> Any:
        configured: Any = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["fused"], group["foreach"] = True, None
        return configured


def watched(module: LanguageModel, run: Run, *callbacks: Callback) -> list[str]:
    """Returns the places at which steps 3 and 4 of a run would wait for a GPU."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    seen, strategy = Synchronisations(), Strategy()
    strategy.seen = seen
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=5,
        accumulate_grad_batches=run.micro_batches,
        gradient_clip_val=run.max_norm,
        callbacks=[Watch(seen, 2, 4), *callbacks],
        log_every_n_steps=100,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with seen.watched():
        trainer.fit(module, Data(run))
    return seen.places


RUNS = {
    "plain": Run(max_norm=1.0),
    "accumulated": Run(micro_batches=2, max_norm=1.0),
    "packed": Run(packed=True),
}


def _decoder() -> dict[str, list[str]]:
    optimizer = OptimizerConfig(warmup_steps=1)
    return {name: watched(Fused(MODEL, optimizer), run) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def places() -> dict[str, list[str]]:
    return run_ranks(1, _decoder)[0]


@pytest.mark.parametrize("name", RUNS)
def test_a_batch_is_moved_without_waiting_for_the_gpu(places: dict[str, list[str]], name: str) -> None:
    waits = [place for place in places[name] if "lightning/batch.py" in place or "lightning/strategy.py" in place]
    assert not waits, "\n".join(waits)


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
