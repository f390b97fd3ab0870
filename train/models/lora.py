"""LoRA adapters of transformers models, made by the library peft: options, insertion, digests, merging."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ringflash import extras
from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.weights.nf4 import NF4Linear, check_nf4

ADAPTER = "default"  # peft's name of the adapters
LORA, BASE_DIGEST = "lora", "base_digest"  # entries of a checkpoint's model_config; the digest also of a folder
BASE = "base_model"  # entry of a checkpoint: the folder or name of the base model
SAMPLES = 4096  # values of each weight in a digest; models that differ anywhere nearly always differ in these


@dataclass(frozen=True)
class Lora:
    """Options of LoRA: each target computes base(x) + alpha / rank * B A x, of which only A and B train.

    Args:
        rank: rows of A and columns of B.
        alpha: scale of the adapters, before the division by rank.
        dropout: fraction of the adapters' inputs that is dropped in training. Each rank of a ring draws its own.
        targets: names of the linear layers with an adapter, such as q_proj, or longer ends of their paths. None: all
            linear layers except the head.
        init_from: folder of adapters with which training begins, as `TransformersModel.save_pretrained` or peft writes
            it. Rank, alpha and targets have to be the folder's. None: new adapters.
        base: storage of the frozen linear layers, except the head. "compute" is the compute dtype, "nf4" 4-bit NF4 with
            a scale for 64 weights (QLoRA), through bitsandbytes. Other frozen weights are in the compute dtype.

    Raises:
        ConfigError: a value outside its range, or targets that are no list of names.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.
    """

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: Sequence[str] | None = None
    init_from: str | None = None
    base: Literal["compute", "nf4"] = "compute"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            remedy = "Try 8 or 16; leave lora out to train all weights."
            raise ConfigError("lora.rank", expected="an integer of at least 1", got=self.rank, remedy=remedy)
        if not self.alpha > 0:
            remedy = "Try twice the rank."
            raise ConfigError("lora.alpha", expected="a positive number", got=self.alpha, remedy=remedy)
        if not 0 <= self.dropout < 1:
            raise ConfigError("lora.dropout", expected="from 0 to below 1", got=self.dropout, remedy="Try 0 or 0.05.")
        if self.base not in ("compute", "nf4"):
            remedy = "Choose one of these."
            raise ConfigError("lora.base", expected='"compute" or "nf4"', got=repr(self.base), remedy=remedy)
        names = self.targets
        if names is None:
            return
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not names or not all(isinstance(name, str) and name for name in names):
            remedy = "Write for instance [q_proj, v_proj], or leave it out for all linear layers."
            raise ConfigError("lora.targets", expected="a list of layer names", got=repr(names), remedy=remedy)
        object.__setattr__(self, "targets", tuple(names))

    def fields(self) -> dict[str, Any]:
        """Returns the options as plain values, as checkpoints store them; adapters to begin with are none of them."""
        targets = None if self.targets is None else list(self.targets)
        fields = {"rank": self.rank, "alpha": float(self.alpha), "dropout": float(self.dropout), "targets": targets}
        return fields if self.base == "compute" else {**fields, "base": self.base}


def check_installed(lora: Lora | None = None) -> None:
    """Raises ConfigError unless peft is installed, and with "nf4" in `lora` bitsandbytes."""
    if importlib.util.find_spec("peft") is None:
        remedy = f"{extras.install('peft')} Or leave lora out."
        raise ConfigError("lora", expected="peft installed", got="no such package", remedy=remedy)
    if lora is not None and lora.base == "nf4":
        check_nf4()


def add_adapters(model: Any, lora: Lora, seed: int = 0) -> None:
    """Gives the targets of a transformers model new adapters, in place, and freezes all other parameters.

    B begins at zero, so that the model's results do not change.

    Args:
        model: a transformers model with its weights, not sharded.
        lora: options.
        seed: seed of A, so that all ranks draw the same.

    Raises:
        ConfigError: no peft, no model of transformers, or a target that the model lacks.
    """
    check_installed()
    layers = adapted_layers(model, lora)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - any number
        lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.targets is None else [*lora.targets],
        fan_in_fan_out=not any(isinstance(layer, nn.Linear) for layer in layers.values()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)


def adapted_layers(model: Any, lora: Lora) -> dict[str, nn.Module]:
    """Returns the layers that `add_adapters` gives adapters, by their paths; `model` may be on the meta device.

    Raises:
        ConfigError: no model of transformers, or a target that the model lacks.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            "lora",
            expected="a model of transformers, as in TransformersModel",
            got=type(model).__name__,
            remedy="Fine-tune it with TransformersModel or `ringflash finetune`, or train all of its weights.",
        )
    layers: dict[str, nn.Module] = {n: m for n, m in model.named_modules() if _is_linear(m)}
    head: Any = model.get_output_embeddings()
    if lora.targets is None:
        chosen = {name: layer for name, layer in layers.items() if layer is not head}
        if not chosen:
            remedy = "Train all weights of this model: leave lora out."
            raise ConfigError("lora", expected="linear layers", got=f"none in {type(model).__name__}", remedy=remedy)
        return chosen
    embedding: Any = model.get_input_embeddings()
    if head is not None and embedding is not None and head.weight is embedding.weight:
        # Merged adapters of a tied head would change the embedding too.
        layers = {name: layer for name, layer in layers.items() if layer is not head}
    chosen = {}
    for target in lora.targets:
        found = {n: m for n, m in layers.items() if n == target or n.endswith(f".{target}")}
        if not found:
            raise _unknown(target, layers, type(model).__name__)
        chosen |= found
    return chosen


