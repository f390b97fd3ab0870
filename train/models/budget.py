"""Memory budget of training: what a GPU may take, and which activations and gathered weights it then keeps."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from typing import get_args

from ringflash.errors import ConfigError
from ringflash.train.models.activations import ActivationCheckpointing, Activations, check_offload
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.memory import GIB, MemoryEstimate, TrainingShape, estimate_memory

AUTO = "auto"
# Share of a plan for what the estimate leaves out: torch allocated up to 5 GiB more in the runs of docs/benchmarks. The
# temporaries of a compiled Decoder are in its estimate; there torch allocated 0 to 3% more.
MARGIN, COMPILED_MARGIN = 0.1, 0.04
# "auto" leaves these bytes to buffers of the ring and of NCCL, which torch's allocator does not count.
RESERVE = int(3 * GIB)


@dataclass(frozen=True)
class ActivationPlan:
    """Activations that blocks keep under a budget.

    Args:
        activations: the choice.
        blocks: number of all blocks.
        keeps_weights: whether the gathered weights of all blocks stay until the backward.
        estimate: least memory of training with this choice.
        available: bytes that training may take.
        source: where the bytes come from.
    """

    activations: Activations
    blocks: int
    keeps_weights: bool
    estimate: MemoryEstimate
    available: int
    source: str

    @property
    def planned(self) -> int:
        """Bytes of the estimate and its margin."""
        return with_margin(self.estimate)

    def __str__(self) -> str:
        _, kept, offloaded, groups = self.activations
        blocks = f"{kept} of {self.blocks} blocks keep all, {self.blocks - kept} recompute"
        if offloaded:
            host = self.estimate.host / GIB
            blocks += f", {offloaded} of them from {host:.2f} GiB of host memory"
            blocks += f" with attention in {groups} groups of heads" if groups > 1 else ""
        blocks += ", gathered weights stay for the backward" if self.keeps_weights else ""
        return f"{blocks}: {self.planned / GIB:.2f} GiB planned of {self.available / GIB:.2f} ({self.source})"


def with_margin(estimate: MemoryEstimate) -> int:
    """Returns the bytes to plan for an estimate."""
    if estimate.expected is not None:
        return int(estimate.expected / (1 - COMPILED_MARGIN))
    return int(estimate.total / (1 - MARGIN))


def check_activations(checkpointing: ActivationCheckpointing | None, budget: str, offload: bool) -> None:
    """Raises ConfigError for options of activations that are unknown or contradict each other."""
    if checkpointing not in (None, *get_args(ActivationCheckpointing)):
        raise ConfigError(
            "activation_checkpointing",
            expected='"none" or "block"',
            got=repr(checkpointing),
            remedy="Choose one of these, or leave it out: activation_memory then decides.",
        )
    budget_bytes(budget, sys.maxsize)
    if checkpointing is not None and budget != AUTO:
        raise ConfigError(
            "activation_memory",
            expected=f'"auto" with activation_checkpointing="{checkpointing}", which leaves nothing to choose',
            got=budget,
            remedy="Leave one of the two out.",
        )
    check_offload(checkpointing, offload)


def available_memory(free: int) -> int:
    """Returns the bytes that torch may allocate of `free` bytes of a GPU."""
    return max(free - RESERVE, 0)


def budget_bytes(budget: str, total: int) -> int | None:
    """Returns the bytes of a budget on a GPU with `total` bytes; None for "auto".

    Args:
        budget: "auto", a size such as "60GiB", or a share of the GPU's memory such as "80%".
        total: memory of the GPU.

    Raises:
        ConfigError: another text, nothing, or more than the GPU has.
    """
    if budget == AUTO:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GiB|%)", budget) if isinstance(budget, str) else None
    if match is None or not float(match[1]):
        raise ConfigError(
            "activation_memory",
            expected='"auto", a size such as "60GiB", or a share of the GPU\'s memory such as "80%"',
            got=repr(budget),
            remedy="Write the unit too, and no negative number.",
        )
    amount = float(match[1])
    is_share = match[2] == "%"
    number = min(int(amount * total / 100), total) if is_share else int(amount * GIB)  # rounding may exceed the total
    if number > total or (is_share and amount > 100):
        raise ConfigError(
            "activation_memory",
            expected=f"at most the {total / GIB:.2f} GiB of memory that there is",
            got=budget,
            remedy="Lower it, or leave it out: the free memory then decides.",
        )
    return number


def plan_activations(
    config: ModelConfig, shape: TrainingShape, budget: str, available: int, total: int, source: str, host: int = 0
) -> ActivationPlan:
    """Chooses the largest number of kept blocks that fits, with the margin.

    If not even recomputing every block fits, the fewest blocks that make it fit keep their tensors in host memory. If
    all of them do not fit either, their attention runs in groups of heads, the fewest that make it fit. If nothing
    fits, the choice takes the least memory. Gathered weights stay too if the shape leaves that open, every
    block keeps its activations, and both fit. They come last: a byte of them saves a copy or a message, and a byte of
    activations the products that computed it.

    "auto" never refuses: the margin may be more than training needs, and `check_memory` refuses what cannot fit.

    Args:
        config: shape of the model.
        shape: shape of the run; its choice of activations does not matter.
        budget: as in `budget_bytes`.
        available: bytes of `available_memory`, the least of all ranks.
        total: bytes of the GPU's memory, the least of all ranks.
        source: says where `available` comes from.
        host: bytes of host memory that a rank may take, the least of all ranks; 0 offloads nothing.

    Raises:
        ConfigError: as in `budget_bytes`, or a budget that is too small for every choice.
    """
    number = budget_bytes(budget, total)
    if number is not None and number <= available:
        available, source = number, budget

    def estimate(activations: Activations, reshard: bool | None = shape.reshard_after_forward) -> MemoryEstimate:
        return estimate_memory(config, replace(shape, **activations._asdict(), reshard_after_forward=reshard))

    blocks = config.n_layers
    # From the fastest choice to the slowest. Later ones mostly take less of the GPU's memory, but not always: offloaded
    # blocks keep tensors on the GPU that are on their way, which may be more than these blocks would keep.
    choices = [Activations("block", kept_blocks=kept) for kept in range(blocks, -1, -1)]
    choices += [Activations("block", offloaded_blocks=count) for count in range(1, blocks + 1)]
    if shape.cuts_heads:
        groups = (number for number in range(2, config.n_kv_heads + 1) if config.n_kv_heads % number == 0)
        choices += [Activations("block", offloaded_blocks=blocks, head_groups=number) for number in groups]
    estimates = [(choice, memory) for choice in choices if (memory := estimate(choice)).host <= host]
    planned = [with_margin(memory) for _, memory in estimates]
    least = min(planned)
    chosen = next((i for i, size in enumerate(planned) if size <= available), planned.index(least))
    if number is not None and least > number:
        raise ConfigError(
            "activation_memory",
            expected=f"at least {math.ceil(1e4 * least / GIB) / 1e4:.4f}GiB, even to recompute every block",
            got=budget,
            remedy="Raise it, or use a shorter context, a smaller micro-batch, or more ranks.",
        )
    (activations, memory), keeps_weights = estimates[chosen], False
    if shape.copied and shape.reshard_after_forward is False:
        keeps_weights = True
    elif shape.copied and shape.reshard_after_forward is None and activations.kept_blocks == blocks:
        with_weights = estimate(activations, reshard=False)
        if with_margin(with_weights) <= available:
            memory, keeps_weights = with_weights, True
    return ActivationPlan(activations, blocks, keeps_weights, memory, available, source)
