"""When a ring is done whose messages take time: a walk over the hops of all its ranks at once.

Like `ringflash.layouts.balance.critical_path`, with times in place of pairs. KV of the next hop travels while a hop
computes. In the backward the gradients of the hop before travel first, one hop behind their KV. A message starts when
both its ends have begun their hop. A rank begins its next hop when its own work and its messages are done. In a ring of
rings KV crosses to the next group during a revolution, and its gradients return during the next revolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Cost:
    """What one message costs over one kind of link: `seconds`, of which kernels beside it lose the share `taken`."""

    seconds: float
    taken: float


@dataclass(frozen=True, eq=False)
class Costs:
    """What the walk adds up, in seconds.

    Args:
        compute: (ranks, ranks), of a hop of the first's queries with the second's keys; 0 where they do not meet.
        hosts: (ranks,), where each rank stands; links within a host are near.
        kv: a message of keys and values, near and far.
        gradient: one of their gradients; None in a forward.
        add: adding a gradient that has come to this rank's share.
        issue: between the issue of two hops, by the process that launches them.
    """

    compute: Array
    hosts: Ranks
    kv: tuple[Cost, Cost]
    gradient: tuple[Cost, Cost] | None = None
    add: float = 0.0
    issue: float = 0.0


@dataclass(frozen=True, eq=False)
class Step:
    """One hop on all ranks.

    Args:
        owner: (ranks,), whose KV is where.
        present: whether it is there at all.
        sends: whether it goes on to the next rank of the group.
        revolution: which one of a ring of rings, else 0.
        opens: whether a revolution begins.
        closes: whether it ends.
        far: whether KV crosses to the next group during this revolution.
    """

    owner: Ranks
    present: NDArray[np.bool_]
    sends: NDArray[np.bool_]
    revolution: int
    opens: bool
    closes: bool
    far: bool


def steps(meets: NDArray[np.bool_], inner: int | None = None) -> Iterator[Step]:
    """The hops of a ring, or of a ring of rings of groups of `inner`.

    In a ring KV goes no further than its last reader; in a ring of rings it is taken to go everywhere.
    """
    world = len(meets)
    ranks = np.arange(world)
    if inner is None:
        by_hop = meets[(ranks + ranks[:, None]) % world, ranks]  # (hop, owner)
        reach = (by_hop * ranks[:, None]).max(0)
        for hop in range(int(reach.max()) + 1):
            owner = (ranks - hop) % world
            last = hop == int(reach.max())
            yield Step(owner, hop <= reach[owner], hop < reach[owner], 0, hop == 0, last, False)
        return
    groups = world // inner
    everywhere = np.ones(world, bool)
    for revolution in range(groups):
        for turn in range(inner):
            owner = (ranks // inner - revolution) % groups * inner + (ranks - turn) % inner
            ends = turn == inner - 1
            far = revolution < groups - 1
            yield Step(owner, everywhere, everywhere & (not ends), revolution, turn == 0, ends, far)


def seconds(costs: Costs, inner: int | None = None, hops: Sequence[Step] | None = None) -> float:
    """From the beginning of a pass to the end of the last rank's.

    Args:
        costs: what it adds up.
        inner: ranks of a group of a ring of rings.
        hops: the `steps` of ranks that meet where these do, if they are known.
    """
    world = len(costs.compute)
    ranks = np.arange(world)
    size = inner or world
    following = ranks // size * size + (ranks + 1) % size
    kv = _Round(costs.kv, costs.hosts, following)
    gradient = None if costs.gradient is None else _Round(costs.gradient, costs.hosts, following)
    begin, ended = np.zeros(world), None
    crossed, homewards = begin, None  # when what is sent far is done; gradients of the revolution before
    step = None
    for number, step in enumerate(hops or steps(costs.compute > 0, inner)):
        begin = np.maximum(begin, number * costs.issue)
        travel = _Travel(begin, costs.hosts)
        if costs.gradient is not None and gradient is not None and ended is not None:
            travel.move_round(gradient, ended.sends)
            home = ended.present & ~ended.sends & (ended.owner != ranks)
            if ended.revolution == 0:
                travel.move(costs.gradient, home, ended.owner)
            elif ended.closes:
                homewards = ended
        arrived = travel.done
        travel.move_round(kv, step.sends)
        if step.opens:
            far = _Travel(begin, costs.hosts)
            if homewards is not None and costs.gradient is not None:
                far.move(costs.gradient, homewards.present, homewards.owner)
                homewards = None
            if step.far:
                far.move(costs.kv, step.present, (ranks + size) % world)
            crossed, taken_far = far.done, far.taken / max(size, 1)  # spread over the revolution
        else:
            taken_far = np.zeros(world)
        work = costs.compute[ranks, step.owner] * step.present
        lost = np.minimum(travel.taken + taken_far, work)
        end = begin + work + lost
        if costs.gradient is not None and number > 0:
            end = np.maximum(end, arrived) + np.where(work > 0, costs.add, 0.0)
        begin = np.maximum(end, travel.done)
        if step.closes:
            begin = np.maximum(begin, crossed)
        ended = step
    if costs.gradient is not None and ended is not None:
        travel = _Travel(begin, costs.hosts)
        travel.move(costs.gradient, ended.present & (ended.owner != ranks), ended.owner)
        begin = travel.done
    return float(begin.max())


class _Round:
    """A message of each rank to the next one: what all of them take, and what they take from the kernels of each."""

    def __init__(self, cost: tuple[Cost, Cost], hosts: Ranks, to: Ranks) -> None:
        self.cost, self.to, self.source = cost, to, np.argsort(to)
        near, far = cost
        within = hosts == hosts[to]
        self.seconds = np.where(within, near.seconds, far.seconds)
        shares = np.where(within, near.taken * near.seconds, far.taken * far.seconds)
        self.taken = np.maximum(shares, shares[self.source])


class _Travel:
    """Messages of one hop, one kind after the other."""

    def __init__(self, begin: Array, hosts: Ranks) -> None:
        self._hosts = hosts
        self.done, self.taken = begin, np.zeros(len(begin))

    def move_round(self, messages: _Round, sending: NDArray[np.bool_]) -> None:
        """As `move`, to the next rank; all at once where each rank sends."""
        if not sending.all():
            self.move(messages.cost, sending, messages.to)
            return
        done = np.maximum(self.done, self.done[messages.to]) + messages.seconds
        self.done = np.maximum(done, done[messages.source])
        self.taken = self.taken + messages.taken

    def move(self, cost: tuple[Cost, Cost], sending: NDArray[np.bool_], to: Ranks) -> None:
        """Sends from each rank of `sending`, no two to one; a message waits for what its two ends did before."""
        source = np.flatnonzero(sending)
        if not len(source):
            return
        target = to[source]
        near, far = cost
        within = self._hosts[source] == self._hosts[target]
        taken = np.zeros(len(self.done))
        done = np.maximum(self.done[source], self.done[target]) + np.where(within, near.seconds, far.seconds)
        shares = np.where(within, near.taken * near.seconds, far.taken * far.seconds)
        self.done = self.done.copy()
        for ends in (source, target):  # no rank twice
            self.done[ends] = np.maximum(self.done[ends], done)
            taken[ends] = np.maximum(taken[ends], shares)
        self.taken = self.taken + taken
