from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringflash

SCRIPT = Path(ringflash.__file__).parents[1] / "train" / "plain.py"


def start(tmp_path: Path, world_size: int, lines: int = 400) -> subprocess.CompletedProcess[str]:
    (tmp_path / "text.txt").write_text("ring attention over a long context\n" * lines)
    corpus = ["--corpus", str(tmp_path / "text.txt"), "--cache-dir", str(tmp_path / "cache")]
    shape = ["--dim", "32", "--layers", "1", "--heads", "2", "--context-length", "257", "--steps", "6"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, *(launcher if world_size > 1 else []), SCRIPT, *corpus, *shape, "--lr", "1e-2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (alone if world_size == 1 else {})
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)


def run(tmp_path: Path, world_size: int) -> list[float]:
    done = start(tmp_path, world_size)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.timeout(180)
def test_plain_training(tmp_path: Path) -> None:
    one, two = (run(tmp_path, world_size) for world_size in (1, 2))
    assert len(one) == 6
    assert one == pytest.approx(two, abs=2e-4)
    assert one[-1] < 0.98 * one[0]


@pytest.mark.timeout(120)
def test_corpus_shorter_than_the_context(tmp_path: Path) -> None:
    done = start(tmp_path, 1, lines=2)
    assert done.returncode != 0
    assert "DataError: corpus: expected more than 257 tokens" in done.stderr


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 150
    assert "lightning" not in "".join(line for line in SCRIPT.read_text().splitlines() if "import" in line)
