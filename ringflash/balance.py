"""Cuts a sequence so that every rank has as many tokens and as much attention, and keys and values move little.

Every rank gets the same number of tokens, to one: activations and everything but attention want that. Of cuts into a
few chunks, each drawn up in another way, the best is taken by their exact counts of visible (query, key) pairs:

- those of other layouts, which suit masks that are even by themselves;
- from both ends of a line: documents stand in a line from those with the fewest pairs a token to those with the most,
  and one rank after another takes tokens from both ends, so many from each that its pairs come out even. A document is
  split only where a rank's share ends in it, at most two a rank. Read from one end to the other the line of a single
  causal document gives each rank an early and a late chunk, as zigzag does;
- many equal blocks, those with the most pairs dealt first, each to the rank with the fewest so far: even under any mask,
  but every rank then needs the keys of most others.

Ranks are then renumbered so that keys, which pass from rank to rank in one direction, reach their last reader early.

Sources: Graham 1969, "Bounds on multiprocessing timing anomalies" (dealing the largest first); MagiAttention 2025, the
dispatch solver (equal chunks a rank, pairs as the load).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Cut = tuple[tuple[tuple[int, int], ...], ...]  # for each rank its ranges [start, stop), rising, none adjoining the next

EVEN = 1.05  # most pairs of a rank over the mean that still count as even
CLOSE = 0.01  # a rank's pairs this near to its share need not come nearer at the price of a split document
MOVING = 0.1  # what moving all keys to all ranks weighs, in units of the mean rank's pairs
BLOCKS = 32  # dealt to each rank, or a few more
TILE = 128  # documents are split at multiples of it
SEARCHED = 16  # ranks that are renumbered by search


class Pairs(Protocol):
    """The counts of a mask that a cut follows; see `ringflash.masks.area.Area`."""

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
    """A cut, and what it comes to."""

    cut: Cut
    balance: float
    moved: float

    @property
    def cost(self) -> tuple[bool, float, int]:
        """Least is best: even cuts first, or else the evenest; then few moves; then few chunks."""
        even = self.balance <= EVEN
        return not even, self.balance + (MOVING * self.moved if even else 0.0), sum(map(len, self.cut))


def balanced(pairs: Pairs, world_size: int, plain: Sequence[Cut]) -> Cut:
    """The best cut found: the same on every rank, since nothing is random and sums are of integers.

    Args:
        pairs: counts of the mask.
        world_size: ranks, at most as many as tokens.
        plain: cuts of other layouts.
    """
    row_pairs = pairs.row_pairs
    found = [_weighed(pairs, cut) for cut in plain]
    found += [_weighed(pairs, cut) for cut in _from_both_ends(row_pairs, pairs.components, world_size)]
    if min(found, key=lambda candidate: candidate.balance).balance > EVEN:
        found.append(_weighed(pairs, _dealt(row_pairs, world_size)))
    return min(found, key=lambda candidate: candidate.cost).cut


def joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """In order, without empty ranges, and with neighbours made one: fewer and fuller tiles."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif stop > start:
            result.append((start, stop))
    return tuple(result)


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


def _weighed(pairs: Pairs, cut: Cut) -> _Candidate:
    """The cut with its ranks renumbered."""
    world = len(cut)
    counts = pairs.between(cut)
    lengths = torch.tensor([sum(stop - start for start, stop in ranges) for ranges in cut], device="cpu")
    order = _renumbered(counts > 0, lengths)
    moved = _moved(counts > 0, lengths, order)
    work = counts.sum(1).double()
    balance = float(work.max() / work.mean()) if int(counts.sum()) else 1.0
    return _Candidate(tuple(cut[rank] for rank in order), balance, moved / (int(lengths.sum()) * max(world - 1, 1)))


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


def _from_both_ends(row_pairs: Tensor, components: Tensor, world: int) -> list[Cut]:
    """A cut for each way to lay documents in the line: from first to last token, or the light or heavy ones reversed."""
    starts, lengths = components[:-1], components.diff()
    sums = torch.nn.functional.pad(row_pairs.cumsum(0), (1, 0))
    density = (sums[components[1:]] - sums[starts]).double() / lengths
    heavy = density > float(sums[-1]) / len(row_pairs)
    order = density.argsort(stable=True)
    backwards = {tuple(x.tolist()): x for x in (heavy & False, heavy | True, heavy, ~heavy)}
    cuts = []
    for flipped in backwards.values():
        line = _line(starts[order], lengths[order], flipped[order])
        borders = torch.zeros(len(line) + 1, dtype=torch.bool, device="cpu")
        borders[lengths[order].cumsum(0)] = borders[0] = True
        cuts.append(_shared(line, row_pairs[line], borders, world))
    return cuts


