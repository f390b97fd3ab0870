"""Weights in safetensors, in one file or in several with an index; each rank reads its own part of each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
MAX_FILE_BYTES = 5 * 10**9
# Some folders hold more than the parameters: frequencies, which transformers recomputes too, and a tied head's copy of
# the embedding.
FREQUENCIES, HEAD, EMBEDDING = ".rotary_emb.inv_freq", "lm_head.weight", "model.embed_tokens.weight"
COMPARED_ROWS = 4096


def stored_name(name: str) -> str:
    """Returns transformers' name of a decoder's parameter."""
    return name if name.startswith("lm_head.") else f"model.{name}"


class Weights:
    """Tensors of a transformers folder that holds a decoder. Files are opened when a tensor is read.

    Args:
        folder: folder with model.safetensors, or the files that model.safetensors.index.json lists.

    Raises:
        CheckpointError: no such folder or files, pickled weights, or a file that is damaged or differs from the index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        listed = None if (self.folder / SINGLE).is_file() else self._index()
        for file in [SINGLE] if listed is None else sorted(set(listed.values())):
            with _opened(self.folder / file) as opened:
                for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                    part = opened.get_slice(name)
                    if part.get_dtype() not in DTYPES:
                        remedy = "Convert the model to one of these; quantised weights cannot be trained."
                        got = part.get_dtype()
                        raise CheckpointError(
                            f"{self.folder / file}: {name}", expected=f"one of {DTYPES}", got=got, remedy=remedy
                        )
                    if listed is None or listed.get(name) == file:
                        self._files[name], self._shapes[name] = file, tuple(part.get_shape())
        if lost := sorted(set(listed or ()) - self._files.keys()):
            assert listed is not None
            got = f"none in {listed[lost[0]]}, where the index has it"
            raise _wrong(self.folder, f"a tensor {lost[0]}", got, "Download or write the folder anew.")

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares the tensors with the names and `shapes` of all parameters of a decoder.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or has no place in the decoder; the error names it.
        """
        remedy = "Use the config.json that belongs to these weights."
        for name, shape in ((stored_name(name), tuple(shape)) for name, shape in shapes.items()):
            if (found := self._shapes.get(name)) != shape:
                got = "no such tensor" if found is None else found
                raise _wrong(self.folder, f"{name} of shape {shape}", got, remedy)
        known = {stored_name(name) for name in shapes}
        more = sorted(n for n in self._shapes if n not in known and n != HEAD and not n.endswith(FREQUENCIES))
        if more:
            got = f"{len(more)} more, the first {more[0]}"
            raise _wrong(self.folder, f"the {len(known)} tensors that there is a place for", got, remedy)
        if HEAD in self._shapes and HEAD not in known and not self._is_copy(HEAD, EMBEDDING):
            remedy = "Set tie_word_embeddings to false."
            raise _wrong(self.folder, f"{HEAD} equal to the embedding, which it shares", "another", remedy)

    def fill(self, module: str, name: str, parameter: Tensor) -> None:
        """Overwrites `parameter`, called `name` in `module`, in its dtype; of a DTensor it reads only this rank's part.

        Raises:
            CheckpointError: the file cannot be read.
        """
        stored = stored_name(f"{module}.{name}")
        local, rows = parameter, tuple(slice(0, size) for size in parameter.shape)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                local, rows = parameter.to_local(), local_part(parameter)
            if local.numel():
                with _opened(self.folder / self._files[stored]) as opened:
                    local.copy_(opened.get_slice(stored)[rows])

    def _is_copy(self, name: str, other: str) -> bool:
        if self._shapes[name] != self._shapes[other]:
            return False
        with _opened(self.folder / self._files[name]) as one, _opened(self.folder / self._files[other]) as two:
            first, second = one.get_slice(name), two.get_slice(other)
            parts = (slice(row, row + COMPARED_ROWS) for row in range(0, self._shapes[name][0], COMPARED_ROWS))
            return all(torch.equal(first[rows], second[rows]) for rows in parts)

    def _index(self) -> dict[str, str]:
        """Returns the file of each tensor."""
        file = self.folder / INDEX
        if not file.is_file():
            pickled = sorted(path.name for kind in PICKLED for path in self.folder.glob(kind))
            if pickled:
                remedy = "Unpickling can run code: have someone you trust convert them to safetensors."
                raise _wrong(self.folder, f"{SINGLE} or {INDEX}", f"pickled weights, {pickled[0]}", remedy)
            got = "a folder without" if self.folder.is_dir() else "no such folder"
            raise _wrong(self.folder, f"a folder with {SINGLE} or {INDEX}", got, "Pass a folder of transformers'.")
        try:
            listed = json.loads(file.read_bytes())["weight_map"]
            names = {str(name): str(at) for name, at in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            remedy = "Download or write the folder anew."
            raise _wrong(file, "an index of tensors", f"unreadable: {error}", remedy) from error
        if strange := sorted(at for at in names.values() if Path(at).name != at or not at.endswith(".safetensors")):
            remedy = "An index lists safetensors in its own folder and nothing else."
            raise _wrong(file, "names of safetensors in this folder", strange[0], remedy)
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


def write(
    tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Writes a decoder's `tensors` into `folder` as `dtype`, in files of at most `max_file_bytes`.

    A larger tensor gets a file of its own. Only one file's tensors are converted at a time.
    """
    groups: list[list[str]] = [[]]
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in tensors.items()}
    room = max_file_bytes
    for name, size in sizes.items():
        if size > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        part = {stored_name(name): tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # follows the user's umask; safetensors would make the file private
        save_file(part, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)
        weight_map |= dict.fromkeys(part, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        got = "no such file" if not file.exists() else f"unreadable: {error}"
        raise _wrong(file, "a file of safetensors", got, "Download or write the folder anew.") from error


def _wrong(where: Path, expected: str, got: object, remedy: str) -> CheckpointError:
    return CheckpointError(str(where), expected=expected, got=got, remedy=remedy)
