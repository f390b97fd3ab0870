"""AdamW and its learning rate: warmup, then a cosine, or a plateau followed by a decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ringflash.errors import ConfigError
from ringflash.torch_private import ShardAdamW, multiply_each
from ringflash.train.torchao_private import make_adamw_8bit

DECAY_FRACTION = 0.1
SCHEDULE = ("schedule", "warmup_steps", "max_steps", "min_lr_ratio", "decay_fraction", "decay_shape")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warmup and a schedule.

    "cosine" falls from the end of the warmup to `max_steps`. "wsd" (warmup, stable, decay) stays at `lr` and falls over
    the last `decay_fraction` of the steps. A "wsd" run can therefore continue from before its decay with a larger
    `max_steps`.

    Args:
        lr: highest learning rate.
        betas: decay of the gradient's first and second moment.
        weight_decay: weight decay of matrices; vectors such as norms have none.
        warmup_steps: steps of linear rise to `lr`.
        max_steps: step at which the schedule ends.
        min_lr_ratio: learning rate from that step on, as a fraction of `lr`.
        schedule: "cosine" or "wsd".
        decay_fraction: fraction of `max_steps` over which "wsd" decays; 0.1 by default.
        decay_shape: shape of the "wsd" decay: "sqrt", the default, falls as 1 - sqrt(progress), "linear" as 1 -
            progress.
        state: "float32" keeps the moments in the dtype of the weights; "8bit" rounds them to 8 bits, with one scale for
            256 values, and needs torchao.

    Source: Loshchilov & Hutter 2017, "SGDR"; Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond
    Fixed Training Durations", section 3 (wsd, and its square root).
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 100
    max_steps: int = 1000
    min_lr_ratio: float = 0.1
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: float | None = None
    decay_shape: Literal["sqrt", "linear"] | None = None
    state: Literal["float32", "8bit"] = "float32"

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError("lr", expected="a positive number", got=self.lr, remedy="Try 3e-4.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                "betas", expected="two numbers from 0 to below 1", got=self.betas, remedy="Try 0.9, 0.95."
            )
        if not self.weight_decay >= 0:
            raise ConfigError(
                "weight_decay", expected="0 or a positive number", got=self.weight_decay, remedy="Try 0.1."
            )
        if not 0 <= self.warmup_steps < self.max_steps:
            raise ConfigError(
                "warmup_steps",
                expected=f"from 0 to below max_steps={self.max_steps}",
                got=self.warmup_steps,
                remedy="Warm up for a few percent of the steps.",
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError("min_lr_ratio", expected="from 0 to 1", got=self.min_lr_ratio, remedy="Try 0.1.")
        if self.schedule not in ("cosine", "wsd"):
            raise ConfigError(
                "schedule", expected='"cosine" or "wsd"', got=repr(self.schedule), remedy="Choose one of these."
            )
        if self.state not in ("float32", "8bit"):
            remedy = "Choose one of these."
            raise ConfigError("optimizer.state", expected='"float32" or "8bit"', got=repr(self.state), remedy=remedy)
        self._check_decay()

    def _check_decay(self) -> None:
        for name in ("decay_fraction", "decay_shape"):
            if self.schedule == "cosine" and getattr(self, name) is not None:
                remedy = f'Leave {name} out, or set schedule to "wsd".'
                raise ConfigError(name, expected='None under "cosine"', got=getattr(self, name), remedy=remedy)
        if self.decay_shape not in (None, "sqrt", "linear"):
            remedy = "Choose one of these."
            raise ConfigError("decay_shape", expected='"sqrt" or "linear"', got=repr(self.decay_shape), remedy=remedy)
        if self.decay_fraction is not None and not 0 < self.decay_fraction <= 1:
            remedy = "Try 0.1, or 0.2 for short runs."
            raise ConfigError("decay_fraction", expected="above 0, at most 1", got=self.decay_fraction, remedy=remedy)

    def lr_scale(self, step: int) -> float:
        """Returns the learning rate of `step`, counted from 0, as a fraction of `lr`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        start = self.warmup_steps
        if self.schedule == "wsd":
            decay_steps = max(round(self.max_steps * (self.decay_fraction or DECAY_FRACTION)), 1)
            start = max(start, self.max_steps - decay_steps)
        progress = min(max((step - start) / (self.max_steps - start), 0.0), 1.0)
        if self.schedule == "cosine":
            falling = (1 + math.cos(math.pi * progress)) / 2
        else:
            falling = 1 - (progress if self.decay_shape == "linear" else math.sqrt(progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * falling


def make_adamw(parameters: Iterable[Parameter], config: OptimizerConfig) -> Optimizer:
    """Makes AdamW over `parameters`, fused on CUDA; weight decay applies to matrices only.

    Raises:
        ConfigError: as `make_adamw_8bit`, for `config.state="8bit"`.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.state == "8bit":
        return make_adamw_8bit(groups, config.lr, config.betas)
    return ShardAdamW(groups, lr=config.lr, betas=config.betas, fused=parameters[0].device.type == "cuda")


class _Schedule:
    """The function of a LambdaLR, whose checkpoints hold its attributes: the settings of the schedule."""

    __slots__ = ("__dict__", "_config")  # checkpoints hold no slots, so loading one leaves the configuration alone

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.set()

    def set(self) -> dict[str, object]:
        """Sets the attributes to the configuration, and returns those that had other values, with these values."""
        given = {name: getattr(self._config, name) for name in SCHEDULE}
        before = {name: value for name, value in vars(self).items() if given.get(name, value) != value}
        vars(self).update(given)
        return before

    def __call__(self, step: int) -> float:
        return self._config.lr_scale(step)


class ConfiguredOptimizer:
    """An optimizer and its schedule, with the hyperparameters that they were made with."""

    def __init__(self, optimizer: Optimizer, config: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self._given = [{name: group[name] for name in ("betas", "weight_decay")} for group in optimizer.param_groups]
        self._schedule = _Schedule(config)
        self.scheduler = LambdaLR(optimizer, self._schedule)
        self._rates = [float(rate) for rate in self.scheduler.base_lrs]

    def restore(self) -> list[str]:
        """Sets the hyperparameters again, after a checkpoint has replaced them, and the rate of the present step.

        Returns:
            One text for each hyperparameter that had another value.
        """
        scheduler, changed = self.scheduler, dict[str, str]()
        for index, (group, given, rate) in enumerate(
            zip(self.optimizer.param_groups, self._given, self._rates, strict=True)
        ):
            before = {"betas": tuple(group["betas"]), "weight_decay": group["weight_decay"]}
            before["lr"] = float(scheduler.base_lrs[index])
            for name, value in (given | {"lr": rate}).items():
                if before[name] != value:
                    changed[name] = f"{name} {value} ({before[name]} in the checkpoint)"
            group.update(given)
            scheduler.base_lrs[index] = _like(scheduler.base_lrs[index], rate)
            group["initial_lr"] = _like(group["initial_lr"], rate)
            scale = scheduler.lr_lambdas[index](scheduler.last_epoch)
            group["lr"] = _like(group["lr"], scheduler.base_lrs[index] * scale)
        for name, value in self._schedule.set().items():
            changed[name] = f"{name} {getattr(self._schedule, name)} ({value} in the checkpoint)"
        return list(changed.values())


def _like(old: float | Tensor, new: float | Tensor) -> float | Tensor:
    """Returns `new`, in the tensor `old` if that is one; the optimizer's compiled step reads the tensor."""
    return old.fill_(new) if isinstance(old, Tensor) else new


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Returns the parameters of all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def multiply_gradients(parameters: Iterable[Parameter], factor: Tensor) -> None:
    """Multiplies the gradients of `parameters` by the scalar `factor`, which is rounded to their dtype.

    Shards are multiplied as plain tensors: DTensors take the host much longer than the product.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            alike.setdefault((shard.device, shard.dtype), []).append(shard)
    for (device, dtype), gradients in alike.items():
        multiply_each(gradients, factor.to(device, dtype, non_blocking=True))


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """Returns the norm of all `gradients` together, of DTensors over all their ranks."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def clip_to_norm(parameters: Iterable[Parameter], largest: float, norm: Tensor) -> None:
    """Scales gradients of the given norm to the norm `largest` if theirs is larger.

    The bits are those of `torch.nn.utils.clip_grads_with_norm_`.
    """
    multiply_gradients(parameters, torch.clamp(largest / (norm + 1e-6), max=1.0))


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Returns whether `step_only_if` works with `optimizer`: torch's fused Adam and AdamW."""
    return type(optimizer) in (Adam, AdamW, ShardAdamW) and all(group.get("fused") for group in optimizer.param_groups)


def step_only_if(optimizer: Optimizer, flag: Tensor | None) -> None:
    """Makes the optimizer's steps change nothing where `flag` is False, without a read of `flag` on the host.

    Weights, moments and step counts then keep their bits, also with weight decay. This is how torch's GradScaler skips
    steps of fused optimizers.

    Args:
        optimizer: optimizer of which `can_skip_on_device` is True.
        flag: bool scalar on the device of the weights; None: later steps are unconditional again.
    """
    setattr(optimizer, "found_inf", None if flag is None else (~flag).float())  # noqa: B010 - not declared by the class
