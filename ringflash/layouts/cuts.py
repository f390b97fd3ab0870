"""Cuts of a sequence with equal tokens and nearly equal attention work on every rank; `balance` chooses among them.

In every cut the token counts of ranks differ by at most one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

Cut = tuple[tuple[tuple[int, int], ...], ...]  # for each rank its ranges [start, stop), rising, none adjoining the next

CLOSE = 0.01  # an error of a rank's pairs up to this share justifies no split document and no exchange of blocks
BLOCKS = 32  # blocks dealt to each rank, or a few more
TILE = 128  # documents are split at multiples of this many tokens


def joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the ranges in order, without empty ones; adjoining ranges are joined for fewer and fuller tiles."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif stop > start:
            result.append((start, stop))
    return tuple(result)


def long_ones_zigzag(row_pairs: Tensor, starts: Tensor, lengths: Tensor, world: int) -> list[Cut]:
    """Returns cuts with long documents in zigzag over all ranks, and the remaining tokens taken from both ends.

    A document is long from 1 / world of the tokens on, or from 1 / (2 * world) on; both bounds are tried.
    """
    cuts = []
    piece = lengths // (2 * world)
    piece = torch.where(piece > TILE, piece - piece % TILE, piece)
    selections = [(lengths * share >= len(row_pairs)) & (piece > 0) for share in (world, 2 * world)]
    for long in {tuple(x.tolist()): x for x in selections if bool(x.any())}.values():
        owned: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        for start, rows in zip(starts[long].tolist(), piece[long].tolist(), strict=True):
            for rank, ranges in enumerate(owned):
                ranges += [(start + i * rows, start + (i + 1) * rows) for i in (rank, 2 * world - 1 - rank)]
        taken = torch.where(long, 2 * world * piece, 0)
        left = lengths > taken
        for cut in from_both_ends(row_pairs, (starts + taken)[left], (lengths - taken)[left], world):
            cuts.append(tuple(joined([*a, *b]) for a, b in zip(owned, cut, strict=True)))
    return cuts


def from_both_ends(row_pairs: Tensor, starts: Tensor, lengths: Tensor, world: int) -> list[Cut]:
    """Returns cuts of the line of documents, with none, the light ones, the heavy ones or all of them reversed.

    A document is heavy if it has more pairs a token than the mean of all.
    """
    if len(lengths) == 0:
        return [((),) * world]
    sums = torch.nn.functional.pad(row_pairs.cumsum(0), (1, 0))
    work = sums[starts + lengths] - sums[starts]
    density = work.double() / lengths
    heavy = density > float(work.sum()) / float(lengths.sum())
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
    """Returns the positions of all tokens of documents laid in a line, reversed if `flipped`: int64 (seqlen,)."""
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    offset = torch.arange(int(lengths.sum()), device="cpu") - begins
    starts, last, flipped = (x.repeat_interleave(lengths) for x in (starts, starts + lengths - 1, flipped))
    return torch.where(flipped, last - offset, starts + offset)


def _shared(line: Tensor, row_pairs: Tensor, borders: Tensor, world: int) -> Cut:
    """Returns the cut in which one rank after another takes tokens from both ends of the line.

    Args:
        line: (seqlen,) positions of the tokens.
        row_pairs: (seqlen,) visible pairs of each token.
        borders: bool (seqlen + 1,), True where a document begins or the line ends.
        world: number of ranks.
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
    """Returns positions in any order as ranges."""
    if len(tokens) == 0:
        return ()
    tokens = tokens.sort().values
    breaks = (tokens.diff() != 1).nonzero()[:, 0] + 1
    starts = tokens[torch.cat([breaks.new_zeros(1), breaks])]
    stops = tokens[torch.cat([breaks - 1, breaks.new_full((1,), len(tokens) - 1)])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def dealt_blocks(row_pairs: Tensor, world: int) -> Cut:
    """Returns a cut into equal blocks, the same number for each rank, dealt from the most pairs to the fewest.

    Each block goes to the rank with the fewest pairs so far. The tokens left over at the end of the sequence are shared
    out evenly beforehand.
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
    """Returns `count` blocks for each rank, so that the sums of their pairs and the ranks' loads come out even.

    The largest blocks are dealt first, each to the rank with the least load so far. Then blocks of the most loaded rank
    are exchanged for smaller ones of the least loaded rank, as long as that helps.
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
