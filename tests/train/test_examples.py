"""The example scripts are short, and they train on two processes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringflash
from tests.helpers.patience import PATIENCE
from tests.helpers.programs import output_of

EXAMPLES = Path(ringflash.__file__).parents[1] / "docs" / "examples"


def run(tmp_path: Path, name: str, *more: str, ranks: int | None = None) -> str:
    """Returns the output of an example that trains six steps on a CPU."""
    (tmp_path / "text.txt").write_text("ring attention over a long context\n" * 400)
    shape = ["--context-length", "257", "--dim", "64", "--steps", "6"]
    corpus = ["--corpus", str(tmp_path / "text.txt"), "--cache-dir", str(tmp_path / "cache")]
    return run_alone(tmp_path, name, *corpus, *shape, *more, ranks=ranks)


def run_alone(tmp_path: Path, name: str, *options: str, ranks: int | None = None) -> str:
    """Returns the output of an example that makes its own data."""
    return output_of([str(EXAMPLES / name), *options], tmp_path, ranks=ranks)


@pytest.mark.timeout(800)
def test_plain_loop_is_the_same_under_both_wrappers(tmp_path: Path) -> None:
    curves = []
    for wrapper in ("ddp", "fsdp2"):
        out = run_alone(tmp_path, "plain_loop.py", "--wrapper", wrapper, "--steps", "5", ranks=2)
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", out)])
    assert len(curves[0]) == 5
    assert curves[0] == pytest.approx(curves[1], abs=2e-4)
    assert curves[0][-1] < 0.6 * curves[0][0]


@pytest.mark.timeout(800)
def test_own_module(tmp_path: Path) -> None:
    (loss,) = re.findall(r"val_loss ([\d.]+)", run_alone(tmp_path, "own_module.py", "--epochs", "2"))
    assert float(loss) < 3.0  # chance gives 4.16


@pytest.mark.timeout(800)
def test_trainer_script(tmp_path: Path) -> None:
    out = run(tmp_path, "trainer_script.py", "--devices", "2", "--run-dir", str(tmp_path / "run"), ranks=2)
    (loss,) = re.findall(r"loss ([\d.]+) after 6 steps", out)
    assert float(loss) < 5.4  # chance gives 5.55
    assert list((tmp_path / "run").rglob("checkpoints/last"))


@pytest.mark.timeout(800)
def test_the_accelerate_loop_has_the_losses_of_one_process(tmp_path: Path) -> None:
    curves = []
    for ranks in (None, 2):
        out = run_alone(tmp_path, "accelerate_loop.py", "--steps", "6", ranks=ranks)
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", out)])
    assert len(curves[0]) == 6
    assert curves[0] == pytest.approx(curves[1], abs=2e-4)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.timeout(800)
def test_the_ring_trainer_has_the_losses_of_one_process(tmp_path: Path) -> None:
    curves = []
    for name, ranks in (("one", None), ("two", 2)):
        folder = str(tmp_path / name)
        out = run_alone(tmp_path, "ring_trainer.py", "--steps", "4", "--output-dir", folder, ranks=ranks)
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
