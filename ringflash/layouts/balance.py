"""The choice of a balanced layout, with equal tokens and equal attention work on every rank, and little KV moved.

Token counts of ranks differ by at most one, because activations and everything but attention need equal counts.
Several methods propose cuts into a few chunks, and the best is chosen by exact counts of visible (query, key) pairs:

- the cuts of other layouts, which suit masks that are even by themselves;
- from both ends of a line: documents stand in a line, from the fewest pairs a token to the most. One rank after another
  takes tokens from both ends, in such numbers that its pairs come out even. A document is split only if a rank's share
  ends within it, at most two documents a rank. With a single causal document each rank gets an early and a late chunk,
  as in zigzag;
- each long document in zigzag over all ranks, and the others from both ends of a line: even at every hop;
- many equal blocks, dealt from the most pairs to the fewest, each to the rank with the fewest pairs so far. This is
  even under any mask, but every rank then needs the keys of most others, so it is tried only if no other cut is even.

Ranks are renumbered so that keys, which move from rank to rank in one direction, reach their last reader early. Among
even cuts the one with the earliest end of the ring is chosen; the time includes a price for the rows that move.

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

EVEN = 1.05  # a cut is even up to this ratio of the largest number of pairs of a rank to the mean
ROW = 1000  # pairs computed while a KV row moves to the next rank: 4 heads a KV head, 550 TFLOP/s, 150 GB/s
OVERLAPPED = 0.1  # weight of the time of messages that computing hides
SEARCHED = 16  # up to this world size ranks are renumbered by search


class Pairs(Protocol):
    """Counts of a mask's visible pairs; see `ringflash.masks.pair_counts.PairCounts`."""

    @property
    def row_pairs(self) -> Tensor:
        """Returns the number of keys that each query sees: int64 (seqlen,)."""
        ...

    @property
    def components(self) -> Tensor:
        """Returns the edges of the parts of the sequence that see nothing of each other: int64, from 0 to seqlen."""
        ...

    def between(self, cut: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """Returns the visible pairs of each rank's queries with each rank's keys: int64 (ranks, ranks)."""
        ...


@dataclass(frozen=True)
class _Candidate:
    """A cut and its costs; `critical_path` and `moved`, the time of messages, are in units of the mean rank's work."""

    cut: Cut
    balance: float
    critical_path: float
    moved: float

    @property
    def cost(self) -> tuple[bool, float, int]:
        """Returns a key that is least for the best cut.

        Even cuts come first, by the time of the ring and its messages. Other cuts follow by their balance. Fewer chunks
        break ties.
        """
        even = self.balance <= EVEN
        time = self.critical_path + OVERLAPPED * self.moved + max(self.moved - self.critical_path, 0.0)
        return not even, time if even else self.balance, sum(map(len, self.cut))


def balanced(pairs: Pairs, world_size: int, plain: Sequence[Cut]) -> Cut:
    """Returns the best cut found: the same on every rank, because nothing is random and sums are of integers.

    Args:
        pairs: visible pairs of the mask.
        world_size: number of ranks, at most the number of tokens.
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
    """Returns for each rank the number of hops that its keys travel to their last reader.

    Args:
        meets: bool (ranks, ranks), True where a query of the first rank sees a key of the second.

    Returns:
        int64 (ranks,).
    """
    ranks = torch.arange(len(meets), device="cpu")
    by_hop = meets[(ranks + ranks[:, None]) % len(meets), ranks]  # (hop, owner)
    return (by_hop * ranks[:, None]).amax(0)


def critical_path(pairs: Tensor) -> float:
    """Returns the time of a ring in units of the mean rank's work, when messages cost nothing; 1 if there is no work.

    Ranks exchange the KV of hop h while they compute hop h - 1. A rank therefore begins hop h no earlier than the ranks
    of that exchange have finished hop h - 2. If the work is even at each hop too, no rank waits. Otherwise a rank may
    wait, though less than if all ranks began every hop together.

    Args:
        pairs: int64 (ranks, ranks), visible pairs of the first rank's queries with the second rank's keys.
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
    """Returns the cut with its ranks renumbered, and its costs."""
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
    """Returns the rows that all ranks send together when rank i takes over the rows of rank `order[i]`."""
    index = torch.tensor(order, device="cpu")
    return int((reaches(meets[index][:, index]) * lengths[index]).sum())


def _renumbered(meets: Tensor, lengths: Tensor) -> list[int]:
    """Returns an order of the ranks under which few rows move.

    Starts from the given order or its reverse, and exchanges two ranks as long as fewer rows move; large worlds keep
    the start.
    """
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
