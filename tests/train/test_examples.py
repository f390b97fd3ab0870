"""The example scripts are short, and they train on two processes."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringflash
from tests.patience import PATIENCE

EXAMPLES = Path(ringflash.__file__).parents[1] / "docs" / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(tmp_path: Path, launcher: list[str], name: str, *more: str) -> str:
    """Returns the output of an example that trains six steps on a CPU."""
    (tmp_path / "text.txt").write_text("ring attention over a long context\n" * 400)
    shape = ["--context-length", "257", "--dim", "64", "--steps", "6"]
    corpus = ["--corpus", str(tmp_path / "text.txt"), "--cache-dir", str(tmp_path / "cache")]
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # from an enclosing run
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *corpus, *shape, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_alone(tmp_path: Path, launcher: list[str], name: str, *options: str) -> str:
    """Returns the output of an example that makes its own data."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parents[1])}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(800)
def test_plain_loop_is_the_same_under_both_wrappers(tmp_path: Path) -> None:
    curves = []
    for wrapper in ("ddp", "fsdp2"):
        out = run_alone(tmp_path, TORCHRUN, "plain_loop.py", "--wrapper", wrapper, "--steps", "5")
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", out)])
    assert len(curves[0]) == 5
    assert curves[0] == pytest.approx(curves[1], abs=2e-4)
    assert curves[0][-1] < 0.6 * curves[0][0]


@pytest.mark.timeout(800)
def test_own_module(tmp_path: Path) -> None:
    (loss,) = re.findall(r"val_loss ([\d.]+)", run_alone(tmp_path, [], "own_module.py", "--epochs", "2"))
    assert float(loss) < 3.0  # chance gives 4.16


@pytest.mark.timeout(800)
def test_trainer_script(tmp_path: Path) -> None:
    out = run(tmp_path, [], "trainer_script.py", "--devices", "2", "--run-dir", str(tmp_path / "run"))
    (loss,) = re.findall(r"loss ([\d.]+) after 6 steps", out)
    assert float(loss) < 5.4  # chance gives 5.55
    assert list((tmp_path / "run").rglob("checkpoints/last"))


@pytest.mark.timeout(800)
def test_the_accelerate_loop_has_the_losses_of_one_process(tmp_path: Path) -> None:
    curves = []
    for launcher in ([], TORCHRUN):
        out = run_alone(tmp_path, launcher, "accelerate_loop.py", "--steps", "6")
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", out)])
    assert len(curves[0]) == 6
    assert curves[0] == pytest.approx(curves[1], abs=2e-4)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.timeout(800)
def test_the_ring_trainer_has_the_losses_of_one_process(tmp_path: Path) -> None:
    curves = []
    for name, launcher in (("one", []), ("two", TORCHRUN)):
        folder = str(tmp_path / name)
        out = run_alone(tmp_path, launcher, "ring_trainer.py", "--steps", "4", "--output-dir", folder)
        curves.append([float(loss) for loss in re.findall(r"loss': '?([\d.]+)", out)])
        assert (tmp_path / name / "model" / "model.safetensors").exists()
    assert len(curves[0]) >= 5  # of four steps, and of the evaluation
    assert curves[0] == pytest.approx(curves[1], abs=2e-3)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_they_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert ("import lightning" in text) == (path.stem not in ("plain_loop", "accelerate_loop", "ring_trainer"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_they_import_public_names_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringflash"):
            assert node.module == "ringflash.train"
        if isinstance(node, ast.Import):
            assert all(name.name == "ringflash" or not name.name.startswith("ringflash") for name in node.names)


def test_a_plain_loop_does_not_import_lightning() -> None:
    code = "import sys, ringflash as rf; rf.ContextParallel.local(2).token_mean; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
