"""A rank that is killed while it writes."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringflash.train import saving
from ringflash.train.folder import complete_in, partial_of, verify
from ringflash.train.saving import Progress, SaveOptions, Saver
from tests.faults import Outcome, outcome_of, run_to_their_ends


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_while_writing(folder: str) -> Outcome:
    saver, path = Saver(timedelta(seconds=20)), Path(folder) / "last"
    checkpoint: dict[str, Any] = {"state_dict": {f"rank {dist.get_rank()}": torch.ones(100)}, "global_step": 1}
    saver.save(checkpoint, path, SaveOptions())
    if dist.get_rank() == 1:
        setattr(saving._Writer, "write_data", die)  # noqa: B010 - pyright knows what it should be
    saver.save({**checkpoint, "global_step": 2}, path, SaveOptions(asynchronous=True))
    outcome = outcome_of(saver.wait)
    assert saver.progress == Progress.IDLE
    return outcome


def test_a_rank_killed_while_it_writes(tmp_path: Path) -> None:
    codes, outcomes = run_to_their_ends(2, _killed_while_writing, str(tmp_path))
    assert codes == [3, -signal.SIGKILL]
    assert outcomes[0] is not None
    assert outcomes[0].kind == "CheckpointError"
    assert "got rank 0, while it wrote with the others:" in outcomes[0].text
    assert outcomes[0].seconds < 10
    assert partial_of(tmp_path / "last").is_dir()
    assert [verify(path).step for path in complete_in(tmp_path)] == [1]
