"""Runs a function on N processes, over gloo or NCCL, and collects what each rank returns."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it
from torch.multiprocessing.spawn import ProcessException, start_processes

from tests.helpers import one_gpu
from tests.helpers.strict import make_warnings_errors

# The fork server imports these modules once for all ranks, so that a rank starts in milliseconds. Without
# torch._dynamo in the list, the first call of an operator would import it, which takes seconds; ranks that train import
# the others. A package that is not installed is left out. peft imports bitsandbytes, which initializes CUDA, and then
# no fork can use CUDA: GPU machines leave out peft, and the models that import it.
PRELOADED = [
    *("torch", "torch._dynamo", "lightning.pytorch", "jsonargparse", "hypothesis", "pytest", "ringflash"),
    *("ringflash.train.lightning.language_model", "ringflash.train.lightning.transformers_model", "accelerate"),
    *(() if one_gpu.GPUS else ("peft", "transformers.modeling_utils", "transformers.models.llama.modeling_llama")),
    *(__name__, "tests.train.preloaded"),
]
PROCESSES = multiprocessing.get_context("forkserver")


def _entry(
    rank: int, world_size: int, folder: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what the fork server made stays out of garbage collection, and so in memory that ranks share
    make_warnings_errors()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = FileStore(f"{folder}/store", world_size)
    one_gpu.init_process_group(backend, rank, world_size, store, timedelta(seconds=60))
    try:
        result: Any = function(*args)
    except BaseException as error:  # the parent decides how to treat the failure
        result = RankFailure(type(error).__name__, str(error), traceback.format_exc())
    torch.save(result, f"{folder}/{rank}.pt")
    one_gpu.meet()
    dist.destroy_process_group()


class RankFailure:
    """An exception that a rank raised: its class name, text and traceback."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        self.kind, self.text, self.trace = kind, text, trace


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Returns the results of `function(*args)` on every rank of a fresh world; fails if a rank raises.

    `function` must be importable (module level), and its result must be picklable.
    """
    results = try_ranks(world_size, function, *args, backend=backend)
    failures = [(rank, each) for rank, each in enumerate(results) if isinstance(each, RankFailure)]
    if failures:
        # Peers of a rank that raised wait for it in vain. Their errors come first, so that the cause is at the end.
        waited = {"RingTimeout", "PeerFailed", "PeerLost", "GroupFailed"}
        failures.sort(key=lambda failure: failure[1].kind not in waited)
        raise AssertionError("\n".join(f"rank {rank} of {world_size} raised\n{each.trace}" for rank, each in failures))
    return results


def try_ranks(world_size: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Like `run_ranks`, but returns a rank's exception as a `RankFailure` in place of its result.

    Ranks may wait in vain for one that raised, and end the world. The error of the first of them then gets notes of
    what others had raised before.
    """
    with one_gpu.turn(backend, world_size), tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(PRELOADED)
        arguments = (world_size, folder, backend, function, args)
        paths = [Path(folder) / f"{rank}.pt" for rank in range(world_size)]
        try:
            start_processes(_entry, args=arguments, nprocs=world_size, join=True, start_method="forkserver")
        except ProcessException as error:
            for rank, path in enumerate(paths):
                result = torch.load(path, weights_only=False) if path.exists() else None
                if isinstance(result, RankFailure):
                    error.add_note(f"rank {rank} of {world_size} raised\n{result.trace}")
            raise
        return [torch.load(path, weights_only=False) for path in paths]
