"""Cuts a sequence so that every rank has as many tokens and as much attention, and keys and values move little.

Every rank gets the same number of tokens, to one: activations and everything but attention want that. Of cuts into a
few chunks, each drawn up in another way, the best is taken by their exact counts of visible (query, key) pairs:

- those of other layouts, which suit masks that are even by themselves;
- from both ends of a line: documents stand in a line from those with the fewest pairs a token to those with the most,
  and one rank after another takes tokens from both ends, so many from each that its pairs come out even. A document is
  split only where a rank's share ends in it, at most two a rank. The line of a single causal document gives each rank
  an early and a late chunk, as zigzag does;
- long documents in zigzag over all ranks each, and the others from both ends of a line: even at every hop;
- many equal blocks, those with the most pairs dealt first, each to the rank with the fewest so far: even under any
  mask, but every rank then needs the keys of most others. Only where no other is even.

Ranks are renumbered so that keys, which pass from rank to rank in one direction, reach their last reader early. Among
even cuts that one is taken whose ring is done earliest, a price for what it moves included.

Sources: Graham 1969, "Bounds on multiprocessing timing anomalies" (dealing the largest first); MagiAttention 2025, the
dispatch solver (equal chunks a rank, pairs as the load).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringflash.layouts.cuts import Cut, dealt_blocks, from_both_ends, long_ones_zigzag

EVEN = 1.05  # most pairs of a rank over the mean that still count as even
ROW = 1000  # pairs in the time that a row of KV takes to the next rank: 4 heads a KV head, 550 TFLOP/s, 150 GB/s
OVERLAPPED = 0.1  # what moving weighs that hides behind computing
SEARCHED = 16  # ranks that are renumbered by search


class Pairs(Protocol):
    """The counts of a mask that a cut follows; see `ringflash.masks.pair_counts.PairCounts`."""

    @property
    def row_pairs(self) -> Tensor:
        """Keys that each query sees: int64 (seqlen,)."""
        ...

    @property
    def components(self) -> Tensor:
        """Edges of the parts of the sequence that see nothing of each other: int64, from 0 to seqlen."""
        ...

    def between(self, cut: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """Pairs of each rank's queries with each rank's keys: int64 (ranks, ranks)."""
        ...


@dataclass(frozen=True)
class _Candidate:
    """A cut and its costs; `moved` is the time of messages, like `critical_path` in units of the mean rank's work."""

    cut: Cut
    balance: float
    critical_path: float
    moved: float

    @property
    def cost(self) -> tuple[bool, float, int]:
        """Least is best: an even cut whose ring is done early and moves little, or else the evenest; of few chunks."""
        even = self.balance <= EVEN
        time = self.critical_path + OVERLAPPED * self.moved + max(self.moved - self.critical_path, 0.0)
        return not even, time if even else self.balance, sum(map(len, self.cut))


def balanced(pairs: Pairs, world_size: int, plain: Sequence[Cut]) -> Cut:
    """The best cut found: the same on every rank, since nothing is random and sums are of integers.

    Args:
        pairs: counts of the mask.
        world_size: ranks, at most as many as tokens.
        plain: cuts of other layouts.
    """
    row_pairs = pairs.row_pairs
    found = [_weighed(pairs, cut) for cut in plain]
    edges = pairs.components
    starts, lengths = edges[:-1], edges.diff()
    found += [_weighed(pairs, cut) for cut in from_both_ends(row_pairs, starts, lengths, world_size)]
    found += [_weighed(pairs, cut) for cut in long_ones_zigzag(row_pairs, starts, lengths, world_size)]
    if min(found, key=lambda candidate: candidate.balance).balance > EVEN:
        found.append(_weighed(pairs, dealt_blocks(row_pairs, world_size)))
    return min(found, key=lambda candidate: candidate.cost).cut


def reaches(meets: Tensor) -> Tensor:
    """How many ranks up each rank's keys must travel to their last reader.

    Args:
        meets: bool (ranks, ranks), whether any query of the first sees any key of the second.

    Returns:
        int64 (ranks,).
    """
    ranks = torch.arange(len(meets), device="cpu")
    by_hop = meets[(ranks + ranks[:, None]) % len(meets), ranks]  # (hop, owner)
    return (by_hop * ranks[:, None]).amax(0)


def critical_path(pairs: Tensor) -> float:
    """How long a ring takes whose messages cost nothing, in units of the mean rank's work.

    A rank sends at a hop what it has computed with at the hop before, so it begins hop h no earlier than the ranks that
    it exchanged with at hop h - 1 have finished hop h - 2. Where work is even at each hop too, that holds nobody up; in
    other cases a rank may wait, if less than if all began every hop together. Of no work at all, 1.

    Args:
        pairs: int64 (ranks, ranks), visible pairs of the first's queries with the second's keys.
    """
    reach = reaches(pairs > 0)
    ranks = torch.arange(len(pairs), device="cpu")
    earlier = before = torch.zeros_like(reach)
    for hop in range(int(reach.max()) + 1):
        owner, owner_before = (ranks - hop) % len(ranks), (ranks - hop + 1) % len(ranks)
        now = before
        if hop:
            now = torch.maximum(now, earlier.roll(1).where(hop <= reach[owner], 0))
            now = torch.maximum(now, earlier.roll(-1).where(hop <= reach[owner_before], 0))
        earlier, before = before, now + pairs[ranks, owner]
    return float(before.max() * len(ranks)) / float(pairs.sum()) if bool(pairs.any()) else 1.0


def _weighed(pairs: Pairs, cut: Cut) -> _Candidate:
    """The cut with its ranks renumbered."""
    counts = pairs.between(cut)
    lengths = torch.tensor([sum(stop - start for start, stop in ranges) for ranges in cut], device="cpu")
    order = _renumbered(counts > 0, lengths)
    moved = _moved(counts > 0, lengths, order)
    work = counts.sum(1)
    mean = max(float(work.sum()), 1.0) / len(cut)
    balance = max(float(work.max()) / mean, 1.0)
    time = ROW * moved / len(cut) / mean
    return _Candidate(tuple(cut[rank] for rank in order), balance, critical_path(counts[order][:, order]), time)


def _moved(meets: Tensor, lengths: Tensor, order: Sequence[int]) -> int:
    """Rows that all ranks send together when rank i is given what `order[i]` has."""
    index = torch.tensor(order, device="cpu")
    return int((reaches(meets[index][:, index]) * lengths[index]).sum())


def _renumbered(meets: Tensor, lengths: Tensor) -> list[int]:
    """An order of the ranks under which few rows move: the given one, its reverse, or one that exchanges lead to."""
    world = len(lengths)
    order, backwards = list(range(world)), list(reversed(range(world)))
    if bool(meets.all()):
        return order
    least = _moved(meets, lengths, order)
    if (moved := _moved(meets, lengths, backwards)) < least:
        order, least = backwards, moved
    searching = world <= SEARCHED
    while searching:
        searching = False
        for a in range(world):
            for b in range(a):
                changed = list(order)
                changed[a], changed[b] = order[b], order[a]
                if (moved := _moved(meets, lengths, changed)) < least:
                    order, least, searching = changed, moved, True
    return order
