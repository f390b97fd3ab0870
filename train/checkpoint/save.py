"""Saving of checkpoints: the shards of all ranks into one folder, at once or while training continues."""

from __future__ import annotations

import io
import logging
import pickle
import re
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ringflash.errors import CheckpointError, RingflashError
from ringflash.train.checkpoint.collective import among_ranks, failed, on_every_rank
from ringflash.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSOR_INDEX,
    Keep,
    entry_of,
    partial_of,
    prepare,
    publish,
)
from ringflash.train.checkpoint.tensor_index import to_json
from ringflash.train.data.tokenizer import RUN_FOLDER
from ringflash.train.remote import RemoteCopy

log = logging.getLogger(__name__)

# Key in a checkpoint for further sharded tensors: {prefix: {name: tensor}}.
SHARDED = "sharded_tensors"


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save: `trainer.save_checkpoint(path, storage_options=SaveOptions(...))`.

    Args:
        asynchronous: return as soon as the state is copied to host memory, and write it while training continues. A
            save that is under way is waited for first. A writer's failure is raised by the next save, by `Saver.wait`,
            or at the end of the run; `LastCheckpoint` raises it at the next step boundary.
        keep: rule for the earlier checkpoints to keep; None: leave the folder's other checkpoints alone.
        remote: URL of a folder to which the checkpoint is copied too, as step-00000500; None: no copy.
    """

    asynchronous: bool = False
    keep: Keep | None = None
    remote: str | None = None


class Progress(IntEnum):
    """State of a rank's writer."""

    IDLE, WRITING, DONE, FAILED = range(4)


@dataclass(frozen=True)
class _Job:
    """Content of a save: each rank writes and copies its tensors, and only the first rank writes `state`."""

    path: Path
    tensors: dict[str, Tensor]
    state: bytes
    step: int | None
    keep: Keep | None
    copy: RemoteCopy | None
    published: threading.Event = field(default_factory=threading.Event)  # set when the folder has its final name


