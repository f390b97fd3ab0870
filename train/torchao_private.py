"""Float8 linear layers and 8-bit AdamW of torchao: the only file of the trainer that uses it.

Releases of torchao change names and tensors that this file needs. `CHECKED` lists those with which the tests pass, and
others are refused.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from ringflash import extras
from ringflash.errors import ConfigError

log = logging.getLogger(__name__)

CHECKED = ("0.18",)  # 0.18.0 was checked
LinearDtype = Literal["compute", "fp8", "fp8_rowwise"]
LEAST_CAPABILITY = {"fp8": (8, 9), "fp8_rowwise": (9, 0)}  # of a GPU whose tensor cores multiply so
MULTIPLE = 16  # float8 matrix products take sizes that are multiples of this
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # moments of AdamW, and whether they have a sign


def check_torchao(argument: str, value: str) -> None:
    """Raises ConfigError unless a checked version of torchao is installed, which `argument=value` needs."""
    try:
        found = version("torchao") if importlib.util.find_spec("torchao") else None
    except PackageNotFoundError:
        found = "one of unknown version"
    if found is None or ".".join(found.split(".")[:2]) not in CHECKED:
        expected = f'torchao {" or ".join(CHECKED)} for "{value}"'
        remedy = f"{extras.install('fp8')} Or leave {argument} out."
        raise ConfigError(argument, expected=expected, got=found or "no such package", remedy=remedy)


def checked_linear_dtype(linear_dtype: LinearDtype, offload: bool) -> LinearDtype:
    """Returns `linear_dtype`; raises ConfigError for an unknown choice, and for float8 with `activation_offload`."""
    choices = get_args(LinearDtype)
    if linear_dtype not in choices:
        remedy = "Choose one of these."
        raise ConfigError("linear_dtype", expected=" or ".join(choices), got=repr(linear_dtype), remedy=remedy)
    if offload and linear_dtype != "compute":
        raise ConfigError(
            "activation_offload",
            expected=f'False with linear_dtype="{linear_dtype}"',
            got=True,
            remedy='Use activation_checkpointing="block" alone: weights gathered in float8 would be offloaded too.',
        )
    return linear_dtype


def check_float8(linear_dtype: LinearDtype, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Checks that linear layers can compute in float8 on `device`, before a model is built.

    Raises:
        ConfigError: torchao is missing or of another version, the GPU has no float8 products, or `compute_dtype` is not
            bfloat16 on a GPU, or is float64.
    """
    if linear_dtype == "compute":
        return
    check_torchao("linear_dtype", linear_dtype)
    if device.type == "cuda":
        capability, least = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[linear_dtype]
        if capability < least:
            raise ConfigError(
                "linear_dtype",
                expected=f'a GPU of compute capability {_dotted(least)} or higher for "{linear_dtype}"',
                got=f"{torch.cuda.get_device_name(device)}, of {_dotted(capability)}",
                remedy="Leave linear_dtype out: the layers then compute in bfloat16.",
            )
    on_gpu = device.type == "cuda"
    if compute_dtype not in ((torch.bfloat16,) if on_gpu else (torch.bfloat16, torch.float32)):
        choices = '"auto" or "bfloat16"' if on_gpu else '"auto", "float32" or "bfloat16"'
        raise ConfigError(
            "compute_dtype",
            expected=f'{choices} with linear_dtype="{linear_dtype}"',
            got=str(compute_dtype).removeprefix("torch."),
            remedy="Leave one of the two out.",
        )


def use_float8(
    blocks: Iterable[nn.Module], linear_dtype: LinearDtype, device: torch.device, *, sharded: bool, speak: bool = True
) -> None:
    """Makes the linear layers of `blocks` compute in float8, in place. On a CPU float8 is emulated.

    These are the layers whose in_features and out_features are multiples of 16. Parameters keep names, values and
    dtypes, also in state_dicts. "fp8" has one scale a tensor, "fp8_rowwise" one a row. Scales are of the tensors that
    are multiplied.

    Args:
        blocks: blocks with or without storage, before FSDP shards them.
        linear_dtype: "compute" leaves the blocks as they are.
        device: device of the training.
        sharded: whether FSDP2 will shard the blocks. It then gathers the weights of "fp8" in float8, and
            `refresh_scales` must run before each forward.
        speak: whether to log that float8 is emulated.

    Raises:
        ConfigError: no linear layer can compute in float8.
    """
    if linear_dtype == "compute":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name({"fp8": "tensorwise", "fp8_rowwise": "rowwise"}[linear_dtype])
    gathered = sharded and linear_dtype == "fp8"
    config = replace(recipe, emulate=device.type == "cpu", enable_fsdp_float8_all_gather=gathered)
    count = 0
    for block in blocks:
        linears = {name: each for name, each in block.named_modules() if _is_eligible(each)}
        convert_to_float8_training(block, config=config, module_filter_fn=lambda _, name, names=linears: name in names)
        for name, linear in linears.items():
            converted = block.get_submodule(name)
            converted.__class__ = _joined(type(converted), type(linear))
            for key, value in vars(linear).items():
                vars(converted).setdefault(key, value)
            if gathered:
                converted.register_state_dict_post_hook(_save_plain)
        count += len(linears)
    if not count:
        raise ConfigError(
            "linear_dtype",
            expected=f"linear layers in the blocks with in_features and out_features that are multiples of {MULTIPLE}",
            got="none",
            remedy="Change the model's widths, or leave linear_dtype out.",
        )
    if device.type == "cpu" and speak:
        log.warning("Linear layers: float8 is emulated, and slower than float32, since a CPU has no float8 products")


