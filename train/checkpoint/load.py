"""Loading of sharded checkpoints at any world size. Files are verified before they are opened."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.optim import Optimizer

from ringflash.errors import CheckpointCorrupt, CheckpointError, ConfigError
from ringflash.train.checkpoint.collective import failed, on_every_rank
from ringflash.train.checkpoint.manifest import MANIFEST, STATE, TENSOR_INDEX, complete_in, damaged, locate, verify
from ringflash.train.checkpoint.safe_reader import SafeReader
from ringflash.train.checkpoint.save import named_tensors, optimizer_tensors
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.lora import (
    BASE,
    BASE_DIGEST,
    LORA,
    Lora,
    add_adapters,
    base_modules,
    check_base,
    check_installed,
    digest_of,
    is_adapter,
)
from ringflash.train.weights.nf4 import round_nf4

log = logging.getLogger(__name__)

FOLDER = "checkpoint_folder"  # key under which `load` returns the path of the checkpoint that it loaded


def load(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    model_config: dict[str, Any] | None = None,
    is_saved: Callable[[str], bool] = lambda name: True,
) -> dict[str, Any]:
    """Fills `model` and `optimizers`, at any world size, and returns the other entries; every rank calls it.

    Args:
        path: a checkpoint, or a folder of checkpoints, from which the newest undamaged one is loaded. Damaged newer
            checkpoints are named in the log.
        model: module with the parameters to fill, sharded or not.
        optimizers: optimizers to restore too; empty for evaluation.
        model_config: configuration of `model`; None: not compared.
        is_saved: says which tensors of `model`, by name, checkpoints hold; the others keep their values.

    Raises:
        CheckpointError: no such folder, an incomplete checkpoint, or another model or optimizer with tensors of other
            names or shapes.
        CheckpointCorrupt: a file differs from its entry in the manifest.
    """
    paths: list[Path] = on_every_rank(lambda: _candidates(path), path)[0]
    for index, candidate in enumerate(paths):
        try:
            return _load(candidate, model, optimizers, model_config, is_saved)
        except CheckpointCorrupt as error:
            if index + 1 == len(paths):
                raise
            if dist.get_rank() == 0:
                log.warning("%s\ngoing on from %s", error, paths[index + 1])
    raise AssertionError("there is always a candidate")


def _candidates(path: Path) -> list[Path]:
    single = locate(path)
    return [single] if (single / MANIFEST).is_file() else complete_in(path) or [single]


def _load(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    model_config: dict[str, Any] | None,
    is_saved: Callable[[str], bool],
) -> dict[str, Any]:
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
    whole = cast("dict[str, Any]", get_model_state_dict(model))
    state = {name: tensor for name, tensor in whole.items() if is_saved(name)}
    _read(named_tensors("model", state), path, "model.")
    set_model_state_dict(model, state, options=StateDictOptions(strict=len(state) == len(whole)))
    for index, optimizer in enumerate(optimizers):
        optimizer.zero_grad()  # with gradients of an earlier run, torch would take the state for complete
        whole = cast("dict[str, Any]", get_optimizer_state_dict(model, optimizer))
        optimizer_state = _without_unused(index, whole, path)
        _read(optimizer_tensors(index, optimizer_state), path, f"optimizer.{index}.")
        try:
            options = StateDictOptions(strict=len(optimizer_state["state"]) == len(whole["state"]))
            loaded: dict[str, Any] = {**optimizer_state, "param_groups": groups[index]}
            set_optimizer_state_dict(model, optimizer, loaded, options=options)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise damaged(path / STATE, f"groups of parameters that do not fit: {error}") from error
    return {**rest, FOLDER: str(path)}


def read_tensors(prefix: str, tensors: dict[str, Any], path: Path) -> None:
    """Fills `tensors`, sharded or not, from the tensors saved under `prefix`; every rank calls it.

    Raises:
        CheckpointError: the saved tensors have other names or shapes.
    """
    _read(named_tensors(prefix, tensors), path, f"{prefix}.")


def load_decoder(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Loads the whole decoder of a `LanguageModel` checkpoint on the CPU of this one process.

    Raises:
        CheckpointError: as `load`; or the checkpoint holds no decoder.
    """
    return load_decoder_and_rest(path, dtype=dtype)[0]


