"""Training on a ring of ranks equals training on one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.ring_module import ComputeDtype
from ringflash.train.models.config import ModelConfig
from tests.helpers.distributed import run_ranks
from tests.train import runs
from tests.train.conftest import OF_ANY_SIZE, RUNS, Worlds
from tests.train.runs import Outcome, Run, attempt, sequences, train

# Worlds of all sizes are compared with the same references.
reference_gradients, train_alone = cache(runs.reference_gradients), cache(runs.train_alone)

WINDOWS = [
    "uneven",
    "accumulate",
    "accumulate after nothing",
    "short window",
    "tied",
    "activation checkpointing",
]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def assert_gradients(outcome: Outcome, expected: dict[str, Tensor], bar: float) -> None:
    """Checks the whole gradient against `bar`, and each weight's gradient against three times `bar`.

    Rounding has a larger effect on the gradient of a single weight.
    """
    assert outcome.gradients.keys() == expected.keys()
    errors = {name: relative_error(outcome.gradients[name], expected[name]) for name in expected}
    assert max(errors.values()) <= 3 * bar, errors
    whole, reference = (torch.cat([g[name].flatten() for name in expected]) for g in (outcome.gradients, expected))
    assert relative_error(whole, reference) <= bar


CLIPPED = 0.4  # norm to which most steps of a curve are clipped

# Steps with little cost besides messages. A window has two micro-batches of two sequences, each with four documents.
# The steps fill four epochs, and the learning rate reaches its floor five steps before the end.
CURVE = Run(
    steps=20,
    micro_batches=2,
    epoch_batches=10,
    model=ModelConfig(vocab_size=61, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=32),
    packed=True,
    masked="some",
    max_norm=CLIPPED,
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2, max_steps=15),
)


def _curves(curves: list[Run]) -> list[list[float]]:
    outcomes = [train(run) for run in curves]
    norms = [norm for outcome in outcomes for norm in outcome.logged["train/grad_norm"]]
    assert sum(norm > CLIPPED for norm in norms) > 10 * len(curves), "too few steps are clipped"
    return [outcome.logged["train/loss"] for outcome in outcomes]


# Far above the differences by rounding, which are 5e-16 and 2e-7 even after 200 steps on two ranks.
BARS: dict[ComputeDtype, float] = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.timeout(3600)  # four processes are slow on two cores
def test_loss_curves_do_not_depend_on_the_number_of_ranks() -> None:
    dtypes = [replace(CURVE, dtype=dtype) for dtype in BARS]
    one, two = (run_ranks(world_size, _curves, dtypes)[0] for world_size in (1, 2))
    # Two rings of two run in float64 alone, where the bar is narrower by 1e7.
    *four, rings = run_ranks(4, _curves, [*dtypes, replace(CURVE, dtype="float64", data_parallel=2)])[0]
    for dtype, alone, *others in zip(BARS, one, two, four, strict=True):
        assert len(alone) == 20
        assert sum(alone[-5:]) < 0.8 * sum(alone[:5])
        for curve in [*others, rings] if dtype == "float64" else others:
            assert max(abs(a - b) / b for a, b in zip(curve, alone, strict=True)) <= BARS[dtype]


def test_ranks_and_micro_batches_of_the_curve_have_unequal_valid_tokens() -> None:
    valid = torch.tensor([int((row["labels"] >= 0).sum()) for row in sequences(CURVE)])
    of_ranks, of_micro_batches = valid.view(-1, 2), valid.view(-1, 2, 2).sum(2)
    for pairs in (of_ranks, of_micro_batches):
        assert (pairs[:, 0] != pairs[:, 1]).double().mean() > 0.8


@pytest.mark.parametrize(
    ("world_size", "name"), [(n, name) for n in (1, 2, 3) for name in WINDOWS if n < 3 or name not in OF_ANY_SIZE]
)
def test_gradients_are_an_unsharded_model_s(worlds: Worlds, world_size: int, name: str) -> None:
    loss, gradients = reference_gradients(RUNS[name])
    outcome = worlds[world_size][name]
    assert outcome.logged["train/loss"][0] == pytest.approx(loss, rel=1e-6)
    assert_gradients(outcome, gradients, 1e-6)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert outcome.logged["train/grad_norm"][0] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_in_float64(worlds: Worlds, world_size: int) -> None:
    name = "uneven float64"
    assert_gradients(worlds[world_size][name], worlds[1][name].gradients, 1e-13)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_window_without_valid_tokens(worlds: Worlds, world_size: int) -> None:
    outcome = worlds[world_size]["all masked"]
    assert outcome.logged["train/loss"] == [0.0]
    assert all((gradient == 0).all() for gradient in outcome.gradients.values())
    assert all(weight.isfinite().all() for weight in outcome.weights.values())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping(worlds: Worlds, world_size: int) -> None:
    _, gradients = reference_gradients(RUNS["clip norm"])
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert norm > 0.3
    assert_gradients(worlds[world_size]["clip norm"], {n: g * 0.3 / norm for n, g in gradients.items()}, 1e-6)
    clipped = {n: g.clamp(-1e-3, 1e-3) for n, g in gradients.items()}
    assert_gradients(worlds[world_size]["clip value"], clipped, 1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_validation_and_test_loss(worlds: Worlds, world_size: int) -> None:
    one, many = (worlds[n]["evaluate"].logged for n in (1, world_size))
    assert len(many["val/loss"]) == 3  # after each of the two epochs of fit, and in validate
    assert many["val/loss"] == pytest.approx(one["val/loss"], rel=1e-12)
    assert many["test/loss"] == pytest.approx([one["val/loss"][-1]], rel=1e-12)
    assert many["train/loss"] == pytest.approx(train_alone(RUNS["evaluate"]), rel=1e-10)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packed_documents_are_documents_alone(worlds: Worlds, world_size: int) -> None:
    logged = worlds[world_size]["packed"].logged
    assert logged["train/loss"] == pytest.approx(train_alone(RUNS["packed"]), rel=1e-10)
    assert logged["val/loss"] == pytest.approx(worlds[1]["packed"].logged["val/loss"], rel=1e-12)


def test_compiled_blocks_on_a_ring(worlds: Worlds) -> None:
    loss, gradients = reference_gradients(Run())
    assert worlds[2]["compiled"].logged["train/loss"] == [pytest.approx(loss, rel=1e-6)]
    assert_gradients(worlds[2]["compiled"], gradients, 1e-6)


def test_data_parallel_ranks(worlds: Worlds) -> None:
    loss, gradients = reference_gradients(Run(masked="tail"))
    assert worlds[2]["data parallel"].logged["train/loss"] == [pytest.approx(loss, rel=1e-6)]
    assert_gradients(worlds[2]["data parallel"], gradients, 1e-6)


TWO_BY_TWO = Run(
    steps=3, data_parallel=2, micro_batches=2, epoch_batches=3, masked="tail", dtype="float64", packed=True
)


def _two_by_two() -> dict[str, Any]:
    copies = replace(TWO_BY_TWO, replicate=2, checkpointing="block")
    return {
        "sharded": train(TWO_BY_TWO),
        "replicated": train(copies),
        "clipped": train(replace(copies, steps=1, max_norm=0.3)),
        "misfit": attempt(replace(copies, replicate=3)),
    }


def test_two_by_two_sharded_over_all_and_over_halves() -> None:
    ranks = run_ranks(4, _two_by_two)
    reference, one = train_alone(TWO_BY_TWO), ranks[0]
    for name in ("sharded", "replicated"):
        assert one[name].logged["train/loss"] == pytest.approx(reference, rel=1e-10)
    gradients = one["sharded"].gradients
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert norm > 0.3
    for rank in ranks:
        assert_gradients(rank["replicated"], gradients, 1e-13)
        assert_gradients(rank["clipped"], {name: g * (0.3 / norm) for name, g in gradients.items()}, 1e-6)
        assert rank["replicated"].logged["train/grad_norm"][0] == pytest.approx(norm, rel=1e-12)
        for name, weight in rank["replicated"].weights.items():
            torch.testing.assert_close(weight, one["sharded"].weights[name], atol=1e-12, rtol=0)
        kind, text = rank["misfit"]
        assert kind == "ConfigError"
        assert text.startswith("replicate_size: expected a divisor of 4 ranks, got 3.")
