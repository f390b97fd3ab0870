"""Timing of calls on one device: the GPU's own time between events, with the launches queued behind a busy GPU.

A single call of a few microseconds is bound by Python and by launches. Queued calls are bound by the kernels alone. The
time that Python needs to launch a call is kept separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

SAMPLE_SECONDS = 0.02  # duration of a sample, which fixes its number of calls
MAX_CALLS = 20
MAX_CLOCK_HZ = 2e9  # bound on the clocks of supported GPUs: a spin of this many cycles takes at least a second


@dataclass(frozen=True)
class Pace:
    """Sampling of a call: the number of calls in a row, and the seconds that one launch takes."""

    calls: int
    launch_seconds: float


def pace(call: Callable[[], object], on_gpu: bool) -> Pace:
    """Chooses the number of calls in a sample by timing one call. The call must have run before."""
    _wait(on_gpu)
    begin = time.perf_counter()
    call()
    launched = time.perf_counter() - begin
    _wait(on_gpu)
    calls = int(SAMPLE_SECONDS / (time.perf_counter() - begin))
    return Pace(max(1, min(calls, MAX_CALLS)), launched)


def seconds(call: Callable[[], object], pace: Pace, on_gpu: bool) -> float:
    """Returns the mean time of one call, in seconds, over `pace.calls` calls in a row."""
    if not on_gpu:
        begin = time.perf_counter()
        for _ in range(pace.calls):
            call()
        return (time.perf_counter() - begin) / pace.calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    head_start = min(2 * pace.calls * pace.launch_seconds, 0.1)
    torch.cuda._sleep(int(head_start * MAX_CLOCK_HZ))  # the GPU spins while the launches queue up
    start.record()
    for _ in range(pace.calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / pace.calls


def turns(names: Sequence[T], number: int) -> list[T]:
    """Returns the order of round `number`: each pair of rounds begins one name later, and odd rounds run backwards.

    No name then always follows the same other name. The work before a sample sets its first clocks and temperature.
    """
    first = number // 2 % max(1, len(names))
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
