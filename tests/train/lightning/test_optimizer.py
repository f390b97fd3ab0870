"""OptimizerConfig: schedules against their formulas, and options that they refuse. Updates of shards."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from ringflash.errors import ConfigError
from ringflash.train.lightning.optimizer import OptimizerConfig, make_adamw
from tests.helpers.distributed import run_ranks


def test_cosine() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, max_steps=14, min_lr_ratio=0.2)
    scales = [config.lr_scale(step) for step in range(20)]
    assert scales[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert scales[9] == pytest.approx(0.6)
    assert scales[14:] == [pytest.approx(0.2)] * 6
    assert OptimizerConfig(warmup_steps=0).lr_scale(0) == 1.0


def test_wsd() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, max_steps=100, min_lr_ratio=0.2, schedule="wsd")
    scales = [config.lr_scale(step) for step in range(120)]
    assert scales[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(scales[4:91]) == {1.0}  # the decay is the last tenth
    assert [scales[90 + i] for i in range(11)] == pytest.approx([0.2 + 0.8 * (1 - (i / 10) ** 0.5) for i in range(11)])
    assert set(scales[100:]) == {0.2}


def test_wsd_that_falls_linearly() -> None:
    config = OptimizerConfig(
        lr=1.0,
        warmup_steps=0,
        max_steps=40,
        min_lr_ratio=0.0,
        schedule="wsd",
        decay_fraction=0.5,
        decay_shape="linear",
    )
    assert [config.lr_scale(step) for step in (0, 20, 25, 30, 40)] == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.0])


@given(
    max_steps=st.integers(1, 200),
    warmup=st.floats(0, 0.99),
    fraction=st.floats(1e-6, 1),
    schedule=st.sampled_from(["cosine", "wsd"]),
)
def test_any_schedule_rises_to_lr_and_falls_to_its_end(
    max_steps: int, warmup: float, fraction: float, schedule: Any
) -> None:
    warmup_steps = int(warmup * max_steps)
    decay = fraction if schedule == "wsd" else None
    config = OptimizerConfig(warmup_steps=warmup_steps, max_steps=max_steps, schedule=schedule, decay_fraction=decay)
    scales = [config.lr_scale(step) for step in range(max_steps + 2)]
    rising, falling = scales[: warmup_steps + 1], scales[warmup_steps:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert max(scales) == 1.0
    assert scales[max_steps:] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"lr": 0.0}, "lr"),
        ({"warmup_steps": 10, "max_steps": 10}, "warmup_steps"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio"),
        ({"betas": (0.9, 1.5)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"schedule": "linear"}, "schedule"),
        ({"decay_fraction": 0.1}, "decay_fraction"),
        ({"decay_shape": "sqrt"}, "decay_shape"),
        ({"schedule": "wsd", "decay_fraction": 0.0}, "decay_fraction"),
        ({"schedule": "wsd", "decay_fraction": 1.5}, "decay_fraction"),
        ({"schedule": "wsd", "decay_shape": "cosine"}, "decay_shape"),
    ],
)
def test_impossible_schedules(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        OptimizerConfig(**arguments)
    assert raised.value.argument == field


def _trained(kind: type[AdamW] | None, fused: bool) -> tuple[list[Tensor], list[type], set[type]]:
    """Returns weights and moments after a few steps, the types of the states, and those that torch's update got."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 1), nn.Linear(1, 16))  # rows that two ranks share unevenly
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    made: Any = make_adamw(model.parameters(), OptimizerConfig(lr=0.01))
    optimizer = (kind or type(made))(made.param_groups, fused=fused)
    module: Any = import_module("torch.optim.adam")
    updated, update = set[type](), module.adam

    def seen(*lists: list[Tensor], **options: Any) -> None:
        updated.update(type(x) for tensors in lists for x in tensors)
        update(*lists, **options)

    with mock.patch.object(module, "adam", seen):
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    moments: list[Any] = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    whole: list[Any] = [*model.parameters(), *moments]
    return [x.full_tensor().detach() for x in whole], [type(x) for x in moments], updated


def _both(fused: bool) -> list[Any]:
    return [_trained(kind, fused) for kind in (None, AdamW)]


@pytest.mark.parametrize("fused", [False, True])
def test_shards_are_updated_as_plain_tensors_with_the_bits_of_torch(fused: bool) -> None:
    for (ours, states, updated), (usual, _, by_torch) in run_ranks(2, _both, fused):
        assert all(torch.equal(x, y) for x, y in zip(ours, usual, strict=True))
        assert {*states} == {DTensor}  # as checkpoints need them
        assert DTensor in by_torch
        assert not any(issubclass(kind, DTensor) for kind in updated)