def compile_options(linear_dtype: LinearDtype) -> dict[str, bool]:
    """Returns the options of the compiler for blocks with linear layers of `linear_dtype`.

    By default it may join the reductions of a norm's backward over rows and over columns in one kernel. That kernel
    also casts the result for the next float8 product, and writes its transposed operand a byte at a time.
    At 32768 tokens and a width of 4096 a block then takes 4 ms longer (H200, torch 2.11).
    """
    return {} if linear_dtype == "compute" else {"triton.mix_order_reduction": False}


def refresh_scales(model: nn.Module) -> None:
    """Computes the scales with which FSDP2 gathers float8 weights, in one all-reduce; a collective of all ranks.

    It must run after the weights change and before a forward. Otherwise weights would be rounded with an old scale.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def plain(tensor: Tensor) -> Tensor:
    """Returns `tensor` detached, in the same memory, and without torchao's wrapper of weights to gather in float8."""
    tensor = tensor.detach()
    # Operations that FSDP does not need, such as a transposition, return the tensor inside of the wrapper.
    return tensor.mT.mT if type(_local(tensor)).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor


def make_adamw_8bit(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> Optimizer:
    """Makes AdamW that keeps the moments of large parameters in 8 bits, with one float32 scale for 256 values.

    A state_dict has the names and dtypes of torch's AdamW, with the moments in float32 and in host memory. The same
    shards restore the same bits; other shards, or moments from torch's AdamW, are rounded to 8 bits again.

    Raises:
        ConfigError: torchao is missing or of another version, or parameters are in float64.

    Source: Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", section 2.
    """
    check_torchao("optimizer.state", "8bit")
    if any(parameter.dtype == torch.float64 for group in groups for parameter in group["params"]):
        remedy = "Leave optimizer.state or compute_dtype out."
        raise ConfigError("optimizer.state", expected='"float32" for float64 weights', got='"8bit"', remedy=remedy)
    return _adamw_8bit()(groups, lr=lr, betas=betas)


@cache
def _adamw_8bit() -> Callable[..., Optimizer]:
    """Returns the class, which is made when torchao is there."""
    from torchao.optim import AdamW8bit

    class PortableAdamW8bit(AdamW8bit):
        """AdamW8bit with the learning rates and the state_dict of torch's AdamW; it sees this rank's shards alone.

        torchao compiles its step. Compiled for DTensors, it fails where ranks have shards of different sizes.
        """

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            rate = param_group.get("lr", self.defaults["lr"])
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = rate

        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            groups, views = [dict(group) for group in self.param_groups], list[Tensor]()
            try:
                for group in self.param_groups:
                    group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)  # numbers would be compiled in
                    used = [parameter for parameter in group["params"] if parameter.grad is not None]
                    group["params"] = [_local(plain(parameter)) for parameter in used]
                    for parameter, view in zip(used, group["params"], strict=True):
                        view.grad, self.state[view] = _local(parameter.grad), self.state[parameter]
                    views += group["params"]
                super().step()
            finally:
                for view in views:
                    del self.state[view]
                for group, before in zip(self.param_groups, groups, strict=True):
                    group.update(before)
            return loss

        def state_dict(self) -> dict[str, Any]:
            return self._with_moments(super().state_dict(), _in_float32)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(self._with_moments(state_dict, self._in_8bit))

        @torch.no_grad()
        def _with_moments(self, state_dict: dict[str, Any], change: Callable[..., Tensor]) -> dict[str, Any]:
            indices = [index for group in state_dict["param_groups"] for index in group["params"]]
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            states = {}
            for index, parameter in zip(indices, parameters, strict=True):
                if index in state_dict["state"]:
                    own = state_dict["state"][index]
                    moments = {name: change(parameter, own[name], name) for name in MOMENTS if name in own}
                    states[index] = {**own, **moments}
            return {**state_dict, "state": states}

        def _in_8bit(self, parameter: Tensor, moment: Tensor, name: str) -> Tensor:
            packed = self._new_buffer(_local(plain(parameter)), MOMENTS[name])
            return packed.copy_(_local(moment).to(packed.device))

    return PortableAdamW8bit


def _in_float32(parameter: Tensor, moment: Any, name: str) -> Tensor:
    """Returns a moment of this rank's shard as one of the whole parameter, in float32 and in host memory."""
    whole: Any = moment
    if type(moment) is not Tensor:
        codes = moment.qmap.clone()
        # The lowest code stands for -0.993, but may have been the -1 from which the scale is found again.
        codes[0] = codes[0].sign()
        whole = type(moment)(moment.codes, moment.scale, codes, moment.signed).dequantize()
    if isinstance(parameter, DTensor):
        layout = {"shape": parameter.shape, "stride": parameter.stride()}
        whole = DTensor.from_local(whole, parameter.device_mesh, parameter.placements, run_check=False, **layout)
    return whole.cpu()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_eligible(module: nn.Module) -> bool:
    kind = type(module)
    return (
        isinstance(module, nn.Linear)
        and (kind.forward is nn.Linear.forward or getattr(kind, "only_multiplies", False))
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    )


@cache
def _joined(float8: type, linear: type) -> type[nn.Module]:
    """Returns a class with the forward of `float8`, for any number of rows, and the other methods of `linear`."""

    class Float8(float8, linear):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, -2)
            missing = -rows.shape[0] % MULTIPLE
            if not missing:
                return super().forward(x)
            # The weight's gradient sums over rows, and the product takes multiples of 16 of them. Zeros change nothing.
            return super().forward(pad(rows, (0, 0, 0, missing)))[: rows.shape[0]].view(*x.shape[:-1], -1)

    return Float8


def _save_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = plain(state[f"{prefix}weight"])


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
