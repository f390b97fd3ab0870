"""The shutdown of ranks, which leave their process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.trainer.states import TrainerStatus

from ringflash.train.lightning.preemption import Preempted
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.patience import PATIENCE

pytestmark = pytest.mark.xdist_group("shutdown")

# One process imports torch and forks the ranks, which then end like independent processes.
# The cases mostly wait, so they run at the same time.
SCRIPT = """
import json
import os
import signal
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
import torch.distributed as dist
from ringflash.train.lightning.shutdown import Shutdown


def fork(*cases):
    with ExitStack() as stack:  # the probes stay open together, so that their ports differ
        probes = [stack.enter_context(socket.socket()) for _ in cases]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    processes, ends = {}, {case: [None] * 3 for case in cases}
    for case, port in zip(cases, ports):
        for rank in range(3):
            if not (process := os.fork()):
                return case, rank, port
            processes[process] = case, rank
    while processes:
        process, status = os.wait()
        case, rank = processes.pop(process)
        ends[case][rank] = os.waitstatus_to_exitcode(status), time.monotonic()
    print(json.dumps(ends))
    return None


case, rank, port = fork("slow", "failed", "late") or exit()
signal.alarm(120)  # none is left over
file = os.open(f"{case} {rank}", os.O_CREAT | os.O_WRONLY)
os.dup2(file, 1)
os.dup2(file, 2)
dist.init_process_group("gloo", rank=rank, world_size=3, init_method=f"tcp://127.0.0.1:{port}")
shutdown = Shutdown(timedelta(seconds=0.5)) if case == "late" else Shutdown()
dist.barrier()
if case == "failed" and rank == 1:
    shutdown.fail()
    raise SystemExit(3)
if case != "failed":
    time.sleep(3 * rank if case == "slow" else 5 * (rank == 2))
print("end")
"""


@dataclass(frozen=True)
class Ends:
    """Exit codes, outputs and end times of three ranks, in seconds after the first end; rank 0 serves the store."""

    codes: list[int]
    outputs: list[str]
    seconds: list[float]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ends]:
    folder = tmp_path_factory.mktemp("shutdown")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
    found = {}
    for case, ranks in json.loads(done.stdout).items():
        codes, times = zip(*ranks, strict=True)
        outputs = [(folder / f"{case} {rank}").read_text() for rank in range(3)]
        found[case] = Ends([*codes], outputs, [time - min(times) for time in times])
    return found


def test_a_slow_rank_is_waited_for(ends: dict[str, Ends]) -> None:
    slow = ends["slow"]
    assert (slow.codes, slow.outputs) == ([0, 0, 0], ["end\n"] * 3)
    assert max(slow.seconds) < 3  # although the ranks reached their ends three seconds apart


@pytest.mark.parametrize(("case", "code"), [("failed", 3), ("late", 0)])
def test_none_is_waited_for_that_does_not_come(ends: dict[str, Ends], case: str, code: int) -> None:
    assert ends[case].codes == [0, code, 0], ends[case]
    assert max(ends[case].seconds[:2]) < 4, ends[case]


def test_only_an_error_that_all_ranks_raise_together_lets_a_rank_save() -> None:
    strategy = RingAttentionStrategy()
    module: Any = SimpleNamespace(trainer=SimpleNamespace(state=SimpleNamespace(status=TrainerStatus.INTERRUPTED)))
    several = mock.patch.object(RingAttentionStrategy, "world_size", 2)
    with several, mock.patch.object(RingAttentionStrategy, "lightning_module", module):
        for error in (Preempted("SIGTERM"), ValueError()):
            try:
                raise error
            except BaseException:
                refused = strategy._failure()
            assert refused is (None if isinstance(error, Preempted) else error)
