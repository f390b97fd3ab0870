"""The ring benchmark runs, says what failed, and its long-sequence errors are those of the reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringflash as rf
from ringflash import reference
from ringflash.bench import accuracy
from ringflash.bench.problem import Problem
from ringflash.bench.ring import main
from ringflash.errors import ArgumentError


def test_two_processes_write_their_figures(tmp_path: Path) -> None:
    arguments = "--seqlens 40 64 --nheads 4 --nheads-kv 2 --headdim 16 --dtype float32 --rounds 1 --repeats 1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ringflash.bench.ring"]
    result = subprocess.run(
        [*command, *arguments.split(), "--peers", "--check", "--json", str(tmp_path / "ring.json")],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert "ringflash zigzag" in result.stdout
    record = json.loads((tmp_path / "ring.json").read_text())
    assert record["command"].endswith(arguments + " --peers --check --json ring.json")
    ours = [row for row in record["rows"] if row["name"] == "ringflash zigzag"]
    assert [row["seqlen"] for row in ours] == [40, 64]
    for row in ours:
        assert row["forward_ms"] > 0
        assert row["errors_over_plain"]["out max"] < 5
    peers = [row for row in record["rows"] if row["name"].startswith("torch")]
    assert all("failed" in row for row in peers)  # torch's context_parallel has no CPU kernels


def test_one_process_is_told_to_use_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match="ranks: expected processes started by torchrun"):
        main([])


@pytest.mark.parametrize("causal", [True, False])
def test_plain_attention_by_rows_is_the_reference(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "ROWS", 7)
    problem = Problem.random(20, 4, 2, 16, torch.device("cpu"), torch.float64, batch=2, causal=causal)
    inputs = problem.leaves()
    out, _ = reference.attention(*inputs, mask=rf.Causal() if causal else None)
    expected = [out, *torch.autograd.grad(out, inputs, problem.dout)]
    group = accuracy.first_group(problem)
    for got, whole, heads in zip(accuracy.plain_by_rows(group, torch.float64), expected, (2, 2, 1, 1), strict=True):
        torch.testing.assert_close(got, whole[:1, :, :heads])
