"""Weights of a transformers model from a folder: the model is built without storage, and each rank reads its part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import ringflash as rf
from ringflash.train.weights.tensor_files import INDEX, SINGLE, TensorFiles, fill_from, wrong_folder

ADAPTER, GENERATION = "adapter_config.json", "generation_config.json"
NAMED = 5  # names that an error lists
# Stand-in weights are as large as the usual initial weights. The period is prime, so that no two rows are equal.
STD, PERIOD, SPREAD = 0.02, 1_000_003, 65_536


class NotInParts(Exception):
    """The reason for which transformers must load a folder as a whole."""


class TransformersWeights:
    """Tensors of a folder, matched with those of a transformers model without storage.

    Args:
        folder: folder with safetensors.
        model: model of the folder's configuration, or of a part of it.
        config: the folder's configuration.

    Raises:
        CheckpointError: files are damaged, a tensor is missing, has another shape or no place in the model, or weights
            are of a dtype that cannot be trained.
        NotInParts: transformers must load the folder.
    """

    def __init__(self, folder: str | Path, model: Any, config: Any) -> None:
        self.files = TensorFiles(folder)
        try:
            match = rf.hf.match_weights(model, self.files.shapes)
        except Exception as error:  # transformers may change its tables, and a conversion may need values
            raise NotInParts(f"transformers' names do not apply: {type(error).__name__}: {error}") from error
        self.sources = match.sources
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if drawn := [name for name in match.drawn if name in parameters]:
            raise NotInParts(f"it has no {drawn[0]}, which transformers draws at random")
        remedy = "Use the config.json that belongs to these weights."
        if match.missing:
            got = f"{len(match.missing)} missing: {_some(match.missing)}"
            raise wrong_folder(self.files.folder, f"all tensors of {type(model).__name__}", got, remedy)
        if match.unexpected and type(config) is type(model.config):  # else other parts of a larger model
            got = f"{len(match.unexpected)} more: {_some(match.unexpected)}"
            raise wrong_folder(self.files.folder, f"the tensors of {type(model).__name__}", got, remedy)
        tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
        for source in self.sources:
            for name, shape in source.shapes.items():
                if (expected := tuple(tensors[name].shape)) != shape:
                    raise wrong_folder(self.files.folder, f"{name} of shape {expected}", shape, remedy)
                if name in parameters:
                    for stored in (x for names in source.stored.values() for x in names):
                        self.files.check_dtype(stored)
        self._drop_copies(parameters)

    @property
    def digest(self) -> str:
        """Digest of the stored names and shapes, which must be the same on all ranks."""
        return hashlib.blake2b(repr(sorted(self.files.shapes.items())).encode(), digest_size=8).hexdigest()

    def fill(self, model: nn.Module) -> None:
        """Overwrites the model's parameters and persistent buffers, in their dtypes; of DTensors this rank's part.

        Tensors that transformers converts are read whole, one conversion at a time. Of stacked experts a rank reads
        those that it keeps.

        Raises:
            CheckpointError: a file cannot be read.
        """
        read = self.files.read
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        for source in self.sources:
            if source.converter is None:
                (name,) = source.shapes
                fill_from(partial(read, source.name), tensors[name])
            elif source.is_stack:
                (name,) = source.shapes

                def stacked(part: tuple[slice, ...], source: Any = source) -> Tensor:
                    with self.files.kept_open():
                        (value,) = source.convert(read, model, part[0]).values()
                    return value[(slice(None), *part[1:])]

                fill_from(stacked, tensors[name])
            else:
                with self.files.kept_open():
                    values = source.convert(read, model)
                for name, value in values.items():
                    fill_from(value.__getitem__, tensors[name])

    def _drop_copies(self, parameters: dict[str, nn.Parameter]) -> None:
        """Drops second copies of a shared parameter; ones that differ are a model that transformers does not tie."""
        first: dict[int, Any] = {}
        for source in list(self.sources):
            for name in source.shapes:
                if name not in parameters:
                    continue
                if (other := first.setdefault(id(parameters[name]), source)) is source:
                    continue
                if other.converter or source.converter or not self.files.are_equal(other.name, source.name):
                    raise NotInParts(f"{other.name} and {source.name} differ, which the configuration ties")
                self.sources.remove(source)


def check_in_parts(folder: str, config: Any) -> None:
    """Raises NotInParts for a folder that only transformers can load."""
    path = Path(folder)
    if not path.is_dir():
        raise NotInParts("it is no folder on this machine")
    if (path / ADAPTER).is_file():
        raise NotInParts("it holds an adapter")
    if getattr(config, "quantization_config", None) is not None:
        raise NotInParts("its weights are quantised")
    for name in ("transformers_weights", "fusion_config"):
        if getattr(config, name, None) is not None:
            raise NotInParts(f"its configuration has {name}")
    if extra := [name for name in getattr(type(config), "extra_files", ()) if (path / name).is_file()]:
        raise NotInParts(f"it has weights in {extra[0]}")
    if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        raise NotInParts(f"it has neither {SINGLE} nor {INDEX}")


def build_without_storage(folder: str, config: Any, **options: Any) -> Any:
    """Builds the causal language model of `config`, with parameters on the meta device and real buffers.

    Buffers are what the constructor computes, such as RoPE's frequencies. A parameter may have storage until the module
    registers it, so the host holds at most one parameter at a time.

    Args:
        folder: folder of the model's weights.
        config: configuration of the model; it stays as it is.
        options: options of `AutoModelForCausalLM.from_config`.

    Raises:
        NotInParts: the constructor needs the values of parameters.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    handle = register_module_parameter_registration_hook(_drop_storage)
    try:
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(deepcopy(config), **options)
    except RuntimeError as error:
        raise NotInParts(f"its constructor needs values of weights: {error}") from error
    finally:
        handle.remove()
    if (Path(folder) / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@contextmanager
def stand_in_weights(model: nn.Module) -> Iterator[None]:
    """Gives parameters on the meta device random values on the CPU, for forwards that ask how the model computes.

    Matrices are views of one buffer that is little larger than the largest of them. Norms and biases are around one.
    All ranks have the same values.
    """
    kept = [(m, n, p) for m in model.modules() for n, p in m.named_parameters(recurse=False) if p.is_meta]
    if not kept:
        yield
        return
    largest = max((p.numel() for _, _, p in kept)) + SPREAD
    dtypes = {p.dtype for _, _, p in kept if p.is_floating_point()}
    block = torch.empty(PERIOD).normal_(std=STD, generator=torch.Generator().manual_seed(0))
    pool = {dtype: block.to(dtype).repeat(-(-largest // PERIOD)) for dtype in dtypes}
    stand_ins: dict[int, nn.Parameter] = {}
    for number, (module, name, parameter) in enumerate(kept):
        if id(parameter) not in stand_ins:
            begin = number * 4099 % SPREAD  # other values for each of the parameters of one shape
            values = pool[parameter.dtype][begin : begin + parameter.numel()].view(parameter.shape)
            stand_ins[id(parameter)] = nn.Parameter(values if values.ndim > 1 else 1 + values, requires_grad=False)
        setattr(module, name, stand_ins[id(parameter)])
    try:
        yield
    finally:
        for module, name, parameter in kept:
            setattr(module, name, parameter)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocates the parameters of a model, sharded or not, on `device`; buffers keep their values."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
    for first, *others in names.values():  # `to_empty` parts what is shared
        for other in others:
            path, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(path), leaf, model.get_parameter(first))


def _drop_storage(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Moves a parameter that is being registered to the meta device; it stays the same object, and may be shared."""
    if not parameter.is_meta:
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
