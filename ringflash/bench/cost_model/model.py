"""What a causal ring, heads x ring or a ring of rings should take, predicted from a few figures of the machine.

A hop computes for

    pairs * FLOPs a pair / rate * waves + state / HBM bandwidth + launch

with the pairs of whole tiles, and as many waves as tiles fill the SMs, rounded up. A message takes latency + bytes /
bandwidth of its link; kernels beside it lose a share of that time. `walk` says what follows for the whole ring. What
each figure was measured or fitted from: docs/model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, sqrt

import numpy as np

import ringflash as rf
from ringflash.bench.attention.traffic import STATISTIC, Shape
from ringflash.bench.cost_model.walk import Array, Cost, Costs, Step, seconds, steps
from ringflash.errors import ArgumentError

FORWARD, BACKWARD = 4, 10  # FLOPs of a visible pair, an element of headdim and a query head
STATE = 4  # bytes of an element of the state, and of a gradient on its way
MOST_COUNTED = 2**17  # tokens; pairs of longer sequences are those of as many, scaled


@dataclass(frozen=True)
class Link:
    """A kind of link: latency, bandwidth a GPU and direction, and the share of a message's time lost to kernels."""

    latency_us: float
    gb_s: float
    taken: float

    def cost(self, nbytes: float) -> Cost:
        """Of one message."""
        return Cost(self.latency_us * 1e-6 + nbytes / self.gb_s / 1e9, self.taken)


NEAR = {"nccl": Link(32.0, 197.0, 0.8), "symmetric": Link(5.0, 337.0, 0.06)}  # within a host
FAR = Link(20.0, 45.0, 0.1)  # between hosts, whatever the transport within


@dataclass(frozen=True)
class Machine:
    """Figures of the machine; the defaults are one H200's, and its links'.

    Args:
        tflops_forward: of the forward kernel on long sequences.
        tflops_backward: of the backward.
        launch_us: of a hop on the GPU beyond its work.
        issue_us: that the process takes to launch a hop; 0 in a CUDA graph.
        near: links within a host.
        far: links between hosts.
        gpus_a_host: joined by near links.
        hbm_gb_s: what copies and the state move at.
        sms: that tiles are spread over.
        tile: rows of queries, and of keys, computed whole.
    """

    tflops_forward: float = 715.0
    tflops_backward: float = 660.0
    launch_us: float = 6.0
    issue_us: float = 300.0
    near: Link = NEAR["symmetric"]
    far: Link = FAR
    gpus_a_host: int = 8
    hbm_gb_s: float = 4400.0
    sms: int = 132
    tile: int = 128

    def hbm_seconds(self, nbytes: float) -> float:
        """Of reads and writes together."""
        return nbytes / self.hbm_gb_s / 1e9

    def waves(self, rows: float, sequences_and_heads: int) -> float:
        """What tiles of so many rows each take over what they would if they filled the SMs evenly."""
        tiles = sequences_and_heads * max(rows / self.tile, 1.0) / self.sms
        return ceil(tiles) / tiles

    def seconds_a_pair(self, headdim: int, backward: bool) -> float:
        """Of one query head."""
        flops, tflops = (BACKWARD, self.tflops_backward) if backward else (FORWARD, self.tflops_forward)
        return flops * headdim / tflops / 1e12

    def alone(self, shape: Shape, pairs: float, backward: bool) -> float:
        """Seconds of the kernel on one GPU with so many pairs a head, causal."""
        rows = sqrt(2 * pairs)
        whole = pairs + rows * self.tile / 2
        time = whole * self.seconds_a_pair(shape.headdim, backward) * shape.batch * shape.nheads
        return time * self.waves(rows, shape.batch * shape.nheads) + self.launch_us * 1e-6


