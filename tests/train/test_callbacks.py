from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from ringflash.errors import ConfigError
from ringflash.train import throughput
from ringflash.train.callbacks import RunSummary, draw_losses, progress_texts, read_losses, running_mean
from ringflash.train.flops import training_flops_per_token
from ringflash.train.model_config import ModelConfig
from ringflash.train.throughput import Throughput

CONFIG = ModelConfig(vocab_size=257, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)
LOG = """epoch,step,train/loss,val/loss,train/tokens_per_second
0,0,5.5,,
0,4,4.0,,1000.0
0,4,,3.9,
0,9,3.0,,1100.0
"""


def test_picture_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(LOG)
    losses = read_losses(tmp_path / "metrics.csv")
    assert losses == {"train/loss": [(0, 5.5), (4, 4.0), (9, 3.0)], "val/loss": [(4, 3.9)]}
    draw_losses(tmp_path / "metrics.csv", tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1200, 675)
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10


def test_running_mean() -> None:
    assert running_mean([4.0, 2.0, 0.0], 2) == [4.0, 3.0, 1.0]
    assert running_mean([], 2) == []


def test_picture_of_nothing(tmp_path: Path) -> None:
    draw_losses(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").is_file()


def test_progress_shows_what_there_is() -> None:
    metrics = {"train/loss": torch.tensor(2.5), "train/tokens_per_second": 12345.6, "train/grad_norm": 1.0}
    assert progress_texts(metrics) == {"loss": "2.500", "tokens/s": "12,346"}
    assert progress_texts({"train/mfu": 0.314}) == {"MFU": "31.4%"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Throughput(warmup_steps=-1),
        lambda: RunSummary(prompt=""),
        lambda: RunSummary(temperature=-1.0),
    ],
)
def test_bad_options(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


class Clock:
    """Stands in for the time module."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Run:
    """Drives the callback as the Trainer does, on four ranks, logging every second step."""

    def __init__(self, clock: Clock, callback: Throughput) -> None:
        self.clock, self.callback = clock, callback
        self.logged: list[dict[str, float]] = []
        self.trainer: Any = SimpleNamespace(
            world_size=4,
            global_step=0,
            log_every_n_steps=2,
            is_last_batch=False,
            datamodule=SimpleNamespace(context_length=1000),
        )
        self.module: Any = SimpleNamespace(
            model_config=CONFIG,
            device=torch.device("cpu"),
            log_dict=lambda metrics, **_: self.logged.append(metrics),
        )
        callback.on_train_start(self.trainer, self.module)

    def step(self, seconds: float, tokens: int = 1000, micro_batches: int = 1) -> None:
        for index in range(micro_batches):
            self.clock.now += seconds
            self.trainer.global_step += index == micro_batches - 1
            batch = {"num_valid_tokens": torch.tensor(tokens)}
            self.callback.on_train_batch_end(self.trainer, self.module, None, batch, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def test_rate_leaves_out_warmup_and_validation(clock: Clock) -> None:
    run = Run(clock, Throughput(warmup_steps=1))
    run.step(100.0)
    run.step(1.0)
    assert run.logged[-1]["train/tokens_per_second"] == 1000
    run.step(1.0)
    clock.now += 1.0
    run.callback.on_validation_start(run.trainer, run.module)
    clock.now += 50.0
    run.callback.on_validation_end(run.trainer, run.module)
    run.step(1.0)
    assert run.logged[-1]["train/tokens_per_second"] == pytest.approx(2000 / 3)
    assert run.logged[-1]["train/tokens_per_second/per_rank"] == pytest.approx(500 / 3)
    assert run.callback.tokens_per_second == pytest.approx(3000 / 4)
    run.step(0.5)
    run.callback.on_train_end(run.trainer, run.module)
    assert run.callback.tokens_per_second == pytest.approx(4000 / 4.5)
    assert len(run.logged) == 2
    assert "train/mfu" not in run.logged[-1]
    assert run.callback.mfu is None
    assert 0.01 < run.logged[-1]["train/peak_memory_gib"] < 100


def test_micro_batches_count_once(clock: Clock) -> None:
    run = Run(clock, Throughput(warmup_steps=0))
    run.step(1.0, micro_batches=3)
    run.step(1.0, micro_batches=3)
    assert [m["train/tokens_per_second"] for m in run.logged] == [1000]


def test_mfu(clock: Clock) -> None:
    run = Run(clock, Throughput(warmup_steps=0))
    run.callback.peak = 1e9
    run.step(1.0)
    run.step(1.0)
    expected = 1000 * training_flops_per_token(CONFIG, 1000) / (4 * 1e9)
    assert run.logged[-1]["train/mfu"] == pytest.approx(expected)
    assert run.callback.mfu == pytest.approx(expected)