def _line(starts: Tensor, lengths: Tensor, flipped: Tensor) -> Tensor:
    """Positions of all tokens of some documents laid in a line, of some from last to first: int64 (seqlen,)."""
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    offset = torch.arange(int(lengths.sum()), device="cpu") - begins
    starts, last, flipped = (x.repeat_interleave(lengths) for x in (starts, starts + lengths - 1, flipped))
    return torch.where(flipped, last - offset, starts + offset)


def _shared(line: Tensor, row_pairs: Tensor, borders: Tensor, world: int) -> Cut:
    """One rank after another takes tokens from both ends of the line.

    Args:
        line: (seqlen,) positions.
        row_pairs: (seqlen,) pairs of each.
        borders: bool (seqlen + 1,), whether a document begins before the token there, or the line ends.
        world: ranks.
    """
    sums = torch.nn.functional.pad(row_pairs.cumsum(0), (1, 0))
    left, right = 0, len(line)
    base, longer = divmod(len(line), world)
    tile = min(TILE, 1 << max(base // 8, 1).bit_length() - 1)
    cut = []
    for rank in range(world):
        size = base + (rank < longer)
        share = float(sums[right] - sums[left]) / (world - rank)
        from_right = torch.arange(size + 1, device="cpu")
        a, b = left + size - from_right, right - from_right
        off = ((sums[a] - sums[left] + sums[right] - sums[b]).double() - share).abs() / max(share, 1.0)
        splits = 2 - borders[a].long() - borders[b].long()
        cost = off.where(off > CLOSE, 0.0) + 1e-3 * splits + 1e-6 * off
        allowed = (splits < 2) | (from_right % tile == 0)
        taken = int(cost.where(allowed, torch.inf).argmin())
        tokens = torch.cat([line[left : left + size - taken], line[right - taken : right]])
        cut.append(_ranges(tokens))
        left, right = left + size - taken, right - taken
    return tuple(cut)


def _ranges(tokens: Tensor) -> tuple[tuple[int, int], ...]:
    """Positions in any order as ranges."""
    tokens = tokens.sort().values
    breaks = (tokens.diff() != 1).nonzero()[:, 0] + 1
    starts = tokens[torch.cat([breaks.new_zeros(1), breaks])]
    stops = tokens[torch.cat([breaks - 1, breaks.new_full((1,), len(tokens) - 1)])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _dealt(row_pairs: Tensor, world: int) -> Cut:
    """Equal blocks, as many for each rank, those with the most pairs first to the rank with the fewest so far.

    What is left over at the end of the sequence is shared out evenly before.
    """
    seqlen = len(row_pairs)
    length = max(seqlen // world // BLOCKS, 1)
    if length > TILE:
        length -= length % TILE  # whole tiles
    count = seqlen // world // length
    sums = torch.nn.functional.pad(row_pairs.cumsum(0), (1, 0))
    whole = length * count * world
    base, longer = divmod(seqlen - whole, world)
    owned: list[list[tuple[int, int]]] = []
    start = whole
    for rank in range(world):
        owned.append([(start, start + base + (rank < longer))])
        start = owned[rank][0][1]
    blocks = sums[torch.arange(0, whole + 1, length, device="cpu")].diff()
    loads = [int(sums[ranges[0][1]] - sums[ranges[0][0]]) for ranges in owned]
    for ranges, dealt in zip(owned, _deal(blocks, loads, count), strict=True):
        ranges += [(block * length, (block + 1) * length) for block in dealt]
    return tuple(map(joined, owned))


def _deal(blocks: Tensor, loads: Sequence[int], count: int) -> list[list[int]]:
    """`count` blocks for each rank, so that the sums of their pairs and the ranks' loads come out even.

    The largest first, each to the rank with the least so far; then blocks of the rank with the most are exchanged for
    smaller ones of the rank with the least, as long as that helps.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    dealt: list[list[int]] = [[] for _ in loads]
    for block in blocks.argsort(descending=True, stable=True).tolist():
        load, rank = heapq.heappop(heap)
        dealt[rank].append(block)
        if len(dealt[rank]) < count:
            heapq.heappush(heap, (load + int(blocks[block]), rank))
    total = torch.tensor(loads, device="cpu") + torch.stack([blocks[dealt[rank]].sum() for rank in range(len(loads))])
    while True:
        most, least = int(total.argmax()), int(total.argmin())
        gap = int(total[most] - total[least])
        moves = blocks[dealt[most]][:, None] - blocks[dealt[least]]
        best = int((moves * 2 - gap).abs().argmin())
        moved = int(moves.flatten()[best])
        if not 0 < moved < gap or gap < CLOSE * int(total.max()):
            return dealt
        a, b = divmod(best, count)
        dealt[most][a], dealt[least][b] = dealt[least][b], dealt[most][a]
        total[most] -= moved
        total[least] += moved