@dataclass(frozen=True)
class Split:
    """How GPUs share a sequence: `heads` split heads, the others are a ring, of rings of `inner` where that is set."""

    world_size: int
    heads: int = 1
    inner: int | None = None

    @property
    def ring(self) -> int:
        """Ranks in the ring."""
        return self.world_size // self.heads

    def crosses(self, gpus_a_host: int) -> bool:
        """Whether KV goes from host to host at every hop, of an inner ring where there is one."""
        span = self.heads * (self.inner or self.ring)
        return span > gpus_a_host or (self.world_size > gpus_a_host and gpus_a_host % span > 0)

    def check(self, shape: Shape) -> None:
        """Raises ArgumentError unless ranks and heads can be split so."""
        if self.world_size % self.heads or shape.nheads % self.heads:
            expected = f"a divisor of {self.world_size} GPUs and of {shape.nheads} query heads"
            raise ArgumentError("heads", expected=expected, got=self.heads, remedy="Split over fewer, or 1.")
        if self.inner is not None and self.ring % self.inner:
            expected = f"a divisor of the ring's {self.ring} ranks"
            raise ArgumentError("inner ring", expected=expected, got=self.inner, remedy="Choose another, or none.")

    def __str__(self) -> str:
        ring = f"ring {self.ring}" if self.inner is None else f"ring {self.ring // self.inner} x {self.inner}"
        return ring if self.heads == 1 else f"heads {self.heads}, {ring}"


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass.

    Args:
        total: of all of it, on the slowest rank.
        alone: of one kernel, on one GPU, with as many pairs in a causal triangle as the mean rank has.
        compute: of a hop, the mean.
        message: of what a rank sends at a hop over the slowest link that the ring crosses.
        exposed: of a hop: the ring's time less that of the same hops without messages, over their number.
        exchange: of heads for rows and back.
    """

    total: float
    alone: float
    compute: float
    message: float
    exposed: float
    exchange: float


@dataclass(frozen=True)
class Prediction:
    """Both passes."""

    forward: Pass
    backward: Pass

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward.total + self.backward.total

    @property
    def efficiency(self) -> float:
        """Of the kernel alone at equal work, forward and backward."""
        return (self.forward.alone + self.backward.alone) / self.seconds


@lru_cache(maxsize=1024)
def predict(shape: Shape, split: Split, layout: str, machine: Machine) -> Prediction:
    """Both passes of causal attention over `shape.seqlen` tokens in all.

    Raises:
        ArgumentError: a shape that is not causal, heads or ranks that cannot be split so, an unknown layout, fewer
            tokens than ranks.
    """
    if not shape.causal:
        remedy = "Other masks are for `ringflash plan`, which counts their pairs."
        raise ArgumentError("causal", expected="True", got=False, remedy=remedy)
    split.check(shape)
    pairs, chunks = _pairs(layout, shape.seqlen, split.ring)
    hops = _steps(layout, min(shape.seqlen, MOST_COUNTED), split.ring, split.inner)
    # What the ring sees.
    there = replace(shape, nheads=shape.nheads // split.heads, nheads_kv=ceil(shape.nheads_kv / split.heads))
    padded = pairs * _whole_tiles(there, split.ring, chunks, machine.tile)
    padded[np.diag_indices(split.ring)] += there.seqlen / split.ring * machine.tile / 2
    passes = [_pass(shape, there, split, pairs, padded, machine, hops, backward) for backward in (False, True)]
    return Prediction(*passes)


@lru_cache(maxsize=64)
def _counted(layout: str, seqlen: int, ranks: int) -> tuple[Array, int]:
    plan = rf.ContextParallel.local(ranks, layout).plan(rf.Causal(), seqlen, 0)
    return np.array(plan.pairs, dtype=np.float64), max(map(len, plan.layout.chunks))


@lru_cache(maxsize=4)
def _steps(layout: str, counted: int, ranks: int, inner: int | None) -> Sequence[Step]:
    """The hops of both passes: few at a time, as those of 1024 ranks take 10 MiB."""
    return list(steps(_counted(layout, counted, ranks)[0] > 0, inner))


def _pairs(layout: str, seqlen: int, ranks: int) -> tuple[Array, int]:
    """Visible pairs of every rank with every rank's keys, and the most chunks of a rank."""
    counted = min(seqlen, MOST_COUNTED)
    pairs, chunks = _counted(layout, counted, ranks)
    return pairs * (seqlen / counted) ** 2, chunks


