"""The training benchmark: whole steps of a Llama-like decoder on a ring, and on others' attention with FSDP2.

    torchrun --nproc-per-node 4 -m ringflash.bench training --peers --json training.json --png training.png
    torchrun --nproc-per-node 1 -m ringflash.bench training --peers --shapes 8b --layers 6 --activations none

A step is forward, backward, gradient clipping and AdamW on one sequence of random tokens over all GPUs. Activations
are bfloat16; master weights and reductions are float32. Two models do not fit into memory together. Each cell therefore
builds, warms up, times and frees one contender after the other. The order changes with the cell. Times are the slowest
rank's, medians over steps, without a pause between steps.

MFU counts causal attention as half, and no recomputation, against the GPU's dense peak, with float8 linear layers too
against the peak of bfloat16. GiB are the peak memory that torch allocated on a GPU. "outside" is the other memory in
use there: the CUDA context, NCCL's buffers and the ring's buffers. All of it stays in use for the next contender.
"loss" is the loss of the first step and of the last step: all contenders have the same weights and tokens.

A contender that runs out of memory is not tried at longer contexts.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringflash.bench.common import ranks
from ringflash.bench.common.plot import draw_training
from ringflash.bench.common.problem import failure
from ringflash.bench.common.report import Column, print_table
from ringflash.bench.common.timing import turns
from ringflash.bench.training.flash_attention import flash_attention
from ringflash.bench.training.trainees import (
    MEMORY_FRACTION,
    SHAPES,
    Contender,
    Trainee,
    Training,
    ringflash,
    sdpa,
    torch_context_parallel,
)
from ringflash.commands.options import add_shared, check_at_least, parser_of
from ringflash.errors import ArgumentError, RingflashError
from ringflash.train.models.flops import layer_windows, peak_flops, training_flops, visible_pairs
from ringflash.train.torchao_private import LinearDtype

OURS, PEER, PEER_OF_ONE = "ringflash", "torch context_parallel", "SDPA"
FLASH, FLASH_OF_ONE = "FlashAttention, Ulysses", "FlashAttention"
CANNOT = (RingflashError, ImportError, RuntimeError, ValueError, TypeError, AssertionError)  # reported in rows


def main(argv: Sequence[str]) -> int:
    """Joins the ranks that torchrun started, and runs the benchmark. Returns 1 if a row of ringflash failed, else 0."""
    options = _parser().parse_args(argv)
    check_at_least(options, ["seqlens", "steps", "warmup", "layers", "window"])
    if options.window is not None and options.peers:
        remedy = "Leave one of the two out: the peers have no window."
        raise ArgumentError("--window", expected="nothing with --peers", got=options.window, remedy=remedy)
    with ranks.joined("training", argv) as mesh:
        rows = run(argv, mesh)
    return 1 if any("failed" in row for row in rows if row["name"] == OURS) else 0


def run(arguments: Sequence[str], mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Measures and returns the rows. Rank 0 prints a table, and writes JSON and draws a picture if asked."""
    options = _parser().parse_args(arguments)
    contenders: dict[str, Contender] = {OURS: ringflash}
    if options.peers:
        alone = mesh.size() == 1
        contenders |= {PEER_OF_ONE: sdpa} if alone else {PEER: torch_context_parallel}
        contenders[FLASH_OF_ONE if alone else FLASH] = flash_attention
    device = ranks.device_of(mesh)
    if mesh.device_type == "cuda":
        torch.cuda.set_per_process_memory_fraction(MEMORY_FRACTION, device)
    group, control = dist.new_group(), dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(control, dist.ProcessGroup)
    ring = DeviceMesh.from_group(group, mesh.device_type)
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    machine = f"{mesh.size()} x {ranks.device_name(mesh)}"
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        config = SHAPES[shape] if options.layers is None else replace(SHAPES[shape], n_layers=options.layers)
        config = replace(config, sliding_window=options.window)
        full: dict[tuple[str, str], int] = {}  # contender and linears: the context at which it ran out of memory
        cells = product(sorted(options.seqlens), options.linears)
        for number, (seqlen, linears) in enumerate(cells):
            training = Training(
                config,
                seqlen,
                mesh,
                ring,
                device,
                dtype,
                not options.eager,
                options.cuda_graphs,
                options.offload,
                options.activations,
                linears,
            )
            before, cell = rows, dict[str, dict[str, Any]]()
            for contender in turns(list(contenders), number):
                row = cell[contender] = _row(contender, shape, training, dtype)
                if (at := full.get((contender, linears))) is not None:
                    row["failed"] = f"not tried: out of memory at {at}"
                else:
                    row |= _measure(contenders[contender], training, options, control)
                if row.get("failed", "").startswith("OutOfMemoryError"):
                    full[contender, linears] = seqlen
                rows = [*before, *_compared([cell[each] for each in contenders if each in cell])]
                ranks.write(options.json, "training", arguments, mesh, rows)
    if dist.get_rank() == 0:
        _print(rows, machine)
        if options.png is not None:
            draw_training(options.png, rows, machine)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench training", "Measures training steps on a ring, beside others' attention.")
    lengths = [2**n for n in range(13, 18)]
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["1b", "8b"], help="default: 1b 8b")
    add_shared(parser, "peers", "json", "png", seqlens=lengths)
    parser.add_argument("--steps", type=int, default=4, help="timed ones (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="blocks as they are, not compiled")
    parser.add_argument("--cuda-graphs", action="store_true", help="ringflash replays all of attention's passes")
    parser.add_argument("--offload", action="store_true", help="ringflash keeps activations in the host's memory")
    choices, text = ("none", "block", "auto"), "what blocks keep: all, little, or all in as many blocks as fit"
    parser.add_argument("--activations", choices=choices, default="block", help=f"{text} (default: %(default)s)")
    choices, text = get_args(LinearDtype), "dtypes of linear layers, measured in turn (default: compute)"
    parser.add_argument("--linears", choices=choices, nargs="+", default=["compute"], help=text)
    parser.add_argument("--layers", type=int, help="blocks of the model (default: the shape's)")
    text = "keys that a query sees, its own included; memory does not depend on it (default: all before it)"
    parser.add_argument("--window", type=int, help=text)
    return parser


def _row(name: str, shape: str, training: Training, dtype: torch.dtype) -> dict[str, Any]:
    where = {"context": training.seqlen, "world_size": training.weights.size()}
    compiled = {"dtype": str(dtype).removeprefix("torch."), "compiled": training.compiled, "linears": training.linears}
    windows = {} if training.config.sliding_window is None else {"window": training.config.sliding_window}
    return {"name": name, "shape": shape, "layers": training.config.n_layers, **windows, **where, **compiled}


def _measure(
    build: Contender, training: Training, options: argparse.Namespace, control: dist.ProcessGroup
) -> dict[str, Any]:
    """Returns the figures of one contender, or the reason for its failure: the same on all ranks."""
    figures = _attempt(build, training, options)
    # The model is freed here, so that the next one begins with empty memory. The compiled code is dropped, because
    # dynamo would recompile it for any length instead of for the length of the next model.
    torch.compiler.reset()
    gc.collect()
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
    all_figures: list[dict[str, Any]] = [{}] * training.weights.size()
    dist.all_gather_object(all_figures, figures, group=control)
    return next((each for each in all_figures if "failed" in each), figures)


def _attempt(build: Contender, training: Training, options: argparse.Namespace) -> dict[str, Any]:
    try:
        with build(training) as trainee:
            return _figures(trainee, training, options)
    except CANNOT as error:
        return {"failed": failure(error)}


def _figures(trainee: Trainee, training: Training, options: argparse.Namespace) -> dict[str, Any]:
    on_gpu, world_size = training.device.type == "cuda", training.weights.size()
    losses = [trainee.step() for _ in range(options.warmup)]
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    seconds, timed = _times(trainee.step, options.steps, on_gpu)
    most = torch.zeros(2, dtype=torch.float64, device=training.device)
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        most = most.new_tensor([torch.cuda.max_memory_allocated(), total - free - torch.cuda.memory_reserved()])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    loss = torch.stack([*losses, *timed]).double()
    dist.all_reduce(loss)
    if not loss.isfinite().all():
        raise ValueError(f"losses that are not finite: {loss.tolist()}")
    median = statistics.median(seconds.tolist())
    figures: dict[str, Any] = {
        "seconds": round(median, 4),
        "each_seconds": [round(each, 4) for each in seconds.tolist()],
        "tokens_per_second_per_gpu": round(training.seqlen / median / world_size, 1),
    }
    peak = peak_flops(torch.cuda.get_device_name(), training.dtype) if on_gpu else None
    if peak is not None:
        pairs = float(visible_pairs(torch.arange(training.seqlen), layer_windows(training.config)))
        flops = training_flops(training.config, training.seqlen, pairs)
        figures["mfu"] = round(flops / median / world_size / peak, 4)
    if on_gpu:
        figures |= {"gib": round(most[0].item() / 2**30, 2), "outside_gib": round(most[1].item() / 2**30, 2)}
    return figures | {"loss": [round(loss[0].item(), 4), round(loss[-1].item(), 4)], **trainee.facts}


def _times(step: Callable[[], Tensor], steps: int, on_gpu: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the seconds of `steps` steps in a row on this rank, and their losses. The host runs ahead of a GPU."""
    if on_gpu:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        losses = []
        for event in events[1:]:
            losses.append(step())
            event.record()
        torch.cuda.synchronize()
        seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
        return torch.tensor(seconds, dtype=torch.float64, device="cuda"), losses
    seconds, losses = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begin)
    return torch.tensor(seconds, dtype=torch.float64), losses


def _compared(cell: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of one cell, with our rate over the fastest peer's rate in our row if both have one."""
    rates = {row["name"]: row["tokens_per_second_per_gpu"] for row in cell if "tokens_per_second_per_gpu" in row}
    ours = rates.pop(OURS, None)
    if ours is not None and rates:
        cell[0]["over_peer"] = round(ours / max(rates.values()), 3)
    return cell


def _print(rows: Sequence[dict[str, Any]], device: str) -> None:
    first = rows[0]
    how = "blocks compiled" if first["compiled"] else "blocks as they are"
    columns: list[Column] = [
        ("shape", "shape", ""),
        ("context", "context", "d"),
        ("contender", "name", "<"),
        ("linears", "linears", "<"),
        ("s/step", "seconds", ".3f"),
        ("tokens/s\na GPU", "tokens_per_second_per_gpu", ",.0f"),
        ("over\npeer", "over_peer", ".2f"),
        ("MFU", "mfu", ".1%"),
        ("peak\nGiB", "gib", ".1f"),
        ("outside\nGiB", "outside_gib", ".1f"),
        ("loss\nfirst, last", lambda row: ", ".join(f"{loss:.3f}" for loss in row["loss"]), ">"),
    ]
    title = f"Training steps of one sequence: {first['dtype']}, {how}, {device}"
    print_table(title, columns, rows, "{shape}, {context}, {name}, {linears}")
