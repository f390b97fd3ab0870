"""Attention needs torch, triton and numpy alone; what needs more names the extra that brings it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ringflash
from ringflash.extras import EXTRAS
from ringflash.train.callbacks import report

CHECKOUT = Path(ringflash.__file__).parents[1]
RING = ("--world-size", "2", "--seqlen", "256")
MEMORY = ("--config", str(CHECKOUT / "configs/tiny-cpu.yaml"), "--gpu-memory", "80")
WITHOUT = """
import sys
for package in {packages!r}:
    sys.modules[package] = None  # as if it were not installed
"""
ATTENTION = """
import torch, ringflash as rf
q = torch.randn(1, 32, 2, 16, requires_grad=True)
rf.flash_attention(q, q, q, mask=rf.Causal()).sum().backward()
context = rf.ContextParallel.local(2)
rf.ring_attention(q, q, q, context, mask=rf.Causal()).sum().backward()
from ringflash.commands.main import main
assert main(["doctor"]) == 0
"""
# Commands of one process, which takes seconds to import torch; each prints a line of JSON.
COMMANDS = """
import io, json
from contextlib import redirect_stderr
from ringflash.commands.main import main
for arguments in {commands!r}:
    with redirect_stderr(io.StringIO()) as error:
        code = main(arguments)
    print(json.dumps([code, error.getvalue()]))
"""


def run_without(packages: tuple[str, ...], program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(packages=packages) + program]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


EVERY_PACKAGE = tuple({package for packages in EXTRAS.values() for package in packages} - {"filelock"})  # torch's too


def check_commands(done: subprocess.CompletedProcess[str], expected: list[tuple[str, str]]) -> None:
    """Checks that each command ended with an error that says what it `needs`, and names the extra."""
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (code, error), (needs, extra) in zip(lines, expected, strict=True):
        assert code == 1, error
        assert "Traceback" not in error
        assert needs in error
        assert f"pip install 'ringflash[{extra}]'" in error


def test_attention_needs_no_extra_and_other_things_name_theirs() -> None:
    expected = {
        ("train", "auto"): ("`ringflash train` needs lightning", "train"),
        ("plan-memory", *MEMORY): ("`ringflash plan-memory` needs lightning", "train"),
        ("plan", *RING): ("`ringflash plan` needs rich", "plot"),
    }
    name = "from ringflash.train import LanguageModel"  # ends the process with an error
    done = run_without(EVERY_PACKAGE, ATTENTION + COMMANDS.format(commands=[*expected]) + name)
    assert "self-test on cpu: passed" in done.stdout, done.stderr
    check_commands(done, [*expected.values()])
    named = "ringflash.train.LanguageModel needs lightning, which is not installed. Install it with"
    assert f"MissingExtra: {named} `pip install 'ringflash[train]'`." in done.stderr


def test_a_picture_names_its_extra() -> None:
    done = run_without(("matplotlib",), COMMANDS.format(commands=[("plan", *RING, "--png", "x.png")]))
    assert done.returncode == 0, done.stderr
    check_commands(done, [("--png needs", "plot")])


def test_a_report_without_matplotlib_has_no_picture(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ringflash.extras.find_spec", lambda package: None)
    (tmp_path / "metrics.csv").write_text("epoch,step,train/loss\n0,0,5.5\n0,1,5.0\n")
    assert report.main([str(tmp_path)]) == 0
    assert "The report has no picture." in caplog.text
    assert "pip install 'ringflash[plot]'" in caplog.text
    assert "![" not in (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.split() == [str(tmp_path / "report.md")]


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert [name.split(">")[0] for name in project["dependencies"]] == ["torch", "triton", "numpy"]
    for extra, packages in EXTRAS.items():
        told = " ".join(project["optional-dependencies"][extra])
        assert all(package in told for package in packages), extra
