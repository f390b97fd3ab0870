"""Duration of a ring with messages that take time: a walk over the hops of all ranks at once.

It resembles `ringflash.layouts.balance.critical_path`, with times in place of pairs. The KV of the next hop travels
while a hop computes. In the backward, the gradients of the hop before travel first, one hop behind their KV. A message
starts when both its ends have begun their hop. A rank begins its next hop when its own work and its messages are done.

In a ring of rings, KV crosses to the next group during a full pass around the inner ring. Its gradients return during
the next inner pass.
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
    """Cost of one message over one kind of link: its `seconds`, and the share `taken` that concurrent kernels lose."""

    seconds: float
    taken: float


@dataclass(frozen=True, eq=False)
class Costs:
    """Durations in seconds that the walk adds up.

    Args:
        compute: (ranks, ranks), a hop of the first rank's queries with the second rank's keys; 0 without visible pairs.
        hosts: (ranks,), the host of each rank. Links within a host are near.
        kv: a message of keys and values, near and far.
        gradient: a message of their gradients, near and far; None in a forward.
        add: addition of a received gradient to this rank's share.
        issue: time between the issue of two hops, by the process that launches them.
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
        owner: (ranks,), owner of the KV at each rank.
        present: (ranks,), whether this KV reaches the rank at all.
        sends: (ranks,), whether the rank sends this KV on to the next rank of its group.
        revolution: number of the inner pass in a ring of rings, else 0.
        opens: whether an inner pass begins.
        closes: whether an inner pass ends.
        far: whether KV crosses to the next group during this inner pass.
    """

    owner: Ranks
    present: NDArray[np.bool_]
    sends: NDArray[np.bool_]
    revolution: int
    opens: bool
    closes: bool
    far: bool


def steps(meets: NDArray[np.bool_], inner: int | None = None) -> Iterator[Step]:
    """Yields the hops of a ring, or of a ring of rings with groups of `inner` ranks.

    In a ring, KV goes no further than its last reader. In a ring of rings, KV is assumed to reach every rank.

    Args:
        meets: (ranks, ranks), whether the first rank's queries have visible pairs with the second rank's keys.
        inner: ranks in a group of a ring of rings; None means one ring.
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
    """Returns the seconds from the beginning of a pass to the end of the last rank's work.

    Args:
        costs: durations to add up.
        inner: ranks in a group of a ring of rings; None means one ring.
        hops: `steps` of the same ranks and visible pairs, if they are known.
    """
    world = len(costs.compute)
    ranks = np.arange(world)
    size = inner or world
    following = ranks // size * size + (ranks + 1) % size
    kv = _Round(costs.kv, costs.hosts, following)
    gradient = None if costs.gradient is None else _Round(costs.gradient, costs.hosts, following)
    begin, ended = np.zeros(world), None
    crossed, homewards = begin, None  # end of the far messages; last step of the previous inner pass
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
            crossed, taken_far = far.done, far.taken / max(size, 1)  # spread over the inner pass
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
    """A message of each rank to the next rank: all durations, and the time that the kernels of each rank lose."""

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
        """Sends to the next rank, like `move`; computes all messages at once if every rank sends."""
        if not sending.all():
            self.move(messages.cost, sending, messages.to)
            return
        done = np.maximum(self.done, self.done[messages.to]) + messages.seconds
        self.done = np.maximum(done, done[messages.source])
        self.taken = self.taken + messages.taken

    def move(self, cost: tuple[Cost, Cost], sending: NDArray[np.bool_], to: Ranks) -> None:
        """Sends from each rank of `sending` to its rank of `to`; no rank gets two messages.

        A message waits for the earlier messages of both its ends.
        """
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
        for ends in (source, target):  # no rank occurs twice in `ends`
            self.done[ends] = np.maximum(self.done[ends], done)
            taken[ends] = np.maximum(taken[ends], shares)
        self.taken = self.taken + taken
