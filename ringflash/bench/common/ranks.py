"""Shared parts of the benchmarks over ranks: options, process groups, and the times of the slowest rank."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringflash.bench.common import record
from ringflash.bench.common.problem import Contender, Problem
from ringflash.commands.options import add_shared
from ringflash.errors import ArgumentError

FORWARD_BACKWARD = 3.5  # FLOPs of both passes over the FLOPs of a forward
PARTS = {"forward": 1.0, "forward_backward": FORWARD_BACKWARD}


@dataclass
class Samples:
    """Measurements of one contender over all rounds.

    Args:
        seconds: times of each pass.
        bytes: largest memory that was allocated at once for the contender, its inputs included.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    bytes: int = 0

    def medians(self) -> dict[str, float]:
        """Returns the median seconds of each pass."""
        return {part: statistics.median(times) for part, times in self.seconds.items()}

    def figures(self, forward_flops: float, gpus: int) -> dict[str, float]:
        """Returns the memory, and the milliseconds and TFLOP/s a GPU of each pass."""
        figures = {"gib": round(self.bytes / 2**30, 3)}
        for part, seconds in self.medians().items():
            figures[f"{part}_ms"] = round(seconds * 1e3, 3)
            figures[f"{part}_tflops_per_gpu"] = round(forward_flops * PARTS[part] / seconds / gpus / 1e12, 1)
        return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all benchmarks over ranks have in common."""
    lengths = [2**n for n in range(13, 21)]
    add_shared(parser, "json", seqlens=lengths, nheads=32, nheads_kv=8, headdim=128, dtype="bfloat16")
    add_shared(parser, layout="zigzag", transport="auto", repeats=3)


@contextmanager
def joined(name: str, arguments: Sequence[str]) -> Generator[DeviceMesh, None, None]:
    """Joins the process group of all ranks, on GPUs if there are any, and yields its mesh.

    Raises:
        ArgumentError: the process was not started by torchrun.
    """
    if "RANK" not in os.environ:
        remedy = " ".join(["Start it with torchrun --nproc-per-node N -m ringflash.bench", name, *arguments])
        raise ArgumentError("ranks", expected="processes started by torchrun", got="one process", remedy=remedy)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device is None else "nccl", device_id=device)
    try:
        yield init_device_mesh("cpu" if device is None else "cuda", (int(os.environ["WORLD_SIZE"]),))
    finally:
        dist.destroy_process_group()


def write(path: Path | None, name: str, arguments: Sequence[str], mesh: DeviceMesh, rows: Sequence[Any]) -> None:
    """Writes the rows of the benchmark `name` to `path`, on rank 0 and if there is a path."""
    if dist.get_rank() == 0 and path is not None:
        program = f"torchrun --nproc-per-node {mesh.size()} -m ringflash.bench {name}"
        record.write(path, record.command(program, arguments), f"{mesh.size()} x {device_name(mesh)}", rows)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns this rank's device."""
    return torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else 0)


def device_name(mesh: DeviceMesh) -> str:
    """Returns the name of the device that the ranks run on."""
    return torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU process"


def take_round(
    contender: Contender,
    problem: Problem,
    samples: Samples,
    repeats: int,
    group: dist.ProcessGroup | None = None,
    queued: int = 1,
) -> None:
    """Adds `repeats` times of each pass, and the memory, to `samples`, after one call that is not timed.

    A time is the mean of `queued` calls. The memory includes CUDA graphs captured for this round. torch does not
    count what a transport shares with peers.
    """
    on_gpu = problem.q.is_cuda
    outside = torch.cuda.memory_allocated() if on_gpu else 0
    with contender(problem) as shard:
        inputs = sum(x.numel() * x.element_size() for x in (*shard.inputs, shard.dout))
        before = min(outside, torch.cuda.memory_allocated() - inputs) if on_gpu else 0
        shard.forward_backward()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats):
            with torch.no_grad():
                samples.seconds["forward"].append(slowest_seconds(shard.forward, on_gpu, group, queued))
            samples.seconds["forward_backward"].append(slowest_seconds(shard.forward_backward, on_gpu, group, queued))
        if on_gpu:
            samples.bytes = max(samples.bytes, torch.cuda.max_memory_allocated() - before)


def slowest_seconds(
    call: Callable[[], object], on_gpu: bool, group: dist.ProcessGroup | None = None, queued: int = 1
) -> float:
    """Returns the time of one call on the slowest rank: the mean of `queued` calls. All ranks start together."""
    dist.barrier(group)
    if on_gpu:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(queued):
            call()
        end.record()
        torch.cuda.synchronize()
        elapsed = torch.tensor(start.elapsed_time(end) / 1e3 / queued, device="cuda")
    else:
        begin = time.perf_counter()
        for _ in range(queued):
            call()
        elapsed = torch.tensor((time.perf_counter() - begin) / queued)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
    return elapsed.item()