def load_decoder_and_rest(path: str | Path, *, dtype: torch.dtype = torch.float32) -> tuple[Decoder, dict[str, Any]]:
    """Loads the decoder as `load_decoder`, and the checkpoint's entries other than tensors.

    One such entry is the state of the data module, by its class.
    """
    path = locate(Path(path))
    rest = _open(path, alone=True)
    if not isinstance(config := rest.get("model_config"), dict):
        raise _no_language_model(path, "no model_config")
    try:
        if "model_type" in config:
            raise of_transformers(path, config)
        shape = ModelConfig.from_fields(config)
    except ConfigError as error:
        raise _no_language_model(path, f"one of another model: {error}") from error
    with torch.device("meta"):
        decoder = Decoder(shape)
    decoder.to(dtype).to_empty(device="cpu")
    prefix = "model._decoder."
    _read({f"{prefix}{name}": value for name, value in decoder.state_dict().items()}, path, prefix, alone=True)
    return decoder, rest


def of_transformers(path: Path, config: dict[str, Any]) -> CheckpointError:
    """Makes the error for a checkpoint of `TransformersModel` where only a Decoder can be used."""
    remedy = "`ringflash export` writes it as a folder, for use with transformers."
    return _no_language_model(path, f"one of TransformersModel ({config['model_type']})", remedy)


def _no_language_model(path: Path, got: str, remedy: str = "Pass another folder.") -> CheckpointError:
    return CheckpointError(str(path), expected="a checkpoint of LanguageModel", got=got, remedy=remedy)


def load_transformers(path: Path, dtype: torch.dtype, model_config: dict[str, Any]) -> Any:
    """Loads the whole model of a `TransformersModel` checkpoint on the CPU of this one process.

    Raises:
        CheckpointError: as `load`; or transformers does not know the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        fields = {name: value for name, value in model_config.items() if name != "model_type"}
        config = AutoConfig.for_model(model_config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        remedy = "Install the version of transformers that the checkpoint was trained with."
        raise CheckpointError(
            str(path), expected="a model that transformers has", got=str(error), remedy=remedy
        ) from error
    holder = nn.Module()
    holder._decoder = model
    state = cast("dict[str, Any]", get_model_state_dict(holder))
    _read(named_tensors("model", state), path, "model.", alone=True)
    return model.to(dtype).eval()


def load_adapted(path: Path, rest: dict[str, Any], base: str | None = None) -> Any:
    """Loads the base model of a checkpoint of adapters, with them, in float32 on the CPU of this one process.

    Weights that training stored in NF4 are rounded as there.

    Args:
        path: the checkpoint.
        rest: its entries other than tensors, of `read_state`.
        base: folder or name of the base model; None: where it was in training.

    Raises:
        CheckpointError: as `load`; or the base model is missing, or is another one.
        ConfigError: peft is not installed, or bitsandbytes for NF4.
    """
    from transformers import AutoModelForCausalLM

    config, base = rest["model_config"], base or str(rest[BASE])
    lora = Lora(**config[LORA])
    check_installed(lora)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        remedy = "Pass its folder with --base."
        got = str(error).splitlines()[0]
        raise CheckpointError(base, expected="the base model of the adapters", got=got, remedy=remedy) from error
    check_base(path, config, digest_of(model), base)
    if lora.base == "nf4":
        round_nf4(base_modules(model.requires_grad_(False)))
    add_adapters(model, lora)
    prefix = "model._decoder."
    adapters = {f"{prefix}{name}": x.data for name, x in model.named_parameters() if is_adapter(name)}
    _read(adapters, path, prefix, alone=True)
    return model.eval()


def read_state(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Verifies a checkpoint, and returns its folder and all its content except tensors.

    Raises:
        CheckpointError: as `load`.
    """
    path = locate(Path(path))
    return path, _open(path, alone=True)


