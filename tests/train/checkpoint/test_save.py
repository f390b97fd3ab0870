"""Saver: a rank that is killed while it writes a checkpoint, and copies of tensors on GPUs."""

from __future__ import annotations

import os
import signal
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ringflash.errors import ConfigError
from ringflash.train.checkpoint import save as saving
from ringflash.train.checkpoint.manifest import complete_in, partial_of, verify
from ringflash.train.checkpoint.safe_reader import SafeReader
from ringflash.train.checkpoint.save import Progress, SaveOptions, Saver
from tests.helpers.distributed import run_ranks
from tests.helpers.faults import Outcome, outcome_of, run_to_their_ends


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_while_writing(folder: str, asynchronous: bool) -> Outcome:
    saver, path = Saver(timedelta(seconds=20)), Path(folder) / "last"
    checkpoint: dict[str, Any] = {"state_dict": {f"rank {dist.get_rank()}": torch.ones(100)}, "global_step": 1}
    saver.save(checkpoint, path, SaveOptions())
    if dist.get_rank() == 1:
        setattr(saving._Writer, "write_data", die)  # noqa: B010 - pyright checks the type of an assignment
    options = SaveOptions(asynchronous=asynchronous)
    save = partial(saver.save, {**checkpoint, "global_step": 2}, path, options)
    outcome = outcome_of(saver.wait if asynchronous and save() is None else save)
    assert saver.progress == Progress.IDLE
    return outcome


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_while_it_writes(tmp_path: Path, asynchronous: bool) -> None:
    codes, outcomes = run_to_their_ends(2, _killed_while_writing, str(tmp_path), asynchronous)
    assert codes == [3, -signal.SIGKILL]
    assert outcomes[0] is not None
    assert outcomes[0].kind == "CheckpointError"
    assert "got a rank that is gone, or did not answer: " in outcomes[0].text
    assert " on rank 0. See the output of the other ranks" in outcomes[0].text  # rank 0 itself is in order
    assert outcomes[0].seconds < 10
    assert partial_of(tmp_path / "last").is_dir()
    assert [verify(path).step for path in complete_in(tmp_path)] == [1]


def _refused_while_writing(folder: str) -> str:
    saver, error = Saver(timedelta(seconds=20)), ConfigError("x", expected="y", got="z", remedy="Do not.")
    with mock.patch.object(saving, "publish", side_effect=error):
        saver.save({"state_dict": {"x": torch.ones(2)}}, Path(folder) / "last", SaveOptions(asynchronous=True))
        return outcome_of(saver.wait).kind


def test_an_error_of_the_library_in_a_later_write_keeps_its_class(tmp_path: Path) -> None:
    assert run_ranks(2, _refused_while_writing, str(tmp_path)) == ["ConfigError"] * 2


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def _interrupted_while_writing(folder: str) -> str:
    saver, path = Saver(timedelta(seconds=20)), Path(folder) / "last"
    checkpoint: dict[str, Any] = {"state_dict": {f"rank {dist.get_rank()}": torch.ones(100)}, "global_step": 1}
    saver.save(checkpoint, path, SaveOptions())
    if dist.get_rank() == dist.get_world_size() - 1:
        setattr(saving._Writer, "write_data", interrupt)  # noqa: B010 - as above
    try:
        saver.save({**checkpoint, "global_step": 2}, path, SaveOptions())
    except BaseException as error:  # KeyboardInterrupt is no Exception
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interrupt_of_a_write_remains_one(tmp_path: Path, world_size: int) -> None:
    *others, interrupted = run_ranks(world_size, _interrupted_while_writing, str(tmp_path))
    assert interrupted == "KeyboardInterrupt: "
    for text in others:
        assert text.startswith("CheckpointError: ")
        assert "rank 1: KeyboardInterrupt" in text
    assert [verify(path).step for path in complete_in(tmp_path)] == [1]


def _sharded_in_another_entry(folder: str) -> list[Outcome]:
    sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    path = Path(folder) / "last"
    entries: list[Any] = [sharded, {"teacher": {"weight": sharded}}, [(1, sharded)]]
    return [outcome_of(saving.save, {"state_dict": {}, "mine": entry}, path) for entry in entries]


def test_a_sharded_tensor_in_another_entry_is_refused(tmp_path: Path) -> None:
    for outcomes in run_ranks(2, _sharded_in_another_entry, str(tmp_path)):
        for outcome in outcomes:
            assert outcome.kind == "CheckpointError"
            assert "checkpoint['mine']: expected whole tensors, got a DTensor" in outcome.text


def _copied_from_gpus(folder: str) -> list[bool]:
    rank, path = dist.get_rank(), Path(folder) / "last"
    saver = Saver(timedelta(seconds=20))
    mesh = init_device_mesh("cuda", (2,))
    same = []
    for step in (1, 2):
        weight = distribute_tensor(torch.arange(1001.0, device="cuda") * step, mesh, [Shard(0)])
        checkpoint: dict[str, Any] = {
            "state_dict": {"weight": weight, f"rank {rank}": torch.full((3,), float(rank + step), device="cuda")},
            "global_step": step,
        }
        saver.save(checkpoint, path, SaveOptions(asynchronous=True))
        for tensor in checkpoint["state_dict"].values():
            (tensor.to_local() if tensor is weight else tensor).zero_()
        saver.wait()
        # no_dist makes torch warn, and warnings are errors here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        found = {"model.weight": torch.zeros(1001), "model.rank 1": torch.zeros(3)}
        load_tensors({**found}, storage_reader=SafeReader(path), no_dist=True)
        same.append(torch.equal(found["model.weight"], torch.arange(1001.0) * step))
        same.append(torch.equal(found["model.rank 1"], torch.full((3,), 1.0 + step)))
    assert all(copy.is_pinned() for copy in saver._copies.values())
    return same


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="copies from GPUs")
def test_copies_from_gpus(tmp_path: Path) -> None:
    assert run_ranks(2, _copied_from_gpus, str(tmp_path), backend="nccl") == [[True] * 4] * 2
