"""The command `ringflash plan-memory`: the estimate of a configuration, the choice of its budget, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import ringflash as rf
from ringflash.commands.main import main
from ringflash.train.models.budget import RESERVE, plan_activations
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.memory import GIB, TrainingShape, estimate_memory

# Lightning calls a jsonargparse method by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CONFIG = Path(rf.__file__).parents[1] / "configs" / "llama-8b-256k-4gpu.yaml"
SHAPE = TrainingShape(65536, 4, torch.bfloat16, "block", in_pieces=True, compiled=True)
BUDGET = ["--model.activation_checkpointing=null", "--gpu-memory", "140"]


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[str, str]:
    assert main(["plan-memory", "--config", str(CONFIG), *args]) == code
    return capsys.readouterr()


def config() -> ModelConfig:
    return ModelConfig(**yaml.safe_load(CONFIG.read_text())["model"]["model"])


def test_parts_are_those_of_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "--gpu-memory", "140", "--json")
    figures: dict[str, Any] = json.loads(out)
    assert (figures["tokens"], figures["ranks"], figures["blocks"]) == (65536, 4, 32)
    estimate = estimate_memory(config(), SHAPE)
    assert (
        figures["bytes"]["block"]
        == figures["bytes"]["chosen"]
        == {
            **estimate.parts,
            "total": estimate.total,
            "host": 0,
        }
    )
    assert figures["bytes"]["none"]["total"] > figures["bytes"]["block"]["total"]
    assert "kept_blocks" not in figures


def test_a_budget_chooses_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_activations(config(), SHAPE, "auto", int(140 * GIB) - RESERVE, int(140 * GIB), "")
    kept = plan.activations.kept_blocks
    assert 0 < kept < 32
    out, _ = run(capsys, *BUDGET, "--json")
    figures = json.loads(out)
    assert (figures["kept_blocks"], figures["keeps_weights"]) == (kept, plan.keeps_weights)
    assert (figures["offloaded_blocks"], figures["head_groups"]) == (0, 1)
    assert figures["planned"] == plan.planned
    assert figures["bytes"]["chosen"]["total"] == plan.estimate.total
    file = tmp_path / "plan.json"
    out, _ = run(capsys, *BUDGET, "--json", str(file))
    assert json.loads(file.read_text()) == figures
    assert f"Activations: {kept} of 32 blocks keep all, {32 - kept} recompute: " in out
    assert all(part in out for part in ("weights", "gathered", "loss", "peak", "of the host"))
    out, _ = run(capsys, *BUDGET, "--model.activation_memory=60%")
    assert "planned of 84.00 (60%)" in out


def test_groups_of_heads_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    long = [*BUDGET[:-1], "105", "--host-memory", "4000", "--data.context_length=4194304"]
    out, _ = run(capsys, *long, "--json")
    figures = json.loads(out)
    assert (figures["offloaded_blocks"], figures["head_groups"]) == (32, 2)
    out, _ = run(capsys, *long)
    assert "32 of them from 516.00 GiB of host memory with attention in 2 groups of heads: " in out


def test_a_plan_that_cannot_fit_suggests_no_choice_of_activations(capsys: pytest.CaptureFixture[str]) -> None:
    _, error = run(capsys, *BUDGET[:-1], "20", "--host-memory", "1000", code=2)
    assert "memory: expected at most the GPU's 20.00 GiB" in error
    assert "Use a shorter context, a smaller micro-batch, or more ranks." in error


def test_a_fixed_choice_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "--gpu-memory", "140", "--model.activation_offload=true")
    assert 'Activations: activation_checkpointing is "block", which leaves nothing to choose' in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu-memory", "40"], "memory: expected at most the GPU's 40.00 GiB, got at least "),
        (["--gpu-memory", "0"], "--gpu-memory: expected more than 0"),
        (
            ["--gpu-memory", "inf"],
            "--gpu-memory: expected a number of GiB, got inf. Pass what a machine of the run has",
        ),
        ([*BUDGET, "--host-memory", "inf"], "--host-memory: expected a number of GiB, got inf. Pass what a machine of"),
        (
            ["--gpu-memory", "140", "--host-memory", "100", "--model.activation_offload=true"],
            "activation_offload: expected at most the host's 100.00 GiB, got at least 32.25 GiB for each of 4 GPUs",
        ),
        (["--gpu-memory", "140", "--host-memory", "-1"], "--host-memory: expected more than 0"),
        (["--gpu-memory", "1e300"], "--gpu-memory: expected a number of GiB, got 1e+300. Pass what"),  # inf in bytes
        ([*BUDGET, "--model.activation_memory=20GiB"], "activation_memory: expected at least "),
        ([*BUDGET, "--model.activation_memory=20"], 'activation_memory: expected "auto", a size such as "60GiB"'),
        (["--gpu-memory", "140", "--data.batch_sise=1"], "Did you mean "),
        (["--gpu-memory", "140", "--trainer.devices=auto"], "trainer.devices: expected a number of GPUs, got auto"),
        ([], "--gpu-memory: expected a number of GiB, got nothing, and no GPU here"),
    ],
)
def test_errors(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, error = run(capsys, *args, code=2)
    assert message in error


def test_configurations_are_merged_in_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("trainer:\n  devices: 8\n")
    out, _ = run(capsys, "--config", str(more), *BUDGET, "--json")
    assert json.loads(out)["ranks"] == 8


def test_a_missing_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "--config", "llama-8b-256k.yaml", "--gpu-memory", "140"]) == 2
    assert "--config: expected a configuration file, got no file llama-8b-256k.yaml. Did you" in capsys.readouterr().err
