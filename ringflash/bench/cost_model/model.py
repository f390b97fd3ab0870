"""Predicted times of a causal ring, heads x ring or a ring of rings, from a few figures of the machine.

A hop computes for

    pairs * FLOPs a pair / rate * waves + state / HBM bandwidth + launch

with the pairs of whole tiles. `waves` is tiles / SMs rounded up, over tiles / SMs. A message takes latency + bytes /
bandwidth of its link. Kernels that run during a message lose a share of its time. `walk` computes the time of the whole
ring. docs/performance/cost-model.md says from which measurements each figure was taken or fitted.
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

FORWARD, BACKWARD = 4, 10  # FLOPs for each visible pair, element of headdim and query head
STATE = 4  # bytes of an element of the state, and of a gradient in a message
MOST_COUNTED = 2**17  # tokens; the pairs of longer sequences are scaled from this length


@dataclass(frozen=True)
class Link:
    """Kind of link: latency, bandwidth a GPU and direction, and the share of a message's time that kernels lose."""

    latency_us: float
    gb_s: float
    taken: float

    def cost(self, nbytes: float) -> Cost:
        """Returns the cost of one message of `nbytes` bytes."""
        return Cost(self.latency_us * 1e-6 + nbytes / self.gb_s / 1e9, self.taken)


NEAR = {"nccl": Link(32.0, 197.0, 0.8), "symmetric": Link(5.0, 337.0, 0.06)}  # within a host
FAR = Link(20.0, 45.0, 0.1)  # between hosts, for any transport within a host


@dataclass(frozen=True)
class Machine:
    """Figures of the machine. The defaults describe an H200 and its links.

    Args:
        tflops_forward: rate of the forward kernel on long sequences.
        tflops_backward: rate of the backward kernel on long sequences.
        launch_us: time of a hop on the GPU in addition to its work.
        issue_us: time that the process takes to launch a hop; 0 in a CUDA graph.
        near: links within a host.
        far: links between hosts.
        gpus_a_host: number of GPUs joined by near links.
        hbm_gb_s: HBM bandwidth of copies and of the state.
        sms: number of SMs that share the tiles.
        tile: rows of queries, and of keys, in a tile. A tile is always computed whole.
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
        """Returns the seconds of `nbytes` bytes of reads and writes together."""
        return nbytes / self.hbm_gb_s / 1e9

    def waves(self, rows: float, sequences_and_heads: int) -> float:
        """Returns the time of the tiles over their time if they filled the SMs evenly.

        Args:
            rows: rows of queries in each sequence and head.
            sequences_and_heads: number of sequences times the number of heads.
        """
        tiles = sequences_and_heads * max(rows / self.tile, 1.0) / self.sms
        return ceil(tiles) / tiles

    def seconds_a_pair(self, headdim: int, backward: bool) -> float:
        """Returns the seconds of a visible pair of one query head."""
        flops, tflops = (BACKWARD, self.tflops_backward) if backward else (FORWARD, self.tflops_forward)
        return flops * headdim / tflops / 1e12

    def alone(self, shape: Shape, pairs: float, backward: bool) -> float:
        """Returns the seconds of the causal kernel on one GPU, with `pairs` visible pairs a head."""
        rows = sqrt(2 * pairs)
        whole = pairs + rows * self.tile / 2
        time = whole * self.seconds_a_pair(shape.headdim, backward) * shape.batch * shape.nheads
        return time * self.waves(rows, shape.batch * shape.nheads) + self.launch_us * 1e-6


@dataclass(frozen=True)
class Split:
    """Split of a sequence over GPUs: `heads` GPUs split the heads, and rings of the others split the rows.

    `inner` is the number of ranks in each inner ring of a ring of rings; None means one ring.
    """

    world_size: int
    heads: int = 1
    inner: int | None = None

    @property
    def ring(self) -> int:
        """Number of ranks in the ring."""
        return self.world_size // self.heads

    def crosses(self, gpus_a_host: int) -> bool:
        """Returns whether KV crosses hosts at every hop, of the inner ring if there is one."""
        span = self.heads * (self.inner or self.ring)
        return span > gpus_a_host or (self.world_size > gpus_a_host and gpus_a_host % span > 0)

    def check(self, shape: Shape) -> None:
        """Raises ArgumentError unless the ranks and the heads of `shape` allow this split."""
        if self.world_size % self.heads or shape.nheads % self.heads:
            expected = f"a divisor of {self.world_size} GPUs and of {shape.nheads} query heads"
            raise ArgumentError("--head-split", expected=expected, got=self.heads, remedy="Split over fewer, or 1.")
        if self.inner is not None and self.ring % self.inner:
            expected = f"a divisor of the ring's {self.ring} ranks"
            raise ArgumentError("--inner-ring", expected=expected, got=self.inner, remedy="Choose another, or none.")

    def __str__(self) -> str:
        ring = f"ring {self.ring}" if self.inner is None else f"ring {self.ring // self.inner} x {self.inner}"
        return ring if self.heads == 1 else f"heads {self.heads}, {ring}"


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass.

    Args:
        total: the whole pass on the slowest rank.
        alone: one kernel on one GPU, with a causal triangle that has the pairs of the mean rank.
        compute: mean computation of a hop.
        message: messages that a rank sends at a hop, over the slowest link that the ring crosses.
        exposed: exposed communication of a hop: the time that messages add to the ring, over the number of hops.
        exchange: exchange of heads for rows and back.
    """

    total: float
    alone: float
    compute: float
    message: float
    exposed: float
    exchange: float


