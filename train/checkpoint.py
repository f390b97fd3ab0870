"""Sharded checkpoints: a folder that is complete or absent, verified before use, loadable at any world size."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from ringflash.errors import CheckpointError
from ringflash.train.folder import STATE, TENSOR_INDEX, damaged, entry_of, locate, partial_of, prepare, publish, verify
from ringflash.train.model import Decoder
from ringflash.train.model_config import ModelConfig

PICKLED_NAMES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes Lightning's `checkpoint` to the folder `path`; every rank of the default group calls it.

    Tensors of the model and of the optimizers go to one file a rank, the rest to `state.pt`, which weights_only
    loading can read. All of it is written to a folder beside `path`, with a manifest of sizes and SHA-256 digests, and
    renamed when complete: a run that dies while saving leaves the previous checkpoint for `load` to find.

    Raises:
        CheckpointError: on every rank, when one of them could not write, naming it; when `path` is there and is no
            checkpoint; or for an entry that weights_only loading refuses, or of a state_dict and no tensor.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    optimizers = checkpoint.get("optimizer_states", [])
    rest["param_groups"] = [state["param_groups"] for state in optimizers]
    tensors: dict[str, Any] = {}

    def begin() -> None:
        tensors.update(_named_tensors("model", checkpoint["state_dict"]))
        for index, state in enumerate(optimizers):
            tensors.update(_optimizer_tensors(index, state))
        if _rank() == 0:
            prepare(path)

    def write_rest() -> dict[str, dict[str, Any]]:
        partial = partial_of(path)
        if _rank() == 0:
            (partial / STATE).write_bytes(_pack(rest))
        mine = [partial / STATE, partial / TENSOR_INDEX] if _rank() == 0 else []
        return {file.name: entry_of(file) for file in [*mine, *sorted(partial.glob(f"__{_rank()}_*"))]}

    def finish() -> None:
        if _rank() == 0:
            publish(path, files)

    _on_every_rank(begin, path)
    try:
        save_tensors(tensors, storage_writer=_Writer(partial_of(path)))
    except CheckpointException as error:
        texts = [f"rank {rank}: {type(e).__name__}: {e}".strip() for rank, (e, _) in error.failures.items()]
        raise _failed(path, "; ".join(texts)) from error
    files: dict[str, dict[str, Any]] = {}
    for part in _on_every_rank(write_rest, path):
        files |= part
    _on_every_rank(finish, path)


def load(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], model_config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Fills `model` and `optimizers`, at any world size, and returns the rest; every rank calls it.

    Raises:
        CheckpointError: no such folder; incomplete; a file that is not as the manifest says; or another model or
            optimizer, whose tensors have other names or shapes.
    """
    path = locate(path)
    rest = _open(path)
    if model_config is not None:
        compare_model_configs(rest.get("model_config"), model_config)
    groups = rest.pop("param_groups", [])
    if optimizers and len(groups) != len(optimizers):
        raise CheckpointError(
            str(path),
            expected=f"the state of {len(optimizers)} optimizer(s)",
            got=f"{len(groups)}, weights only" if not groups else len(groups),
            remedy="Resume with the optimizers it was trained with."
            if groups
            else "Save with save_weights_only=False to resume training.",
        )
    state = cast("dict[str, Any]", get_model_state_dict(model))
    _read(_named_tensors("model", state), path, "model.")
    set_model_state_dict(model, state, options=StateDictOptions(strict=True))
    for index, optimizer in enumerate(optimizers):
        optimizer_state = cast("dict[str, Any]", get_optimizer_state_dict(model, optimizer))
        _read(_optimizer_tensors(index, optimizer_state), path, f"optimizer.{index}.")
        set_optimizer_state_dict(model, optimizer, {**optimizer_state, "param_groups": groups[index]})
    return rest