def save(
    checkpoint: dict[str, Any], path: Path, *, keep: Keep | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Writes Lightning's `checkpoint` to the folder `path`; every rank of `group`, by default all ranks, calls it.

    Tensors of the model and of the optimizers go to one file a rank. The rest goes to `state.pt`, which weights_only
    loading can read. All files are written to a folder next to `path`, with a manifest of sizes and SHA-256 digests.
    That folder is renamed when it is complete. A run that dies while saving therefore leaves the previous checkpoint
    for `load` to find.

    Raises:
        CheckpointError: on every rank, when one rank could not write; the error names that rank. Also when `path`
            exists and is no checkpoint, for an entry that weights_only loading refuses, for an entry of a state_dict
            that is no tensor, or for a DTensor in another entry.
    """
    _write(_begin(checkpoint, path, SaveOptions(keep=keep), group), None, group)


class Saver:
    """Saves one checkpoint at a time, at once or in a thread; every rank makes one and calls the same methods.

    Its ranks communicate over a separate gloo group, because collectives of a thread on the training group would mix
    with collectives of the main thread. `save` copies the shards during the call. It keeps the memory of the copies for
    the next save; memory for GPU tensors is pinned.

    Args:
        timeout: longest wait of a rank for the other ranks' parts.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None
        self._job: _Job | None = None

    @property
    def progress(self) -> Progress:
        """State of this rank's writer. All ranks agree on IDLE; they may reach the other states at different times."""
        if self._writing is None:
            return Progress.IDLE
        if not self._writing.done():
            return Progress.WRITING
        return Progress.DONE if self._writing.exception() is None else Progress.FAILED

    def save(self, checkpoint: dict[str, Any], path: Path, options: SaveOptions) -> None:
        """Saves like the function `save`. If asynchronous, it raises at once only errors in the call itself.

        Raises:
            CheckpointError: also the failure of the previous save.
        """
        self.wait()
        if self._group is None:
            group = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="ringflash checkpoints")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        job = _begin(checkpoint, path, options, self._group)
        if not options.asynchronous:
            _write(job, None, self._group)
            return
        self._job, device = job, self._stage(job.tensors)
        self._writing = Future()
        # A daemon thread, because a writer may wait for a dead rank and must not keep this process alive.
        threading.Thread(
            target=self._run, args=(job, device, self._writing), name="ringflash checkpoint", daemon=True
        ).start()

    def wait(self) -> None:
        """Waits until no save is under way. Raises the last save's failure, once and on every rank."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def give_up(self, patience: float) -> None:
        """Waits up to `patience` seconds for a save under way. Logs a warning if it is lost; raises nothing."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result(patience)
            except TimeoutError:
                log.warning("%s after %g s", self._what_is_lost(), patience)
            except Exception as error:  # another error is being raised already
                log.warning("%s: %s", self._what_is_lost(), error)

    def _what_is_lost(self) -> str:
        job = self._job
        if job is not None and job.copy is not None and job.published.is_set():
            return f"the checkpoint {job.path} is complete, but its copy at {job.copy.url} is not"
        return "a checkpoint was not complete, and is lost"

    @torch.no_grad()
    def _stage(self, tensors: dict[str, Tensor]) -> torch.device | None:
        """Copies this rank's shards to the host; returns the GPU of the shards, or None."""
        before, self._copies, device = self._copies, {}, None
        for name, tensor in tensors.items():
            local = _local(tensor)
            copy = before.pop(name, None)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._copies[name] = copy.copy_(local, non_blocking=True)
            device = local.device if local.is_cuda else device
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        return device

    @torch.no_grad()  # no_grad is a setting of each thread
    def _run(self, job: _Job, device: torch.device | None, writing: Future[None]) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread starts on the first GPU, and DCP would allocate memory there
            _write(job, _CopiesPlanner(self._copies), self._group)
        except RingflashError as error:  # the main thread raises it in `wait`
            writing.set_exception(error)
        except BaseException as error:
            what = f"rank {dist.get_rank(self._group)}, while it wrote with the others: {error}"
            writing.set_exception(failed(job.path, what))
        else:
            writing.set_result(None)


