"""Tensors of a folder's safetensors, in one file or in several with an index, read whole or in part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ringflash.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
COMPARED_ROWS = 4096
ANEW = "Download or write the folder anew."


class TensorFiles:
    """Tensors of a folder. Files are opened when a tensor is read, so that none stays in memory.

    Args:
        folder: folder with model.safetensors, or the files that model.safetensors.index.json lists.

    Raises:
        CheckpointError: no such folder or files, pickled weights, or a file that is damaged or differs from the index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, str] = {}
        self._dtypes: dict[str, str] = {}
        self._kept: dict[str, Any] | None = None  # opened files, while they are kept
        listed = None if (self.folder / SINGLE).is_file() else self._index()
        for file in [SINGLE] if listed is None else sorted(set(listed.values())):
            with _opened(self.folder / file) as opened:
                for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                    if listed is None or listed.get(name) == file:
                        part = opened.get_slice(name)
                        self._files[name] = file
                        self.shapes[name], self._dtypes[name] = tuple(part.get_shape()), part.get_dtype()
        if lost := sorted(set(listed or ()) - self._files.keys()):
            assert listed is not None
            got = f"none in {listed[lost[0]]}, where the index has it"
            raise wrong_folder(self.folder, f"a tensor {lost[0]}", got, ANEW)

    def check_dtype(self, name: str) -> None:
        """Raises CheckpointError unless a weight can have the dtype of the tensor `name`."""
        if (got := self._dtypes[name]) not in DTYPES:
            remedy = "Convert the model to one of these; quantised weights cannot be trained."
            file = self.folder / self._files[name]
            raise CheckpointError(f"{file}: {name}", expected=f"one of {DTYPES}", got=got, remedy=remedy)

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Returns the `part` of the tensor `name`, a slice a dimension; () is the whole tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        file = self._files[name]
        if self._kept is None:
            with _opened(self.folder / file) as opened:
                return opened.get_slice(name)[part or ...]
        if file not in self._kept:
            self._kept[file] = _opened(self.folder / file)
        return self._kept[file].get_slice(name)[part or ...]

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keeps files open between reads, for many small tensors: opening a file reads the list of its tensors.

        Memory that is read from an open file may count as this process's.
        """
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def are_equal(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same shape and values. It reads a few thousand rows at once."""
        shape = self.shapes[name]
        if shape != self.shapes[other]:
            return False
        # A tensor without dimensions has no rows, and is read whole.
        parts = [(slice(row, row + COMPARED_ROWS),) for row in range(0, shape[0], COMPARED_ROWS)] if shape else [()]
        return all(torch.equal(self.read(name, part), self.read(other, part)) for part in parts)

    def _index(self) -> dict[str, str]:
        """Returns the file of each tensor."""
        file = self.folder / INDEX
        if not file.is_file():
            pickled = sorted(path.name for kind in PICKLED for path in self.folder.glob(kind))
            if pickled:
                remedy = "Unpickling can run code: have someone you trust convert them to safetensors."
                raise wrong_folder(self.folder, f"{SINGLE} or {INDEX}", f"pickled weights, {pickled[0]}", remedy)
            got = "a folder without" if self.folder.is_dir() else "no such folder"
            raise wrong_folder(
                self.folder, f"a folder with {SINGLE} or {INDEX}", got, "Pass a folder of transformers'."
            )
        try:
            listed = json.loads(file.read_bytes())["weight_map"]
            names = {str(name): str(at) for name, at in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise wrong_folder(file, "an index of tensors", f"unreadable: {error}", ANEW) from error
        if strange := sorted(at for at in names.values() if Path(at).name != at or not at.endswith(".safetensors")):
            remedy = "An index lists safetensors in its own folder and nothing else."
            raise wrong_folder(file, "names of safetensors in this folder", strange[0], remedy)
        return names


def local_part(tensor: DTensor) -> tuple[slice, ...]:
    """Returns the part of the whole `tensor` that this rank holds, a slice a dimension."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the tensor's mesh"
    begins, sizes = [0] * tensor.ndim, list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        assert type(placement) is Shard, f"weights are sharded or replicated, not {placement}"
        # Cuts as torch.chunk does: equal parts, then a shorter one, and none for the ranks after it.
        dim, size = placement.dim, sizes[placement.dim]
        part = -(-size // tensor.device_mesh.size(axis))
        begin = min(part * coordinate[axis], size)
        begins[dim], sizes[dim] = begins[dim] + begin, min(part, size - begin)
    assert tuple(sizes) == tensor.to_local().shape, "torch cuts a DTensor in another way"
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def save(tensors: dict[str, Tensor], file: Path, **metadata: str) -> None:
    """Writes tensors of PyTorch to a new file, with `metadata` in its header."""
    file.touch()
    mode = file.stat().st_mode  # follows the user's umask; safetensors would make the file private
    save_file(tensors, file, metadata={"format": "pt", **metadata})
    file.chmod(mode)


def fill_from(read: Callable[[tuple[slice, ...]], Tensor], tensor: Tensor) -> None:
    """Overwrites `tensor` in its dtype with what `read` returns for its part; of a DTensor that is this rank's part."""
    local, part = tensor, tuple(slice(0, size) for size in tensor.shape)
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            local, part = tensor.to_local(), local_part(tensor)
        if local.numel():
            # Goes to the device before the cast, because a cast on the host would hold a wider copy there.
            local.copy_(read(part).to(local.device))


def wrong_folder(where: Path, expected: str, got: object, remedy: str) -> CheckpointError:
    """Makes the error for a file or folder that does not hold what is expected."""
    return CheckpointError(str(where), expected=expected, got=got, remedy=remedy)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        got = "no such file" if not file.exists() else f"unreadable: {error}"
        raise wrong_folder(file, "a file of safetensors", got, ANEW) from error
