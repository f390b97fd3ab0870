"""Index of a checkpoint's tensors: a JSON file with each tensor's dtype, shape and chunks.

    {"tensors": {name: {"dtype": "float32", "shape": [8, 4], "chunks": [chunk, ...]}}}
    chunk: {"offsets": [4, 0], "shape": [4, 4], "file": "__1_0.distcp", "start": 0, "length": 1364}

A chunk is the part of a tensor that one rank saved: `length` bytes of `file` from the byte `start` on. DCP would store
the same facts in a pickle. A pickle can run code when it is read, and may crash Python when it is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ringflash.torch_private import storage_info

if TYPE_CHECKING:
    from ringflash.torch_private import StorageInfo


def to_json(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> str:
    """Returns the index of the tensors that the ranks have written; `results` holds the writes of each rank."""
    places = {write.index: write.storage_data for writes in results for write in writes}
    tensors: dict[str, Any] = {}
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(entry, TensorStorageMetadata), name
        chunks = []
        for chunk in entry.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            file = {"file": place.relative_path, "start": place.offset, "length": place.length}
            chunks.append({"offsets": list(chunk.offsets), "shape": list(chunk.sizes), **file})
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return json.dumps({"tensors": tensors}, indent=1)


def from_json(text: str | bytes) -> Metadata:
    """Returns the index in the form that DCP needs.

    Raises:
        ValueError: names the first entry that `to_json` does not write.
    """
    try:
        content: Any = json.loads(text)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    tensors = content.get("tensors") if isinstance(content, dict) else None
    if not isinstance(tensors, dict):
        raise ValueError("no table of tensors")
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    for name, entry in tensors.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{name}: {entry!r}")
        dtype = getattr(torch, str(entry.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: dtype {entry.get('dtype')!r}")
        size = _size(name, entry, "shape")
        chunks = entry.get("chunks")
        if not isinstance(chunks, list):
            raise ValueError(f"{name}: chunks {chunks!r}")
        parts = []
        for chunk in chunks:
            offsets, shape = _size(name, chunk, "offsets"), _size(name, chunk, "shape")
            if not len(offsets) == len(shape) == len(size):
                raise ValueError(f"{name}: a chunk of {shape} at {offsets} in a tensor of {size}")
            file = chunk.get("file")
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{name}: data in {file!r}")
            start, length = _integer(name, chunk.get("start")), _integer(name, chunk.get("length"))
            parts.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
            places[MetadataIndex(name, torch.Size(offsets))] = storage_info(file, start, length)
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), parts)
    return Metadata(entries, storage_data=places)


def _size(name: str, entry: Any, key: str) -> list[int]:
    size = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(size, list):
        raise ValueError(f"{name}: {key} {size!r}")
    return [_integer(name, n) for n in size]


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{name}: expected an integer from 0 to 2^63 - 1, got {value!r}")
    return value
