"""Training runs that several tests share, made once, because each world size costs a start of its processes."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from functools import cache, partialmethod
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.fabric.utilities import registry

from ringflash.train.models.decoder import Decoder
from tests.helpers.distributed import run_ranks
from tests.train.conversations import prepare_conversations, train_on_conversations
from tests.train.runs import MODEL, Outcome, Run, attempt, train

# Each of Lightning's Trainers looks for callbacks in the metadata of all installed packages.
callbacks: Any = registry
callbacks.entry_points = cache(entry_points)

RESUMED = Run(epoch_batches=5, micro_batches=2, dtype="float64")
RUNS = {
    "uneven": Run(masked="tail", layout="contiguous"),
    "uneven float64": Run(masked="tail", layout="contiguous", dtype="float64"),
    "accumulate": Run(micro_batches=3, masked="tail", layout="contiguous"),
    "accumulate after nothing": Run(micro_batches=2, masked="first micro-batch"),
    "short window": Run(micro_batches=3, epoch_batches=2),
    "all masked": Run(micro_batches=2, masked="all"),
    "clip norm": Run(max_norm=0.3),
    "clip value": Run(max_value=1e-3),
    "tied": Run(model=replace(MODEL, tie_embeddings=True)),
    "activation checkpointing": Run(checkpointing="block"),
    "packed": Run(
        steps=3, packed=True, micro_batches=2, masked="tail", epoch_batches=5, validate=True, dtype="float64"
    ),
    "evaluate": Run(steps=4, epoch_batches=2, validate=True, dtype="float64"),
}
# Runs that three ranks leave out, because two ranks show the same.
OF_ANY_SIZE = ("short window", "tied", "activation checkpointing")


def _compiled(run: Run) -> Outcome:
    """Trains with torch.compile's "aot_eager" backend; the C++ compiler would take longer to start than all runs."""
    # torch warns when its compiler is imported, and when the compiler inspects the input of the second block
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    with mock.patch.object(Decoder, "compile_blocks", partialmethod(Decoder.compile_blocks, backend="aot_eager")):
        return train(run)


def _all_runs(folder: str) -> dict[str, Any]:
    world_size = dist.get_world_size()
    names = [name for name in RUNS if world_size < 3 or name not in OF_ANY_SIZE]
    outcomes: dict[str, Any] = {name: train(RUNS[name]) for name in names}
    outcomes["conversations"] = train_on_conversations(Path(folder) / "chats")
    # Two ranks save after the first epoch, three resume and save after the second, and one rank resumes for the third.
    # One rank also runs all three epochs without a break.
    saved = {2: (None, "two", 1), 3: ("two", "three", 2), 1: ("three", "one", 3)}
    source, target, epochs = saved[world_size]
    outcomes["resumed"] = train(
        replace(RESUMED, resume=source and f"{folder}/{source}", save=f"{folder}/{target}", max_epochs=epochs)
    )
    if world_size == 1:
        outcomes["straight"] = train(replace(RESUMED, max_epochs=3))
    if world_size == 2:
        outcomes["data parallel"] = train(Run(data_parallel=2, masked="tail"))
        outcomes["compiled"] = _compiled(Run(checkpointing="block", compile_blocks=True))
        outcomes["poisoned"] = attempt(Run(steps=3, poison=1))
        outcomes["other model"] = attempt(
            Run(resume=f"{folder}/two", dtype="float64", model=replace(MODEL, ffn_dim=128, tie_embeddings=True))
        )
        damaged = Path(folder) / "damaged"
        if dist.get_rank() == 0:
            shutil.copytree(f"{folder}/two", damaged)
            with (damaged / "__1_0.distcp").open("r+b") as stream:
                stream.seek(100)
                byte = stream.read(1)
                stream.seek(100)
                stream.write(bytes([byte[0] ^ 1]))
        dist.barrier()
        outcomes["damaged"] = attempt(Run(resume=str(damaged), dtype="float64"))
        outcomes["missing"] = attempt(Run(resume=f"{folder}/nowhere", dtype="float64"))
    return outcomes


class Worlds:
    """Outcomes of `RUNS` by world size; `worlds[3]["float64"]` is rank 0's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "chats").mkdir()
        prepare_conversations(folder / "chats")
        self.ranks: dict[int, list[dict[str, Any]]] = {n: run_ranks(n, _all_runs, str(folder)) for n in (2, 3, 1)}

    def __getitem__(self, world_size: int) -> dict[str, Outcome]:
        return self.ranks[world_size][0]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1200))  # the first of these tests makes all runs
            item.add_marker(pytest.mark.xdist_group("worlds"))


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("checkpoints"))
