"""Gathered weights that stay for the backward are rounded: nothing is written from them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning.transformers_model import TransformersModel
from tests.helpers.distributed import run_ranks
from tests.train.lightning.test_transformers_model import config_of
from tests.train.runs import Run as Sequences
from tests.train.runs import sequences

pytest.importorskip("peft")
from tests.train.lightning.test_transformers_model import Run as Model
from tests.train.models.test_lora import FEW


class Saves(pl.Callback):
    """Writes the adapters after a step, and again after an evaluation that leaves the weights gathered."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.save_pretrained(f"{self.folder}/before")
        with torch.no_grad():
            pl_module._loss(batch)
        pl_module.save_pretrained(f"{self.folder}/after")


def _on_rank(folder: str) -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"limit_val_batches": 0, "enable_model_summary": False, "accelerator": "cpu", "devices": 2}
    trainer = pl.Trainer(strategy=RingAttentionStrategy(), max_steps=1, callbacks=[Saves(folder)], **quiet)
    module = TransformersModel(
        f"{folder}/base", compute_dtype="bfloat16", lora=FEW, reshard_after_forward=False, seed=3
    )
    loader: Any = DataLoader(cast("Any", sequences(Sequences(epoch_batches=1))), batch_size=2)
    trainer.fit(module, loader, loader)


def test_adapters_are_written_unrounded_after_an_evaluation(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_config(config_of(Model()))
    base.save_pretrained(tmp_path / "base")
    run_ranks(2, _on_rank, str(tmp_path))
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert any(not torch.equal(x, x.bfloat16().float()) for x in before.values())
