"""Weights of a decoder: drawn from a seed, or read from safetensors, of which each rank reads its own part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ringflash.train.weights.tensor_files import INDEX, SINGLE, TensorFiles, fill_from, save, wrong_folder

INIT_STD = 0.02
MAX_FILE_BYTES = 5 * 10**9
# Some folders hold more than the parameters: frequencies, which transformers recomputes too, and a tied head's copy of
# the embedding.
FREQUENCIES, HEAD, EMBEDDING = ".rotary_emb.inv_freq", "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Init:
    """Initial values of a weight: truncated normal of `std`, from a generator seeded by `seed` and the weight's name.

    The values do not depend on other weights, on the global generator or on the world size. Any rank can therefore make
    any weight, and every sharding starts from the same model.
    """

    name: str
    seed: int
    std: float = INIT_STD

    def fill(self, weight: Tensor) -> None:
        """Overwrites `weight`; for a DTensor every rank draws the whole weight and keeps its shard."""
        digest = hashlib.blake2b(f"{self.seed}/{self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        full = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        nn.init.trunc_normal_(full, std=self.std, a=-3 * self.std, b=3 * self.std, generator=generator)
        with torch.no_grad():
            if isinstance(weight, DTensor):
                full = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
            weight.copy_(full)


def stored_name(name: str) -> str:
    """Returns transformers' name of a decoder's parameter."""
    return name if name.startswith("lm_head.") else f"model.{name}"


class Weights(TensorFiles):
    """Tensors of a transformers folder that holds a decoder.

    Args:
        folder: as in `TensorFiles`.

    Raises:
        CheckpointError: as `TensorFiles`; or a tensor of a dtype that weights cannot have.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        for name in self.shapes:
            self.check_dtype(name)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares the tensors with the names and `shapes` of all parameters of a decoder.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or has no place in the decoder; the error names it.
        """
        remedy = "Use the config.json that belongs to these weights."
        for name, shape in ((stored_name(name), tuple(shape)) for name, shape in shapes.items()):
            if (found := self.shapes.get(name)) != shape:
                got = "no such tensor" if found is None else found
                raise wrong_folder(self.folder, f"{name} of shape {shape}", got, remedy)
        known = {stored_name(name) for name in shapes}
        more = sorted(n for n in self.shapes if n not in known and n != HEAD and not n.endswith(FREQUENCIES))
        if more:
            got = f"{len(more)} more, the first {more[0]}"
            raise wrong_folder(self.folder, f"the {len(known)} tensors that there is a place for", got, remedy)
        if HEAD in self.shapes and HEAD not in known and not self.are_equal(HEAD, EMBEDDING):
            remedy = "Set tie_word_embeddings to false."
            raise wrong_folder(self.folder, f"{HEAD} equal to the embedding, which it shares", "another", remedy)

    def fill(self, module: str, name: str, parameter: Tensor) -> None:
        """Overwrites `parameter`, called `name` in `module`, in its dtype; of a DTensor it reads only this rank's part.

        Raises:
            CheckpointError: the file cannot be read.
        """
        fill_from(partial(self.read, stored_name(f"{module}.{name}")), parameter)


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
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
