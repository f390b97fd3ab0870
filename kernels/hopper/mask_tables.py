"""Mask tables of the Hopper kernels: for each row of storage, an interval of rows of storage that it sees.

Under every interval mask a query sees consecutive keys, and a key is seen by consecutive queries, because neither bound
ever falls. If chunks lie in storage in the order of their positions, the rows of storage are consecutive too, under any
layout. So the kernels know neither chunks nor positions, and their tiles may cross the border of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.kernels.mask_tables import LAST_KEY
from ringflash.layouts.layout import Chunk, positions
from ringflash.masks import Mask


@dataclass(frozen=True, eq=False)
class Intervals:
    """Tables of one launch. Its programs own tiles of one side's rows and process tiles of the other side.

    Args:
        below: whether some row does not see the beginning of a tile that its owned tile processes.
        above: whether some row does not see the end of such a tile.
        bounds: int32 (batch or 1, rows, 2), contiguous: the first row of the other side that a row sees, and one past
            the last.
        bounds_stride: elements from the bounds of a sequence to the next sequence, 0 if all sequences share them.
        tiles: int32 (batch or 1, ntiles, 4): begin, full_begin, full_end, end of each owned tile, in tiles of the other
            side. Some row of the owned tile sees some of [begin, end). Every row sees all of [full_begin, full_end). In
            the rest some rows see only a part.
        tiles_stride: as `bounds_stride`.
        order: int32 (ntiles,): tiles with the most processed tiles first, so that no long one begins late; or storage
            order if `ordered`.
        visits: tiles of the other side that an owned tile processes, on average.
        skew: the largest number of processed tiles over the average, in the sequence with the most: 1 without a mask,
            about 2 under the causal mask.
        covers: whether every row of the owned side sees some row of the other side.
        turns: int32, `_turns`, or None unless `ordered`.
        turns_stride: as `bounds_stride`.
    """

    below: bool
    above: bool
    bounds: Tensor
    bounds_stride: int
    tiles: Tensor
    tiles_stride: int
    order: Tensor
    visits: float
    skew: float
    covers: bool
    turns: Tensor | None
    turns_stride: int

    @property
    def masked(self) -> bool:
        """True if any processed tile needs a mask."""
        return self.below or self.above

    @property
    def shifted(self) -> bool:
        """True if owned tiles process about equally many tiles, but different ones: mostly windows below half."""
        return self.below and self.above and self.skew < 4 / 3


def are_ascending(chunks: Sequence[Chunk]) -> bool:
    """Returns whether positions rise through storage; the tables require this."""
    return all(before.stop <= after.start for before, after in pairwise(chunks))


@device_tables(maxsize=256)  # a ring has three tables a hop
def intervals(
    mask: Mask,
    q_chunks: Sequence[Chunk],
    k_chunks: Sequence[Chunk],
    own_block: int,
    block: int,
    device: torch.device,
    by_keys: bool,
    ordered: bool = False,
) -> Intervals:
    """Returns the tables for owned tiles of `own_block` rows that process tiles of `block` rows.

    `by_keys` makes tiles of keys the owned ones, rather than tiles of queries. `ordered` keeps owned tiles in storage
    order and adds the table `turns`.
    """
    first, stop = _seen(mask, q_chunks, k_chunks)
    if by_keys:
        keys = torch.arange(sum(chunk.length for chunk in k_chunks), device="cpu").expand(len(first), -1).contiguous()
        first, stop = torch.searchsorted(stop, keys, right=True), torch.searchsorted(first, keys, right=True)
    tiles = _tiles(first, stop, own_block, block, by_keys)
    begin, _, _, end = tiles.unbind(-1)
    own = torch.arange(first.shape[1], device="cpu") // own_block
    fully_masked = (first >= stop) & (begin < end)[:, own]
    below = bool(((first > begin[:, own] * block) & (first < stop) | fully_masked).any())
    above = bool(((stop < end[:, own] * block) & (first < stop) | fully_masked).any())
    above |= by_keys and first.shape[1] % own_block > 0
    visits = end - begin
    fullest = visits[visits.sum(1).argmax()].double()
    order = visits.sum(0).argsort(descending=True, stable=True)
    turns = None
    if ordered:
        nrows = sum(chunk.length for chunk in (q_chunks if by_keys else k_chunks))
        turns = _table(_turns(begin, end, -(-nrows // block)), device)
        order = torch.arange(len(order), device="cpu")
    bounds, tiles, order = (_table(x, device) for x in (torch.stack([first, stop], -1), tiles, order))
    return Intervals(
        below=below,
        above=above,
        bounds=bounds,
        bounds_stride=_stride(bounds),
        tiles=tiles,
        tiles_stride=_stride(tiles),
        order=order,
        visits=float(visits.double().mean()),
        skew=float(fullest.max() / fullest.mean()) if fullest.any() else 1.0,
        covers=bool((first < stop).all()),
        turns=turns,
        turns_stride=0 if turns is None else _stride(turns),
    )


def _table(x: Tensor, device: torch.device) -> Tensor:
    return uploaded(x.to(torch.int32).contiguous(), device)


def _stride(table: Tensor) -> int:
    return 0 if table.shape[0] == 1 else table.stride(0)


def _seen(mask: Mask, q_chunks: Sequence[Chunk], k_chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    """Returns the first row of keys that each query sees, and one past the last, int64 (batch or 1, seqlen_q) each.

    Neither bound ever falls. A query sees nothing if its second bound is not larger than its first.
    """
    lo, hi = torch.broadcast_tensors(*mask.bounds(positions(q_chunks, "cpu"), LAST_KEY))
    held = positions(k_chunks, "cpu")
    first, stop = (torch.searchsorted(held, x.contiguous()) for x in (lo, hi))
    return first, stop


def _tiles(first: Tensor, stop: Tensor, own_block: int, block: int, by_keys: bool) -> Tensor:
    """Returns `Intervals.tiles` as int64 (batch or 1, ntiles, 4).

    Rows past the end of the sequence count as seeing all keys if they are queries, because their results are dropped.
    Keys past the end see no query, because dq is a sum over all rows of a tile.
    """
    live = stop > first
    last = 2**31

    def tiled(x: Tensor, filling: int) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % own_block), value=filling)
        return padded.unflatten(1, (-1, own_block))

    some_first = tiled(first.where(live, last), last).amin(2)
    some_stop = tiled(stop.where(live, 0), 0).amax(2)
    all_first, all_stop = tiled(first, 0).amax(2), tiled(stop.where(live, 0), 0 if by_keys else last).amin(2)
    begin = torch.minimum(some_first, some_stop) // block
    end = torch.maximum(-(-some_stop // block), begin)
    full_begin = (-(-all_first // block)).clamp(begin, end)
    full_end = (all_stop // block).clamp(full_begin, end)
    return torch.stack([begin, full_begin, full_end, end], -1)


def _turns(begin: Tensor, end: Tensor, nothers: int) -> Tensor:
    """Returns the table of the order in which owned tiles add to each tile of the other side in [begin, end).

    Neither bound ever falls from one owned tile to the next, apart from owned tiles that process nothing. So the owned
    tiles that add to a given tile are consecutive among the tiles that process any.

    Args:
        begin: int64 (batch or 1, ntiles), the first tile that each owned tile processes.
        end: the same shape, one past the last tile.
        nothers: tiles of the other side.

    Returns:
        int64 (batch or 1, ntiles + 2 nothers): for each owned tile, its rank, which is the number of earlier owned
        tiles that process any tile. Then for each tile of the other side, two numbers: the rank of the first owned tile
        that processes it, and how many owned tiles do.
    """
    visits = (end > begin).long()
    opened, closed = (torch.zeros(len(begin), nothers + 1, dtype=torch.int64, device="cpu") for _ in range(2))
    opened.scatter_add_(1, begin.where(visits > 0, nothers), visits)
    closed.scatter_add_(1, end, visits)
    opened, closed = (x.cumsum(1)[:, :nothers] for x in (opened, closed))
    return torch.cat([visits.cumsum(1) - visits, torch.stack([closed, opened - closed], -1).flatten(1)], 1)
