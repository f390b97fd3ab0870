"""Linear layers with frozen weights in NF4, packed and unpacked by bitsandbytes: 36 bytes for 64 weights.

bitsandbytes has public functions of plain tensors, with one kernel on a GPU. The alternative, torchao's NF4Tensor,
shards over ranks only in equal parts of a multiple of 16384 weights.

A block of 64 weights of one row has 32 bytes of codes and a float32 scale. A row holds the codes of all its blocks,
then their scales, so that any cut between rows is a shard.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3, without double quantisation.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ringflash import extras
from ringflash.errors import ConfigError

BLOCK, BLOCK_BYTES = 64, 36
LEAST_SHARE = 0.9  # of the blocks' weights; below, a warning says so
LEAST = "0.50"  # version of bitsandbytes; 0.50.2 was checked


def check_nf4(device: torch.device | None = None) -> None:
    """Raises ConfigError unless bitsandbytes is installed and, with `device`, packs and unpacks weights there."""
    try:
        found = version("bitsandbytes") if importlib.util.find_spec("bitsandbytes") else None
    except PackageNotFoundError:
        found = "0, of unknown version"
    remedy = f"{extras.install('qlora')} Or leave lora.base out."
    if found is None or extras.is_older(found, LEAST):
        expected = f'bitsandbytes {LEAST} or newer for "nf4"'
        raise ConfigError("lora.base", expected=expected, got=found or "no such package", remedy=remedy)
    if device is None:
        return
    try:
        unpacked(packed(torch.ones(1, BLOCK, device=device)), torch.float32)
    except Exception as error:  # its library may lack the GPU or the CUDA of this machine, with errors of many types
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        expected = f'a device on which bitsandbytes {found} unpacks "nf4"'
        remedy = "Leave lora.base out, or look at `python -m bitsandbytes`."
        got = f"{where}: {type(error).__name__}: {error}"
        raise ConfigError("lora.base", expected=expected, got=got, remedy=remedy) from error


def packed(weight: Tensor) -> Tensor:
    """Returns a weight (out_features, in_features) as bits, (out_features, in_features * 9 / 32) of bfloat16.

    FSDP would cast another floating-point dtype where it gathers in bfloat16, and copies the bits of this one.
    """
    from bitsandbytes.functional import quantize_4bit

    rows = weight.shape[0]
    codes, state = quantize_4bit(weight.detach().float().contiguous(), blocksize=BLOCK, quant_type="nf4")
    scales = state.absmax.view(rows, -1)
    return torch.cat([codes.view(rows, -1), scales.view(torch.uint8)], 1).view(torch.bfloat16)


def unpacked(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight (out_features, in_features) that `packed` has rounded."""
    import bitsandbytes  # noqa: F401 - registers the operator

    raw = weight.view(torch.uint8)
    width = raw.shape[1] * BLOCK // BLOCK_BYTES
    codes, scales = raw[:, : width // 2], raw[:, width // 2 :]
    scales, shape = scales.contiguous().view(torch.float32).flatten(), (raw.shape[0], width)
    # The operator under `dequantize_4bit`, which torch.compile takes too.
    narrow = torch.float32 if dtype == torch.float64 else dtype
    unpack: Any = torch.ops.bitsandbytes.dequantize_4bit.default
    return unpack(codes.reshape(-1, 1), scales, BLOCK, "nf4", shape, narrow).to(dtype)


class NF4Linear(nn.Linear):
    """Linear layer with a packed, frozen weight. The backward unpacks it again, so that no unpacked weight is kept."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - torch says `input`
        """Maps (..., in_features) to (..., out_features), under torch.autocast in its dtype."""
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        out: Any = _Product.apply(x, self.weight)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return linear(x, unpacked(weight, x.dtype))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return dout @ unpacked(weight, dout.dtype), None


def store_nf4(modules: Iterable[nn.Module], device: torch.device) -> float:
    """Packs the frozen weights of the linear layers among `modules`, in place; `device` computes the codes.

    Layers keep their weight if in_features is no multiple of 64, and so do experts and other modules than nn.Linear.

    Returns:
        The packed share of the modules' own frozen weights, embeddings not counted.

    Raises:
        ConfigError: no layer can be packed.
    """
    modules = list(modules)
    layers = _eligible(modules)
    owners = [module for module in modules if not isinstance(module, nn.Embedding)]
    frozen = {id(x): x.numel() for each in owners for x in each.parameters(recurse=False) if not x.requires_grad}
    packable = sum(layer.weight.numel() for layer in layers)
    for layer in layers:
        codes = packed(layer.weight.to(device)).to(layer.weight.device)
        layer.__class__, layer.weight = NF4Linear, nn.Parameter(codes, requires_grad=False)
    if not layers:
        raise ConfigError(
            "lora.base",
            expected=f'layers of type torch.nn.Linear with in_features that are multiples of {BLOCK}, for "nf4"',
            got="none",
            remedy="Leave lora.base out: the base model is then stored in the compute dtype.",
        )
    return packable / sum(frozen.values())


def round_nf4(modules: Iterable[nn.Module]) -> None:
    """Rounds the weights that `store_nf4` would pack, in place."""
    for layer in _eligible(modules):
        layer.weight.data = unpacked(packed(layer.weight), layer.weight.dtype)


def _eligible(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    return [
        module
        for module in modules
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module.in_features % BLOCK == 0
        and not module.weight.requires_grad
    ]