def load_decoder(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder that a checkpoint of `LanguageModel` holds, whole, on the CPU of this one process.

    Raises:
        CheckpointError: as `load`; or a checkpoint that holds no decoder.
    """
    path = locate(Path(path))
    rest = _open(path, alone=True)
    if not isinstance(config := rest.get("model_config"), dict):
        raise CheckpointError(
            str(path), expected="a checkpoint of LanguageModel", got="no model_config", remedy="Pass another folder."
        )
    with torch.device("meta"):
        decoder = Decoder(ModelConfig.from_fields(config))
    decoder.to(dtype).to_empty(device="cpu")
    prefix = "model._decoder."
    _read({f"{prefix}{name}": value for name, value in decoder.state_dict().items()}, path, prefix, alone=True)
    return decoder


def compare_model_configs(saved: dict[str, Any] | None, current: dict[str, Any]) -> None:
    """Raises CheckpointError, listing the fields that differ, unless a checkpoint's model is the current one.

    Fields of `ModelConfig` that a checkpoint is too old to have are at their defaults.
    """
    usual = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING and f.name in current}
    before = usual | (saved or {})
    names: list[str] = sorted({*before, *current})
    differing = [f"{n} {before.get(n)} (now {current.get(n)})" for n in names if before.get(n) != current.get(n)]
    if differing:
        raise CheckpointError(
            "model_config",
            expected="a checkpoint of this model",
            got="none in the checkpoint" if saved is None else ", ".join(differing),
            remedy="Resume with the configuration that the checkpoint was trained with.",
        )


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP's own holds a Path of this machine, which SafeReader has no reason to admit


class SafeReader(FileSystemReader):
    """DCP's file reader, whose index is a pickle: admits only the classes of an index of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of tensors.

        Raises:
            CheckpointError: the pickle names anything else, or lists an entry that would be unpickled.
        """
        file = Path(self.path) / TENSOR_INDEX
        try:
            metadata = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise damaged(file, f"unreadable: {error}") from error
        if not isinstance(metadata, Metadata):
            raise damaged(file, f"a {type(metadata).__name__}")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise damaged(file, f"{name}, which is no tensor")
        metadata.planner_data = None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
                raise damaged(file, f"data in {info.relative_path}")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PICKLED_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise damaged(Path(TENSOR_INDEX), f"it names {module}.{name}, which no index of tensors needs")


def _open(path: Path, *, alone: bool = False) -> dict[str, Any]:
    if alone:
        verify(path)
    else:
        _on_every_rank(lambda: verify(path, part=_rank(), parts=dist.get_world_size()), path)
    try:
        return torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise damaged(path / STATE, f"unreadable: {error}") from error


def _read(tensors: dict[str, Any], path: Path, prefix: str, *, alone: bool = False) -> None:
    """Reads `tensors` in place, having compared their names and shapes with all that the index has under `prefix`."""
    index = SafeReader(path).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        entry = index.get(name)
        saved = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if saved != tuple(tensor.shape):
            raise CheckpointError(
                str(path),
                expected=f"{name} of shape {tuple(tensor.shape)}",
                got="no such tensor" if saved is None else saved,
                remedy="Load it into what it was saved from.",
            )
    if more := sorted(name for name in index if name.startswith(prefix) and name not in tensors):
        raise CheckpointError(
            str(path),
            expected=f"the {len(tensors)} tensors under {prefix}* that there is a place for",
            got=f"{len(more)} more, the first {more[0]}",
            remedy="Load it into what it was saved from.",
        )
    with warnings.catch_warnings():
        # DCP says so whenever it is asked to load in one process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        load_tensors(tensors, storage_reader=SafeReader(path), no_dist=alone)


def _optimizer_tensors(index: int, state: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, dict[str, Any]] = state["state"]
    named = {f"{parameter}.{name}": value for parameter, own in parameters.items() for name, value in own.items()}
    return _named_tensors(f"optimizer.{index}", named)


def _named_tensors(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with `prefix` before their names; other values than tensors would be lost, or pickled."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{prefix}.{name}",
                expected="a tensor",
                got=type(value).__name__,
                remedy="Keep numbers in 0-dim tensors, as torch.optim.AdamW does its step, and the rest elsewhere.",
            )
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _on_every_rank(function: Callable[[], Any], path: Path) -> list[Any]:
    """Calls `function` on each rank and gathers the results; an error on one rank is raised on all."""
    result, fields = None, None
    try:
        result = function()
    except (CheckpointError, OSError) as raised:
        error = raised if isinstance(raised, CheckpointError) else _failed(path, f"rank {_rank()}: {raised}")
        fields = {name: getattr(error, name) for name in ("argument", "expected", "got", "remedy")}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, fields))
    for _, failure in gathered:
        if failure is not None:
            raise CheckpointError(**failure)
    return [value for value, _ in gathered]


def _pack(rest: dict[str, Any]) -> bytes:
    """`rest` as torch.save writes it, after a trial of loading it with weights_only."""
    for key, value in rest.items():
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


def _failed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        str(path),
        expected="every rank to read and write it",
        got=what,
        remedy="Look at that rank, and at the space and rights on its file system; earlier checkpoints are untouched.",
    )


def _rank() -> int:
    return dist.get_rank()
