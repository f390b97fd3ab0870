"""Memory of a run on its devices: the estimate, the check, and the choice of the blocks that keep their activations."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn

from ringflash.errors import ConfigError
from ringflash.train.exchange import Purpose
from ringflash.train.lightning.strategy import RingAttentionStrategy, resolve_sizes
from ringflash.train.models.budget import AUTO, ActivationPlan, available_memory, plan_activations
from ringflash.train.models.memory import GIB, TrainingShape, check_host_memory, check_memory, host_memory, host_share

if TYPE_CHECKING:
    from ringflash.train.lightning.ring_module import RingModule

log = logging.getLogger(__name__)


def shape_of(module: RingModule, data: Any, device: torch.device, strategy: Any, world_size: int) -> TrainingShape:
    """Returns the properties of a run that determine one GPU's memory.

    Args:
        module: the module that trains.
        data: data module; activations are counted if it has `context_length` and `batch_size`, like TextDataModule.
        device: device of a rank.
        strategy: strategy of the run, set up or not.
        world_size: number of ranks.
    """
    compute = module.resolved_dtype(device)
    context, data_parallel, shard, copied, rounded = 1, 1, 1, False, False
    if isinstance(strategy, RingAttentionStrategy):
        data_parallel, context = resolve_sizes(*strategy.asked_sizes, world_size)
        shard = world_size // strategy.replicate_size
        rounded = module.rounds_weights(world_size)
        copied = shard > 1 or (compute == torch.bfloat16 and not rounded)
    seqlen, batch_size = (getattr(data, name, None) or 0 for name in ("context_length", "batch_size"))
    return TrainingShape(
        tokens=(seqlen // context) * (batch_size // data_parallel),
        shard_size=shard,
        compute_dtype=compute,
        **module.asked_activations._asdict(),
        reshard_after_forward=module.reshard_after_forward,
        copied=copied,
        rounded=rounded and compute == torch.bfloat16,
        in_pieces=module.compile_blocks and module.in_pieces,
        compiled=module.compile_blocks,
        float32_norms=module.float32_norms and not module.compile_blocks,
        own_head=module.own_head,
        trained=None if module.estimated_config is None else module.trained_size,
        adapts_all=module.adapts_all,
        nf4=module.nf4,
        copies=module.weight_copies,
        linear_dtype=module.linear_dtype,
        state_8bit=module.optimizer_config.state == "8bit",
    )


def choose_activations(module: RingModule) -> ActivationPlan | None:
    """Returns the plan of `activation_memory`, the same on all ranks; a collective of all ranks that need one.

    None means that there is nothing to choose: `activation_checkpointing` is set, or "auto" meets a CPU or a model or
    data of unknown shape, and every block keeps everything.

    Raises:
        ConfigError: before training, a size or share for a model or data of unknown shape, or as `plan_activations`.
    """
    strategy, budget = module.trainer.strategy, module.activation_memory
    device = strategy.root_device
    if module.activation_checkpointing is not None or (budget == AUTO and device.type != "cuda"):
        return None
    config, shape = module.estimated_config, module.training_shape()
    if config is None or not shape.tokens:
        what = "the model" if config is None else "a micro-batch: the data have no context_length and batch_size"
        if budget != AUTO:
            remedy = 'Set activation_checkpointing to "none" or "block" instead.'
            raise ConfigError("activation_memory", expected="a known shape", got=f"none of {what}", remedy=remedy)
        if module.trainer.is_global_zero:
            log.info("Activations: every block keeps all, since the shape is unknown of %s", what)
        return None
    # Float8 layers would offload their weights too.
    offloads = device.type == "cuda" and module.linear_dtype == "compute"
    own_host = host_share(module.trainer.num_devices) if offloads else 0
    available, total, host, source = _least_memory(strategy, device, own_host)
    if module.trainer.state.fn != TrainerFn.FITTING:  # a budget for training refuses no evaluation
        budget = AUTO
    plan = plan_activations(config, shape, budget, available, total, source, host)
    if module.trainer.is_global_zero and module.trainer.state.fn == TrainerFn.FITTING:
        log.info("Activations: %s", plan)
    return plan


def check_run_memory(module: RingModule) -> None:
    """Logs the least memory of a GPU and its host for training; raises ConfigError when there is less."""
    trainer = module.trainer
    device = trainer.strategy.root_device
    if device.type != "cuda" or trainer.state.fn != TrainerFn.FITTING:
        return
    if (estimate := module.memory_estimate()) is not None:
        available = torch.cuda.get_device_properties(device).total_memory
        ranks, host = trainer.num_devices, host_memory()
        if trainer.is_global_zero:
            text = f"Memory: {estimate}, of {available / GIB:.2f}"
            if estimate.host:
                needed = ranks * estimate.host / GIB
                text += f"; at least {needed:.2f} GiB of a host, for {ranks} GPUs, of {host / GIB:.2f}"
            log.info(text)
        check_memory(estimate, None if module.activation_plan else module.training_shape(), available)
        check_host_memory(estimate, ranks, host)


def report_measured(module: RingModule) -> None:
    """Logs the most memory that torch has allocated on any rank so far, and the plan; a collective of all ranks."""
    strategy, plan = module.trainer.strategy, module.activation_plan
    if plan is None or strategy.root_device.type != "cuda":
        return
    measured = [row[0] for row in _all_ranks(strategy, torch.cuda.max_memory_allocated(strategy.root_device))]
    if module.trainer.is_global_zero:
        most = max(measured)
        text = "Memory: torch allocated %.2f GiB at most, on rank %d; %.2f were planned"
        log.info(text, most / GIB, measured.index(most), plan.planned / GIB)


def _least_memory(strategy: Strategy, device: torch.device, host: int) -> tuple[int, int, int, str]:
    """Returns the least of all ranks: bytes available on the device, bytes in all, `host`, and whose the first are."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = available_memory(free + unused)
    else:
        free = total = host_memory()
    rows = _all_ranks(strategy, free, total, host)
    available, all_bytes, hosts = (list(column) for column in zip(*rows, strict=True))
    least = min(available)
    differs = len({f"{each / GIB:.1f}" for each in available}) > 1
    return least, min(all_bytes), min(hosts), f"free on rank {available.index(least)}" if differs else "free"


def _all_ranks(strategy: Strategy, *numbers: int) -> list[list[int]]:
    return strategy.exchange(Purpose.MEMORY, *numbers) if isinstance(strategy, RingAttentionStrategy) else [[*numbers]]
