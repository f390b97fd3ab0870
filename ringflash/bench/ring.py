"""The ring benchmark: ring_attention over all ranks beside its peers, in one run, rounds interleaved.

    torchrun --nproc-per-node 4 -m ringflash.bench.ring --seqlens 65536 131072 --peers --check --json ring.json

Times are the slowest rank's, medians over rounds; TFLOP/s are of one GPU, causal counted as half, backward as 2.5
forwards.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringflash as rf
from ringflash.bench import record
from ringflash.bench.accuracy import Yardstick
from ringflash.bench.peers import contenders
from ringflash.bench.problem import AGREEMENT, DTYPES, Contender, Problem, difference, failure
from ringflash.errors import ArgumentError

FORWARD_BACKWARD = 3.5  # in forwards


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table on rank 0, and writes JSON where asked."""
    options = _parser().parse_args(argv)
    if "RANK" not in os.environ:
        remedy = "Start it with torchrun --nproc-per-node N -m ringflash.bench.ring ..."
        raise ArgumentError("ranks", expected="processes started by torchrun", got="one process", remedy=remedy)
    mesh = _join()
    try:
        context = rf.ContextParallel(mesh, layout=options.layout)
        rows = [row for seqlen in options.seqlens for row in _measure_length(seqlen, options, context, mesh)]
        if dist.get_rank() == 0:
            _print(rows, mesh)
            if options.json is not None:
                _write(options.json, sys.argv[1:] if argv is None else list(argv), rows, mesh)
    finally:
        dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ringflash.bench.ring", description="Measures ring_attention beside its peers.")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[65536], help="tokens in the whole sequence")
    parser.add_argument("--nheads", type=int, default=32)
    parser.add_argument("--nheads-kv", type=int, default=8)
    parser.add_argument("--headdim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all contenders (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls a round (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="torch's context_parallel too")
    parser.add_argument("--check", action="store_true", help="errors against float64, beside plain attention's")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def _join() -> DeviceMesh:
    """The process group and mesh of all ranks, on GPUs when there are any."""
    world_size = int(os.environ["WORLD_SIZE"])
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return init_device_mesh("cpu", (world_size,))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return init_device_mesh("cuda", (world_size,))


def _measure_length(
    seqlen: int, options: argparse.Namespace, context: rf.ContextParallel, mesh: DeviceMesh
) -> list[dict[str, Any]]:
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else 0)
    problem = Problem.random(seqlen, options.nheads, options.nheads_kv, options.headdim, device, DTYPES[options.dtype])
    named = contenders(context, mesh, with_peers=options.peers)
    ours_name = next(iter(named))
    times: dict[str, dict[str, list[float]]] = {name: {"forward": [], "forward_backward": []} for name in named}
    memory, failed = dict.fromkeys(named, 0.0), dict[str, str]()
    expected, results = None, []
    for name, contender in named.items():  # a peer must give the same result before it is worth timing
        try:
            with contender(problem) as shard:
                out = shard.whole(shard.forward().detach())
                expected = out if expected is None else expected
                apart = difference(out, expected)
                if name == ours_name and options.check:
                    results = [context.unshard(x.detach()) for x in shard.forward_backward()]
            if not apart < AGREEMENT:
                failed[name] = f"another result: it differs by {apart:.2g} of the largest value"
        except (RuntimeError, ValueError, TypeError) as error:  # a peer that cannot: said in its row
            failed[name] = failure(error)
    for _ in range(options.rounds):
        for name, contender in named.items():
            if name not in failed:
                memory[name] = max(memory[name], _round(contender, problem, times[name], options.repeats))
    errors = {}
    if results and context.rank == 0:
        for tensor, error in Yardstick.of(problem).errors(results).items():
            errors |= {f"{tensor} rms": round(error.rms_ratio, 3), f"{tensor} max": round(error.max_ratio, 3)}
    dist.barrier()
    rows = []
    for name, of in times.items():
        row: dict[str, Any] = {"seqlen": seqlen, "name": name, "gib": round(memory[name], 2)}
        row |= {
            "nheads": options.nheads,
            "nheads_kv": options.nheads_kv,
            "headdim": options.headdim,
            "dtype": options.dtype,
        }
        if name in failed:
            row["failed"] = failed[name]
        else:
            for part, passes in (("forward", 1.0), ("forward_backward", FORWARD_BACKWARD)):
                seconds = statistics.median(of[part])
                row[f"{part}_ms"] = round(seconds * 1e3, 3)
                row[f"{part}_tflops_per_gpu"] = round(
                    problem.forward_flops * passes / seconds / context.world_size / 1e12, 1
                )
        if name == ours_name and errors:
            row["errors_over_plain"] = errors
        rows.append(row)
    return rows


def _round(contender: Contender, problem: Problem, times: dict[str, list[float]], repeats: int) -> float:
    """Appends `repeats` times of each pass and returns the peak memory in GiB, after one call that is not timed."""
    on_gpu = problem.q.is_cuda
    with contender(problem) as shard:
        shard.forward_backward()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats):
            with torch.no_grad():
                times["forward"].append(_seconds(shard.forward, on_gpu))
            times["forward_backward"].append(_seconds(shard.forward_backward, on_gpu))
    return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def _seconds(call: Callable[[], object], on_gpu: bool) -> float:
    """Time of one call on the slowest rank; all ranks start together."""
    dist.barrier()
    if on_gpu:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        elapsed = torch.tensor(start.elapsed_time(end) / 1e3, device="cuda")
    else:
        begin = time.perf_counter()
        call()
        elapsed = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def _print(rows: list[dict[str, Any]], mesh: DeviceMesh) -> None:
    table = Table(title=f"Ring attention, {mesh.size()} x {_device_name(mesh)}, causal")
    for column in ("seqlen", "contender", "forward ms", "TFLOP/s/GPU", "forward+backward ms", "TFLOP/s/GPU", "GiB"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in rows:
        if "failed" in row:
            table.add_row(str(row["seqlen"]), row["name"], row["failed"])
            continue
        keys = ("forward_ms", "forward_tflops_per_gpu", "forward_backward_ms", "forward_backward_tflops_per_gpu", "gib")
        table.add_row(str(row["seqlen"]), row["name"], *(f"{row[key]:.2f}" for key in keys))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for row in rows:
        if "errors_over_plain" in row:
            console.print(f"{row['seqlen']}: errors over plain {row['dtype']} attention's: {row['errors_over_plain']}")


def _write(path: Path, arguments: list[str], rows: list[dict[str, Any]], mesh: DeviceMesh) -> None:
    command = record.command(f"torchrun --nproc-per-node {mesh.size()} -m ringflash.bench.ring", arguments)
    record.write(path, command, f"{mesh.size()} x {_device_name(mesh)}", rows)


def _device_name(mesh: DeviceMesh) -> str:
    return torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU process"


if __name__ == "__main__":
    sys.exit(main())
