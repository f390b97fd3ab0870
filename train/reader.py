"""Reads the index and the tensors of a checkpoint without unpickling anything that is not needed for that."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ringflash.errors import CheckpointError
from ringflash.train.folder import TENSOR_INDEX, damaged

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the tensors of a plan, file by file.

        Raises:
            CheckpointCorrupt: naming the file whose content is no tensor, or another one than the index says.
        """
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except (OSError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # content with the right digest may raise nearly anything
                raise damaged(Path(self.path) / name, f"unreadable: {type(error).__name__}: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PICKLED_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.2, for one, finds an enum's member
            return _member
        raise damaged(Path(TENSOR_INDEX), f"it names {module}.{name}, which no index of tensors needs")


def _member(kind: Any, name: Any) -> Any:
    """A member of an enum that the index names, and nothing else that `getattr` could find."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind.__members__[name]
    raise damaged(Path(TENSOR_INDEX), f"it asks {kind!r} for {name!r}, which no index of tensors needs")