def _whole_tiles(there: Shape, ranks: int, chunks: int, tile: int) -> float:
    """Pairs computed over pairs counted: chunks are cut into whole tiles of queries and of keys."""
    rows = there.seqlen / ranks / chunks
    return (ceil(rows / tile) * tile / rows) ** 2


def _pass(
    shape: Shape,
    there: Shape,
    split: Split,
    pairs: Array,
    padded: Array,
    machine: Machine,
    steps_taken: Sequence[Step],
    backward: bool,
) -> Pass:
    rows = there.seqlen / split.ring
    heads = there.batch * there.nheads
    of_pair = machine.seconds_a_pair(there.headdim, backward) * heads * machine.waves(rows, heads)
    hops = len(steps_taken)
    own = machine.launch_us * 1e-6
    if not backward:  # the state is read and written at each hop, not read at the first, not written at the last
        state = heads * rows * (there.headdim + 2) * STATE
        own += machine.hbm_seconds(2 * state * (hops - 1) / hops)
    compute = np.where(pairs > 0, padded * of_pair + own, 0.0)
    elements = 2 * there.batch * there.nheads_kv * rows * there.headdim
    costs = Costs(
        compute,
        np.arange(split.ring) * split.heads // machine.gpus_a_host,
        (machine.near.cost(elements * there.itemsize), machine.far.cost(elements * there.itemsize)),
        (machine.near.cost(elements * STATE), machine.far.cost(elements * STATE)) if backward else None,
        machine.hbm_seconds(3 * elements * STATE),
        machine.issue_us * 1e-6,
    )
    ring, free = (seconds(each, split.inner, steps_taken) for each in (costs, _without_messages(costs)))
    exchange = _exchange(shape, there, split, machine, backward)
    slowest = int(split.crosses(machine.gpus_a_host))
    messages = [] if split.ring == 1 else [costs.kv, costs.gradient] if costs.gradient else [costs.kv]
    return Pass(
        total=ring + exchange,
        alone=machine.alone(shape, float(pairs.sum()) / split.world_size, backward),
        compute=float(compute.sum()) / split.ring / hops,
        message=sum(cost[slowest].seconds for cost in messages),
        exposed=(ring - free) / hops,
        exchange=exchange,
    )


def _without_messages(costs: Costs) -> Costs:
    nothing = Cost(0.0, 0.0), Cost(0.0, 0.0)
    return replace(costs, kv=nothing, gradient=None if costs.gradient is None else nothing)


def _exchange(shape: Shape, there: Shape, split: Split, machine: Machine, backward: bool) -> float:
    """Seconds of the collectives that exchange rows for heads, nothing beside them; over NCCL."""
    if split.heads == 1:
        return 0.0
    row = shape.batch * shape.seqlen / split.world_size * shape.headdim * shape.itemsize
    q, kv = there.nheads * row, there.nheads_kv * row
    if not backward:
        collectives = [q + 2 * kv, q]
    else:
        wide = STATE / shape.itemsize if there.nheads_kv * split.heads > shape.nheads_kv else 1.0
        statistics = 2 * STATISTIC * there.nheads * row / (shape.headdim * shape.itemsize)
        collectives = [2 * q + 2 * kv, statistics, q + 2 * kv * wide]
    return sum(_collective(nbytes, split.heads, machine) for nbytes in collectives)


def _collective(nbytes: float, ranks: int, machine: Machine) -> float:
    """Seconds of one exchange in which each rank sends `nbytes` to every other, packed before and unpacked after."""
    neighbours = min(ranks, machine.gpus_a_host)
    near = NEAR["nccl"].cost(nbytes * (neighbours - 1)).seconds
    far = machine.far.cost(nbytes * (ranks - neighbours)).seconds if ranks > neighbours else 0.0
    return max(near, far) + machine.hbm_seconds(4 * nbytes * ranks)