@dataclass(frozen=True)
class Prediction:
    """Predicted times of both passes."""

    forward: Pass
    backward: Pass

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward.total + self.backward.total

    @property
    def efficiency(self) -> float:
        """Time of the kernel alone at equal work over the predicted time, forward and backward together."""
        return (self.forward.alone + self.backward.alone) / self.seconds


@lru_cache(maxsize=1024)
def predict(shape: Shape, split: Split, layout: str, machine: Machine) -> Prediction:
    """Predicts both passes of causal attention over `shape.seqlen` tokens in all.

    Raises:
        ArgumentError: the shape is not causal, its heads or ranks do not allow the split, the layout is unknown, or
            there are fewer tokens than ranks.
    """
    if not shape.causal:
        remedy = "Other masks are for `ringflash plan`, which counts their pairs."
        raise ArgumentError("causal", expected="True", got=False, remedy=remedy)
    split.check(shape)
    pairs, chunks = _pairs(layout, shape.seqlen, split.ring)
    hops = _steps(layout, min(shape.seqlen, MOST_COUNTED), split.ring, split.inner)
    # The ring has only its share of the heads, and all tokens.
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
    """Returns the hops of both passes. The cache is small, because the hops of 1024 ranks take 10 MiB."""
    return list(steps(_counted(layout, counted, ranks)[0] > 0, inner))


def _pairs(layout: str, seqlen: int, ranks: int) -> tuple[Array, int]:
    """Returns the visible pairs of every rank with every rank's keys, and the largest number of chunks of a rank."""
    counted = min(seqlen, MOST_COUNTED)
    pairs, chunks = _counted(layout, counted, ranks)
    return pairs * (seqlen / counted) ** 2, chunks


def _whole_tiles(there: Shape, ranks: int, chunks: int, tile: int) -> float:
    """Returns computed pairs over counted pairs: chunks are rounded up to whole tiles of queries and of keys."""
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
    if not backward:  # every hop but the first reads the state, and every hop but the last writes it
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
    """Returns the seconds of the collectives that exchange rows for heads over NCCL, with nothing else running."""
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
    """Returns the seconds of one exchange, in which each rank sends `nbytes` to every other rank.

    The bytes are packed before and unpacked after.
    """
    neighbours = min(ranks, machine.gpus_a_host)
    near = NEAR["nccl"].cost(nbytes * (neighbours - 1)).seconds
    far = machine.far.cost(nbytes * (ranks - neighbours)).seconds if ranks > neighbours else 0.0
    return max(near, far) + machine.hbm_seconds(4 * nbytes * ranks)
