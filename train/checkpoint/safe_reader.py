"""Reading of a checkpoint's tensors without unpickling anything but tensors."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ringflash.train.checkpoint.manifest import TENSOR_INDEX, damaged
from ringflash.train.checkpoint.tensor_index import from_json


class SafeReader(FileSystemReader):
    """DCP's file reader, with a JSON index instead of a pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index of tensors.

        Raises:
            CheckpointCorrupt: the index is unreadable, or holds entries that `tensor_index.to_json` does not write.
        """
        file = Path(self.path) / TENSOR_INDEX
        try:
            metadata = from_json(file.read_bytes())
        except ValueError as error:
            raise damaged(file, f"unreadable: {error}") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the tensors of a plan, file by file.

        Raises:
            CheckpointCorrupt: a file's content is no tensor, or differs from the index; the error names the file.
        """
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # content with the right digest may raise almost any error
                # A tensor's content that is shifted makes its reader seek to before the file's start: EINVAL.
                if isinstance(error, OSError) and error.errno != errno.EINVAL:
                    raise
                raise damaged(Path(self.path) / name, f"unreadable: {type(error).__name__}: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done