def adapter_size(model: Any, lora: Lora) -> int:
    """Returns the number of parameters of the adapters that `add_adapters` would add."""
    # Conv1D keeps its weight transposed, which changes no sum.
    shapes = (layer.weight.shape for layer in adapted_layers(model, lora).values())
    return sum(lora.rank * sum(shape) for shape in shapes)  # pyright: ignore[reportArgumentType, reportCallIssue]


def base_modules(model: Any) -> list[nn.Module]:
    """Returns the modules of a transformers model, with or without adapters, that are no part of its head."""
    head = model.get_output_embeddings()
    own = set() if head is None else {*head.modules()}
    return [module for module in model.modules() if module not in own]


def store_base(model: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype, *, sharded: bool) -> None:
    """Casts frozen weights to the dtype in which they compute, in place; results keep their bits.

    Packed weights of NF4 stay as they are.

    Args:
        model: the model with adapters, before FSDP shards it.
        layers: its layers.
        dtype: the dtype.
        sharded: whether FSDP, which gathers all weights in `dtype`, will shard the model. Otherwise torch.autocast
            casts the weights of linear layers alone, and embedding and norms compute in their own dtype.
    """
    linear = (module for layer in layers for module in layer.modules() if _is_linear(module))
    for module in [model] if sharded else linear:
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                is_packed = isinstance(each, NF4Linear) and name == "weight"
                if not parameter.requires_grad and not is_packed:
                    parameter.data = parameter.data.to(dtype)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of a model with adapters, by its path, belongs to one of them."""
    return f".{ADAPTER}." in name and (".lora_A." in name or ".lora_B." in name)


def digest_of(model: nn.Module) -> str:
    """Returns 32 hexadecimal digits by which two base models are told apart; call it before `add_adapters`.

    They depend on the names and shapes of all weights, and on up to about 8192 evenly spaced values of each, in
    float32. A collective if the model is sharded.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} ".encode())
        values = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().flatten()
        digest.update(values[:: max(values.numel() // SAMPLES, 1)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def check_base(path: str | Path, saved: Mapping[str, Any], digest: str, base: str) -> None:
    """Raises CheckpointError unless the adapters of a checkpoint were trained on the base model with `digest`.

    Args:
        path: the checkpoint, for the message.
        saved: its model_config.
        digest: digest of the base model at hand.
        base: folder or name of the base model at hand.
    """
    if saved.get(BASE_DIGEST) != digest:
        raise CheckpointError(
            str(path),
            expected="adapters that were trained on this base model",
            got=f"adapters of another one: its weights have digest {saved.get(BASE_DIGEST)}, those of {base} {digest}",
            remedy="Pass the base model that the adapters were trained on, unchanged.",
        )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Runs the layers with adapters as those of the base model inside the context; without gradients only."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    # peft's own switch also changes requires_grad, which FSDP2 reads where it gathers the parameters.
    adapted: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module.forward = module.get_base_layer().__call__
    try:
        yield
    finally:
        for module in adapted:
            del module.forward


def merge_adapters(model: Any) -> None:
    """Adds the adapters to the weights of their layers, in place; the model is then one of transformers alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in adapted:
        module.merge()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module.get_base_layer())
    del model.peft_config


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _unknown(target: str, layers: Mapping[str, nn.Module], kind: str) -> ConfigError:
    last = sorted({name.rpartition(".")[2] for name in layers})
    near = difflib.get_close_matches(target.rpartition(".")[2], last, n=3, cutoff=0.5)
    return ConfigError(
        "lora.targets",
        expected=f"names of linear layers of {kind}",
        got=repr(target),
        remedy=f"The nearest are {', '.join(near)}." if near else f"There are {', '.join(last)}.",
    )
