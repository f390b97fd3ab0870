"""Profile: a trace that an error cuts short leaves no profiler behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils.data import DataLoader

from ringflash.train.callbacks.profiler import Profile
from tests.train.lightning.test_user_modules import quiet


class Breaks(pl.LightningModule):
    """A module whose third step raises ValueError."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 1)
        self.is_profiled: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.is_profiled.append(profiler._is_profiler_enabled)
        if batch_idx == 2:
            raise ValueError("a broken batch")
        return self.line(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_an_error_ends_the_profiler(tmp_path: Path) -> None:
    quiet()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=9,
        logger=False,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Profile((3, 9))],
    )
    module = Breaks()
    with pytest.raises(ValueError, match="a broken batch"):
        trainer.fit(module, DataLoader(cast("Any", torch.ones(9, 3))))
    assert module.is_profiled == [False, False, True]
    assert not profiler._is_profiler_enabled
