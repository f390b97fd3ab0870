"""`ringflash plan-memory`: the memory that a training run takes on a GPU, part by part, and what its budget chooses.

    ringflash plan-memory --config configs/llama-8b-256k-4gpu.yaml --gpu-memory 140

It needs no GPU, starts no run and reads no data.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ringflash.commands.options import PRINTED, add_run_options, check_positive, config_arguments, parser_of, put_json
from ringflash.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    from ringflash.train.models.budget import ActivationPlan
    from ringflash.train.models.memory import MemoryEstimate

GIB = 2.0**30
WIDTH = 110  # columns, if the output is not a terminal


def main(argv: Sequence[str]) -> int:
    """Prints a table or JSON. Raises ConfigError where `ringflash train` would refuse the run for its memory."""
    options, overrides = _parser().parse_known_args(argv)
    check_positive(options, ["gpu_memory", "host_memory"])
    configs = config_arguments(options)
    total = _gpu_memory(options.gpu_memory)
    from ringflash.train.commands.configured import configured
    from ringflash.train.lightning.memory_plan import shape_of
    from ringflash.train.models.budget import available_memory, plan_activations
    from ringflash.train.models.memory import check_host_memory, check_memory, estimate_memory, host_share

    run = configured([*configs, *overrides])
    device = torch.device("cpu" if run.accelerator == "cpu" else "cuda")
    shape = shape_of(run.model, run.datamodule, device, run.strategy, run.ranks)
    if not shape.tokens:
        expected, got = "a sequence for each data-parallel group", run.datamodule.batch_size
        raise ConfigError("data.batch_size", expected=expected, got=got, remedy="Raise it, or use fewer ranks.")
    config, plan = run.shape, None
    choices = {
        mode: estimate_memory(config, replace(shape, checkpointing=mode, offloaded_blocks=0))
        for mode in ("none", "block")
    }
    chosen = estimate_memory(config, shape)
    host_total = None if options.host_memory is None else _bytes("--host-memory", options.host_memory)
    if run.model.activation_checkpointing is None:
        budget, offloads = run.model.activation_memory, device.type == "cuda" and shape.linear_dtype == "compute"
        host = host_share(run.ranks_of_a_host, host_total) if offloads else 0
        source = "the GPU's less 3 for buffers"
        plan = plan_activations(config, shape, budget, available_memory(total), total, source, host)
        chosen = plan.estimate
    choices = {"chosen": chosen, **choices}
    if options.json:
        figures = {name: {**each.parts, "total": each.total, "host": each.host} for name, each in choices.items()}
        blocks = {}
        if plan:
            _, kept, offloaded, groups = plan.activations
            blocks = {"kept_blocks": kept, "offloaded_blocks": offloaded, "head_groups": groups}
            blocks["keeps_weights"] = plan.keeps_weights
            blocks |= {"planned": plan.planned, "available": plan.available}
        facts = {"tokens": shape.tokens, "ranks": run.ranks, "gpu_memory": total, "blocks": config.n_layers}
        put_json(options.json, {**facts, **blocks, "bytes": figures})
    if options.json != PRINTED:
        fixed = f'activation_checkpointing is "{run.model.activation_checkpointing}", which leaves nothing to choose'
        _show(choices, f"{shape.tokens} tokens of a micro-batch on each of {run.ranks} ranks", plan, fixed)
    check_memory(chosen, None if plan else shape, total)
    if host_total is not None:
        check_host_memory(chosen, run.ranks_of_a_host, host_total)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "plan-memory",
        "Prints the memory that a training run takes on a GPU, part by part, and how many blocks keep "
        "their activations under its activation_memory. Other arguments change the configuration, as in `ringflash "
        "train fit`: --model.activation_memory=60GiB.",
    )
    add_run_options(parser)
    parser.add_argument("--gpu-memory", type=float, metavar="GiB", help="memory of a GPU (default: this machine's)")
    parser.add_argument("--host-memory", type=float, metavar="GiB", help="memory of a host (default: this machine's)")
    return parser


def _gpu_memory(gib: float | None) -> int:
    """Returns the bytes of a GPU of the run. Raises ArgumentError if they are unknown or infinite."""
    if gib is not None:
        return _bytes("--gpu-memory", gib)
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    remedy = "Pass what a GPU of the run has, for instance --gpu-memory 140."
    raise ArgumentError("--gpu-memory", expected="a number of GiB", got="nothing, and no GPU here", remedy=remedy)


def _bytes(flag: str, gib: float) -> int:
    """Returns the bytes of `gib` GiB, the value of an option. Raises ArgumentError if it is infinite."""
    if not math.isfinite(gib * GIB):
        remedy = f"Pass what a machine of the run has, for instance {flag} 140."
        raise ArgumentError(flag, expected="a number of GiB", got=gib, remedy=remedy)
    return int(gib * GIB)


def _show(choices: dict[str, MemoryEstimate], title: str, plan: ActivationPlan | None, fixed: str) -> None:
    """Prints a row for each part, a column for each choice, and what the budget chooses."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"GiB a GPU: {title}", title_justify="left")
    table.add_column("part")
    for name in choices:
        table.add_column(name, justify="right")
    rows = [{**each.parts, "peak": each.total, "of the host": each.host} for each in choices.values()]
    for part in rows[0]:
        table.add_row(part, *(f"{row[part] / GIB:.2f}" for row in rows), end_section=part == "block")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(f"Activations: {plan or fixed}", markup=False, soft_wrap=True)
