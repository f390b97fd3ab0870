"""Folders of LoRA adapters, as peft has them: writing one, and beginning with one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.models.lora import ADAPTER, BASE_DIGEST, Lora, check_base, is_adapter
from ringflash.train.weights.tensor_files import save

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # before each name in a folder of peft
# Options of peft that change what an adapter computes, or the weights of its base model. Checked with peft 0.21.
UNSET = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
    "velora_config",
)
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
SOURCES = "Pass a folder that save_pretrained, `ringflash export --adapter` or peft has written."


def load_adapter(model: Any, lora: Lora, digest: str, base: str) -> None:
    """Fills the adapters of a model, in place, from the folder `lora.init_from`.

    Args:
        model: the model with the adapters of `add_adapters`, not sharded.
        lora: options.
        digest: digest of the base model at hand. A folder that peft wrote has none, and is compared by names and
            shapes alone.
        base: folder or name of the base model at hand.

    Raises:
        CheckpointError: no adapters in the folder, adapters of another kind or another base model, or damaged ones.
        ConfigError: rank, alpha or targets that differ from the folder's.
    """
    assert lora.init_from is not None
    folder = Path(lora.init_from)
    config = _read_config(folder)
    own = {stored_name(name): x for name, x in model.named_parameters() if is_adapter(name)}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            saved_digest = (file.metadata() or {}).get(BASE_DIGEST)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(folder / WEIGHTS), expected="adapters in safetensors", got=str(error), remedy=SOURCES
        ) from error
    if saved_digest is not None:
        check_base(folder, {BASE_DIGEST: saved_digest}, digest, base)
    _check_options(folder, config, lora)
    _check_tensors(folder, found, own, base)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def stored_name(name: str) -> str:
    """Returns the name in a folder of peft of an adapter's parameter."""
    return f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}"


def save_adapter(model: Any, tensors: Mapping[str, Tensor], base: str, digest: str, folder: str | Path) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads onto the base model.

    Args:
        model: the model with adapters; its own tensors are not read.
        tensors: whole tensors of the adapters, by their paths in the model.
        base: folder or name of the base model, which the folder names.
        digest: digest of the base model, by which `load_adapter` tells it from others.
        folder: the folder to write into; made if it is missing.
    """
    config = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    stored = {stored_name(name): x.detach().cpu().contiguous() for name, x in tensors.items()}
    save(stored, folder / WEIGHTS, **{BASE_DIGEST: digest})


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        config = str(error)
    if not isinstance(config, dict):
        raise CheckpointError(
            f"lora.init_from {folder}", expected=f"a folder with {CONFIG}", got=config, remedy=SOURCES
        )
    expected = {name: plain[0] for name, plain in PLAIN.items() if config.get(name, plain[0]) not in plain}
    expected |= {name: None for name in UNSET if config.get(name)}
    if expected:
        name, plain = min(expected.items())
        raise CheckpointError(
            f"{folder / CONFIG}: {name}",
            expected=f"{plain}, as plain LoRA has",
            got=config[name],
            remedy="Merge these adapters into their base model with peft, and begin new ones on the result.",
        )
    return config


def _check_options(folder: Path, config: Mapping[str, Any], lora: Lora) -> None:
    for name, stored, asked in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if config.get(stored) != asked:
            remedy = f"Set lora.{name} to {config.get(stored)}, or leave lora.init_from out."
            raise ConfigError(
                f"lora.{name}", expected=f"{config.get(stored)}, as {folder} has", got=asked, remedy=remedy
            )


def _check_tensors(folder: Path, found: Mapping[str, Tensor], own: Mapping[str, Tensor], base: str) -> None:
    stored, asked = ({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names} for names in (found, own))
    if found.keys() != own.keys():
        more, lost = sorted(asked - stored), sorted(stored - asked)
        got = [f"{len(more)} layers without adapters there, the first {more[0]}"] if more else []
        got += [f"{len(lost)} of its layers left out, the first {lost[0]}"] if lost else []
        raise ConfigError(
            "lora.targets",
            expected=f"the {len(stored)} layers that {folder} has adapters for",
            got=" and ".join(got) or "tensors of other names",
            remedy=f"Set lora.targets to the folder's layers. If {base} lacks them, pass the adapters' own base model.",
        )
    for name, parameter in own.items():
        if found[name].shape != parameter.shape:
            raise CheckpointError(
                str(folder),
                expected=f"{name} of shape {tuple(parameter.shape)}, as {base} needs",
                got=tuple(found[name].shape),
                remedy="Pass the base model that the adapters were trained on.",
            )