class _CopiesPlanner(DefaultSavePlanner):
    """Plans from the tensors' metadata alone, and writes the copies of their shards."""

    def __init__(self, copies: dict[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]


class _Writer(FileSystemWriter):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index of all ranks' tensors."""
        (Path(self.path) / TENSOR_INDEX).write_text(to_json(metadata, results))  # `publish` syncs all files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Writes this rank's file.

        Raises:
            OSError: names the folder and the free space on its disk, because torch only names a position in its own
                format.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if not re.search("inline_container|PytorchStreamWriter", str(error)):
                raise
            free = shutil.disk_usage(self.path).free
            text = f"the disk of {self.path} is full, or a limit on sizes is reached ({free >> 20} MiB are free)"
            raise OSError(text) from error


def named_tensors(prefix: str, values: dict[str, Any]) -> dict[str, Tensor]:
    """Returns `values` with `prefix` before their names.

    Raises:
        CheckpointError: a value is no tensor; it would be lost, or pickled.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{prefix}.{name}",
                expected="a tensor",
                got=type(value).__name__,
                remedy="Keep numbers in 0-dim tensors, as torch.optim.AdamW does its step, and the rest elsewhere.",
            )
    return {f"{prefix}.{name}": value for name, value in values.items()}


def optimizer_tensors(index: int, state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of the `index`-th optimizer's state by their names in a checkpoint."""
    parameters: dict[str, dict[str, Any]] = state["state"]
    named = {f"{parameter}.{name}": value for parameter, own in parameters.items() for name, value in own.items()}
    return named_tensors(f"optimizer.{index}", named)


def _begin(checkpoint: dict[str, Any], path: Path, options: SaveOptions, group: dist.ProcessGroup | None) -> _Job:
    """Splits `checkpoint` into tensors and state, and makes the folder to write to."""
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states", SHARDED)}
    optimizers = checkpoint.get("optimizer_states", [])
    rest["param_groups"] = [state["param_groups"] for state in optimizers]

    tensors: dict[str, Tensor] = {}
    state = io.BytesIO()

    def begin() -> None:
        tensors.update(named_tensors("model", checkpoint["state_dict"]))
        for index, optimizer in enumerate(optimizers):
            tensors.update(optimizer_tensors(index, optimizer))
        for prefix, named in checkpoint.get(SHARDED, {}).items():
            tensors.update(named_tensors(prefix, named))
        if dist.get_rank(group) == 0:
            state.write(_pack(rest))
            prepare(path)

    on_every_rank(begin, path, group)
    step = checkpoint.get("global_step")
    copy = None if options.remote is None else RemoteCopy(options.remote, step or 0)
    return _Job(path, tensors, state.getvalue(), step, options.keep, copy)


def _write(job: _Job, planner: DefaultSavePlanner | None, group: dist.ProcessGroup | None) -> None:
    """Writes the files, renames the folder to its final path, and copies the files to a URL if one is given."""
    partial, rank = partial_of(job.path), dist.get_rank(group)
    try:
        with among_ranks(job.path, group):
            save_tensors({**job.tensors}, storage_writer=_Writer(partial), planner=planner, process_group=group)
    except CheckpointException as error:
        if rank in error.failures and isinstance(error.failures[rank][0], KeyboardInterrupt):
            raise KeyboardInterrupt from error  # torch catches it as an error of the write
        texts = [f"rank {rank}: {type(e).__name__}: {e}".strip() for rank, (e, _) in error.failures.items()]
        raise failed(job.path, "; ".join(texts)) from error

    def write_rest() -> dict[str, dict[str, Any]]:
        mine = sorted(partial.glob(f"__{rank}_*"))
        if rank == 0:
            (partial / STATE).write_bytes(job.state)
            mine += [partial / STATE, partial / TENSOR_INDEX]
        return {file.name: entry_of(file) for file in mine}

    files: dict[str, dict[str, Any]] = {}
    for part in on_every_rank(write_rest, job.path, group):
        files |= part

    def finish() -> None:
        if rank == 0:
            publish(job.path, files, step=job.step, keep=job.keep)
            if job.copy is not None:
                job.copy.begin()

    on_every_rank(finish, job.path, group)
    job.published.set()
    if (copy := job.copy) is None:
        return

    def copy_files() -> None:
        for name in files:
            if name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__")):
                copy.add(job.path / name)
        if rank == 0:  # the tokenizer lies beside the folder of checkpoints
            for file in sorted((job.path.absolute().parents[1] / RUN_FOLDER).glob("*")):
                copy.add(file, RUN_FOLDER)

    def complete() -> None:
        if rank == 0:
            copy.add(job.path / MANIFEST)
            copy.retire(job.keep)

    on_every_rank(copy_files, job.path, group)
    on_every_rank(complete, job.path, group)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _has_shards(value: Any) -> bool:
    """Returns whether `value` is a DTensor, or a collection that holds one."""
    if isinstance(value, Mapping):
        return any(map(_has_shards, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, list | tuple) and any(map(_has_shards, value)))


def _pack(rest: dict[str, Any]) -> bytes:
    """Returns `rest` in the format of torch.save, after a trial of loading it with weights_only."""
    for key, value in rest.items():
        if _has_shards(value):
            raise CheckpointError(
                f"checkpoint[{key!r}]",
                expected="whole tensors",
                got="a DTensor, of which only the first rank's shard would be saved",
                remedy=f"Save DTensors by name as checkpoint[{SHARDED!r}][prefix], or their full_tensor().",
            )
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint[{key!r}]",
                expected="numbers, strings, tensors, and lists and dicts of them",
                got=named[1] if (named := re.search(r"GLOBAL (\S+)", str(error))) else str(error).splitlines()[0],
                remedy="Save plain values in the hook that adds it: asdict(config), str(path).",
            ) from error
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()
