"""Timing of calls on one device: the GPU's own time between events, with the launches queued behind a busy GPU.

A single call of a few microseconds is bound by Python and by launches. Queued calls are bound by the kernels alone. The
time that Python needs to launch a call is kept separately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ringflash.bench.common.problem import Setup, failure

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


class Sampler:
    """Samples of calls, in seconds by the name of the call."""

    def __init__(self, on_gpu: bool) -> None:
        self.times: dict[str, list[float]] = {}
        self._paces: dict[str, Pace] = {}
        self._on_gpu = on_gpu

    def sample(self, name: str, call: Callable[[], object]) -> None:
        """Adds one sample of `call`, which must have run before."""
        if name not in self._paces:
            self._paces[name] = pace(call, self._on_gpu)
        self.times.setdefault(name, []).append(seconds(call, self._paces[name], self._on_gpu))

    def sample_passes(self, setups: Mapping[str, Setup], row: dict[str, Any]) -> None:
        """Adds a sample of each setup's backward by its name, and of the first one's forward as "forward".

        `row` reports a failure, for whatever reason. A contender that has failed is not sampled again.
        """
        if "failed" in row:
            return
        try:
            for name, setup in setups.items():
                out = setup.forward()
                self.sample(name, partial(setup.backward, out))
                del out
            self.sample("forward", next(iter(setups.values())).forward)
        except Exception as error:
            row["failed"] = failure(error)

    def medians(self) -> dict[str, float]:
        """Returns the median seconds of each call."""
        return {name: statistics.median(times) for name, times in self.times.items()}

    def launches(self) -> dict[str, float]:
        """Returns the microseconds that one launch of each call takes, for its row."""
        return {f"{name}_launch_us": round(pace.launch_seconds * 1e6, 1) for name, pace in self._paces.items()}


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
