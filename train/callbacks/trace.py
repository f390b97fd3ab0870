"""Analysis of a GPU trace: its costliest kernels, and the communication that no kernel hid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]

COMPUTE = ("kernel", "gpu_memset")
COPY = "gpu_memcpy"
# The name of a copy contains its kind. Copies to and from the host are neither work nor messages between GPUs.
BETWEEN_GPUS, WITHIN_GPU = "PtoP", "DtoD"


@dataclass(frozen=True)
class Cost:
    """Total seconds and number of calls of a kernel or operator."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Timeline:
    """Times of one GPU, from its first kernel to its last.

    Args:
        seconds: total seconds.
        compute: seconds in which a kernel other than NCCL's ran.
        communication: seconds in which NCCL's kernels, or copies between GPUs, ran.
        exposed: seconds of communication in which no other kernel ran.
        kernels: every kernel, the costliest first.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float
    kernels: tuple[Cost, ...]

    @property
    def idle(self) -> float:
        """Seconds in which nothing ran: the GPU waited for the host, or a stream waited for a signal of a peer."""
        return max(self.seconds - self.compute - self.exposed, 0.0)


def timeline(events: Iterable[Mapping[str, Any]]) -> Timeline | None:
    """Returns the device's timeline of a Chrome trace by torch.profiler; None when the trace has no device events.

    Exposed time is the union of communication minus the union of all other kernels, on any stream. A stream that waits
    for a peer's signal, without a kernel or copy of its own, counts as idle.
    """
    shown = [event for event in events if event.get("ph") == "X" and event.get("cat") in (*COMPUTE, COPY)]
    computing_streams = {_stream(event) for event in shown if event["cat"] == "kernel"}
    compute: list[Interval] = []
    messages: list[Interval] = []
    spent: dict[str, list[float]] = defaultdict(list)
    for event in shown:
        name, start, length = str(event["name"]), float(event["ts"]), float(event.get("dur", 0))
        spent[name].append(length)
        if event["cat"] != COPY:
            (messages if "nccl" in name.lower() else compute).append((start, start + length))
        elif BETWEEN_GPUS in name or (WITHIN_GPU in name and _stream(event) not in computing_streams):
            # A trace can label a peer's mapped memory as this GPU's own; copies of it run on separate streams.
            messages.append((start, start + length))
        elif WITHIN_GPU in name:
            compute.append((start, start + length))
    if not compute and not messages:
        return None
    both = [*compute, *messages]
    busy, computing = covered(both), covered(compute)
    return Timeline(
        seconds=(max(end for _, end in both) - min(start for start, _ in both)) / 1e6,
        compute=computing / 1e6,
        communication=covered(messages) / 1e6,
        exposed=(busy - computing) / 1e6,
        kernels=costliest({name: (sum(times) / 1e6, len(times)) for name, times in spent.items()}),
    )


def covered(intervals: Sequence[Interval]) -> float:
    """Returns the length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def costliest(spent: Mapping[str, tuple[float, int]]) -> tuple[Cost, ...]:
    """Sorts (seconds, calls) by name, the costliest first."""
    costs = (Cost(name, seconds, calls) for name, (seconds, calls) in spent.items())
    return tuple(sorted(costs, key=lambda cost: (-cost.seconds, cost.name)))


def _stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream")