def compare_model_configs(saved: dict[str, Any] | None, current: dict[str, Any]) -> None:
    """Raises CheckpointError, listing the differing fields, unless the checkpoint's model is the current one.

    Fields of `ModelConfig` that an older checkpoint lacks take their defaults.
    """
    usual = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING and f.name in current}
    before = usual | (saved or {})
    if before.get(BASE_DIGEST) and current.get(BASE_DIGEST):
        check_base("model_config", before, current[BASE_DIGEST], "the model of this run")
    names: list[str] = sorted({*before, *current})
    differing = [f"{n} {before.get(n)} (now {current.get(n)})" for n in names if before.get(n) != current.get(n)]
    if differing:
        raise CheckpointError(
            "model_config",
            expected="a checkpoint of this model",
            got="none in the checkpoint" if saved is None else ", ".join(differing),
            remedy="Resume with the configuration that the checkpoint was trained with.",
        )


def _open(path: Path, *, alone: bool = False) -> dict[str, Any]:
    rest: dict[str, Any] = {}

    def read(part: int, parts: int) -> None:
        verify(path, part=part, parts=parts)
        rest.update(_read_state(path / STATE))

    if alone:
        read(0, 1)
    else:
        on_every_rank(lambda: read(dist.get_rank(), dist.get_world_size()), path)
    return rest


def _read_state(file: Path) -> dict[str, Any]:
    try:
        rest = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # content with the right digest may still raise almost any error
        raise damaged(file, f"unreadable: {error}") from error
    if not isinstance(rest, dict) or not isinstance(rest.get("param_groups", []), list):
        raise damaged(file, "no dictionary of a run's state")
    return rest


def _read_index(path: Path, *, alone: bool = False) -> dict[str, Any]:
    """Returns the index entries of all tensors by name."""
    index: dict[str, Any] = {}

    def read() -> None:
        index.update(SafeReader(path).read_metadata().state_dict_metadata)

    if alone:
        read()
    else:
        on_every_rank(read, path)
    return index


def _without_unused(index: int, state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the `index`-th optimizer's `state` without parameters that had no gradient before the checkpoint.

    An optimizer makes the state of a parameter at its first gradient, but torch makes that of all parameters to load.
    """
    saved = _read_index(path)
    if not any(name.startswith(f"optimizer.{index}.") for name in saved):
        return state  # an optimizer without a state is another one

    def is_used(parameter: str, own: dict[str, Any]) -> bool:
        return not own or any(f"optimizer.{index}.{parameter}.{name}" in saved for name in own)

    used = {parameter: own for parameter, own in state["state"].items() if is_used(parameter, own)}
    return {**state, "state": used}


def _read(tensors: dict[str, Any], path: Path, prefix: str, *, alone: bool = False) -> None:
    """Reads `tensors` in place, after comparing names and shapes with all index entries under `prefix`."""
    index, remedy = _read_index(path, alone=alone), "Load it into what it was saved from."
    for name, tensor in tensors.items():
        entry = index.get(name)
        saved = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if saved != tuple(tensor.shape):
            expected, got = f"{name} of shape {tuple(tensor.shape)}", "no such tensor" if saved is None else saved
            raise CheckpointError(str(path), expected=expected, got=got, remedy=remedy)
    if more := sorted(name for name in index if name.startswith(prefix) and name not in tensors):
        expected = f"the {len(tensors)} tensors under {prefix}* that there is a place for"
        got = f"{len(more)} more, the first {more[0]}"
        raise CheckpointError(str(path), expected=expected, got=got, remedy=remedy)
    with warnings.catch_warnings():
        # DCP warns whenever it loads in one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            load_tensors(tensors, storage_reader=SafeReader(path), no_dist=alone)
        except CheckpointException as error:
            # Every rank sees the same failures in rank order, so all continue from the same earlier checkpoint.
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            if isinstance(cause, CheckpointError):
                raise cause from None
            text = f"rank {rank}: {type(cause).__name__}: {cause}"
            if isinstance(cause, OSError | torch.OutOfMemoryError):
                raise failed(path, text) from error
            raise damaged(path / TENSOR_INDEX, f"an index that does not fit the files: {text}") from error
