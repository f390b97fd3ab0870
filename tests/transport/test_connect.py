"""Facts about peers: reachability of their GPUs, and ends of their processes."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from ringflash.coordination import processes
from ringflash.transport import connect

HERE = {"host": "a", "gpu": "0"}


@pytest.mark.parametrize(
    ("other", "access", "found"),
    [
        ({"host": "a", "gpu": "1"}, True, ""),
        ({"host": "a", "gpu": "1"}, False, "the GPU of rank 0 has no peer access to that of rank 1"),
        ({"host": "b", "gpu": "7"}, True, "ranks 0 and 1 are on different hosts"),
        ({"host": "a", "gpu": "0"}, True, "ranks 0 and 1 share a GPU"),
        ({"host": "a", "gpu": "7"}, True, "the GPU of rank 1 is hidden from rank 0 (CUDA_VISIBLE_DEVICES)"),
    ],
)
def test_obstacles(monkeypatch: pytest.MonkeyPatch, other: dict[str, str], access: bool, found: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: access)
    assert connect._seen_from(0, torch.device("cuda", 0), [HERE, other]) == found


def test_processes_that_end() -> None:
    code = "from ringflash.coordination import processes; print(processes.own_identity(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        other, own = process.stdout.readline().strip(), processes.own_identity()
        elsewhere = f"another-host {other.split(maxsplit=1)[1]}"
        assert processes.ended([own, other, elsewhere, ""]) == []
        process.kill()
        while processes.ended([own, other, elsewhere, ""]) != [1]:  # killed, but not yet reaped
            time.sleep(0.01)
    assert processes.ended([own, other]) == [1]
    again = f"{own.rsplit(' ', 1)[0]} 1"  # another process has reused the id
    assert processes.ended([again]) == [0]
