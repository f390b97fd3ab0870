"""Ranks that leave their process group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
import time
from datetime import timedelta
import torch.distributed as dist
from ringflash.train.departure import Departure
case, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=3, init_method=f"tcp://127.0.0.1:{sys.argv[3]}")
departure = Departure(timedelta(seconds=0.5)) if case == "late" else Departure()
dist.barrier()
if case == "failed" and rank == 1:
    departure.fail()
    raise SystemExit(3)
if case != "failed":
    time.sleep(rank if case == "slow" else 3 * (rank == 2))
print("end")
"""


def run(case: str, folder: Path) -> tuple[list[int], list[str], list[float]]:
    """Exit codes, outputs and ends, in seconds from the first, of three ranks, of which rank 0 serves the store."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), case, str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    ends: dict[int, float] = {}
    deadline = time.monotonic() + 60
    try:
        while len(ends) < 3 and time.monotonic() < deadline:
            for rank, process in enumerate(ranks):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic()
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
    outputs = [process.communicate()[0] for process in ranks]
    assert len(ends) == 3, outputs
    first = min(ends.values())
    return [process.returncode for process in ranks], outputs, [ends[rank] - first for rank in range(3)]


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    codes, outputs, ends = run("slow", tmp_path)
    assert (codes, outputs) == ([0, 0, 0], ["end\n"] * 3)
    assert max(ends) < 1  # though they came to their ends a second apart


@pytest.mark.parametrize(("case", "code"), [("failed", 3), ("late", 0)])
def test_none_is_waited_for_that_does_not_come(tmp_path: Path, case: str, code: int) -> None:
    codes, outputs, ends = run(case, tmp_path)
    assert codes == [0, code, 0], outputs
    assert max(ends[:2]) < 2, (ends, outputs)
