"""The example scripts train, on two processes, and are short."""

from __future__ import annotations

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
    """What an example prints that trains six steps on a CPU."""
    (tmp_path / "text.txt").write_text("ring attention over a long context\n" * 400)
    shape = ["--context-length", "257", "--dim", "64", "--steps", "6"]
    corpus = ["--corpus", str(tmp_path / "text.txt"), "--cache-dir", str(tmp_path / "cache")]
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # of an enclosing run
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *corpus, *shape, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(800)
def test_torchrun_script(tmp_path: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(tmp_path, TORCHRUN, "torchrun_script.py"))]
    assert len(losses) == 6
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.timeout(800)
def test_trainer_script(tmp_path: Path) -> None:
    out = run(tmp_path, [], "trainer_script.py", "--devices", "2", "--run-dir", str(tmp_path / "run"))
    (loss,) = re.findall(r"loss ([\d.]+) after 6 steps", out)
    assert float(loss) < 5.4  # 5.55 is that of chance
    assert list((tmp_path / "run").rglob("checkpoints/last"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_they_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert ("import lightning" in text) == (path.stem == "trainer_script")
