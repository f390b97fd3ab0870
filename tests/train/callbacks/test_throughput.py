from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringflash.errors import ConfigError
from ringflash.train.callbacks import throughput
from ringflash.train.callbacks.throughput import Throughput
from ringflash.train.exchange import all_ranks
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.flops import training_flops
from tests.helpers.distributed import run_ranks

CONFIG = ModelConfig(vocab_size=257, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96)


class Clock:
    """A replacement of the time module."""

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
            strategy=None,
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
            # Most tokens have no label, as in a prompt. They count as work too.
            batch = {"labels": torch.full((1, tokens), -100), "num_valid_tokens": torch.tensor(1)}
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
    expected = training_flops(CONFIG, 1000, CONFIG.n_layers * 1000 * 1001 // 2) / (4 * 1e9)
    assert run.logged[-1]["train/mfu"] == pytest.approx(expected)
    assert run.callback.mfu == pytest.approx(expected)


def test_frozen_weights_have_no_gradients(clock: Clock) -> None:
    run = Run(clock, Throughput(warmup_steps=0))
    run.module.trained_size = 5000
    run.callback.on_train_start(run.trainer, run.module)
    run.callback.peak = 1e9
    run.step(1.0)
    run.step(1.0)
    pairs = CONFIG.n_layers * 1000 * 1001 // 2
    assert run.callback.mfu == pytest.approx(training_flops(CONFIG, 1000, pairs, 5000) / (4 * 1e9))


def test_packed_documents_are_less_work(clock: Clock) -> None:
    run = Run(clock, Throughput(warmup_steps=0))
    run.callback.peak = 1e9
    positions = torch.cat([torch.arange(600), torch.arange(400)])
    for _ in range(2):
        clock.now += 1.0
        run.trainer.global_step += 1
        batch = {"labels": torch.zeros(2, 1000), "position_ids": positions.expand(2, -1)}
        run.callback.on_train_batch_end(run.trainer, run.module, None, batch, 0)
    pairs = CONFIG.n_layers * 2 * (600 * 601 + 400 * 401) // 2
    assert run.logged[-1]["train/mfu"] == pytest.approx(training_flops(CONFIG, 2000, pairs) / (4 * 1e9))


def _on_a_slower_rank() -> list[dict[str, float]]:
    clock, world = Clock(), dist.group.WORLD
    assert world is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "time", clock)
        patch.setattr(throughput, "gathered", lambda _, local: all_ranks(local, world))
        run = Run(clock, Throughput(warmup_steps=0))
        run.step(1.0)
        run.step(1.0 + dist.get_rank())
    return run.logged


def test_ranks_with_other_clocks_log_the_rate_of_the_slowest() -> None:
    first, second = run_ranks(2, _on_a_slower_rank)
    assert first == second
    assert first[0]["train/tokens_per_second"] == pytest.approx(4000 / 3)


def test_bad_option() -> None:
    with pytest.raises(ConfigError):
        Throughput(warmup_steps=-1)
