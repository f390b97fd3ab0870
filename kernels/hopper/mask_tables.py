"""What the programs of a Hopper kernel are told of a mask: rows of storage, an interval of them for each row.

Every interval mask shows a query consecutive keys, and a key consecutive queries, because neither bound ever falls. As
long as chunks lie in storage in the order of their positions, the rows of storage that are seen are consecutive too,
whatever the layout: these kernels know neither chunks nor positions, and their tiles may cross a chunk's border.
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
    """The tables of one launch. Its programs own tiles of one side's rows, and visit tiles of the other's.

    Args:
        below: whether a row does not see the beginning of a tile that is visited.
        above: whether a row does not see the end of one.
        bounds: int32 (batch or 1, rows, 2), contiguous: a row sees the other side's rows from the first to before the
            second.
        bounds_stride: elements from one sequence's bounds to the next's, 0 when they are all alike.
        tiles: int32 (batch or 1, ntiles, 4): [first, third of these) some row of the tile sees; of [first, second) and
            [third, fourth) some rows see only some; [second, third) every row sees whole. Counted in tiles.
        tiles_stride: as `bounds_stride`.
        order: int32 (ntiles,): the tiles, those that visit most first, so that none begins late; or as they lie.
        visits: how many of the other side's tiles one visits, on average.
        skew: the most that one visits over the average, in the sequence that visits most: 1 without a mask, about 2
            under the causal one.
        turns: int32, `_turns`, where tiles are in the order in which they lie.
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
    turns: Tensor | None
    turns_stride: int

    @property
    def masked(self) -> bool:
        """Whether any tile that is visited needs a mask."""
        return self.below or self.above

    @property
    def shifted(self) -> bool:
        """Whether tiles see about as much as each other, but elsewhere: windows of less than half, and little else."""
        return self.below and self.above and self.skew < 4 / 3


def are_ascending(chunks: Sequence[Chunk]) -> bool:
    """Whether positions rise through storage, as intervals of storage need."""
    return all(before.stop <= after.start for before, after in pairwise(chunks))


@device_tables(maxsize=256)  # of a ring, three tables a hop
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
    """The tables for tiles of `own_block` rows that visit tiles of `block` rows; with `by_keys` keys own.

    `ordered` has owned tiles as they lie, and their turns at those that they visit.
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
        turns=turns,
        turns_stride=0 if turns is None else _stride(turns),
    )


def _table(x: Tensor, device: torch.device) -> Tensor:
    return uploaded(x.to(torch.int32).contiguous(), device)


def _stride(table: Tensor) -> int:
    return 0 if table.shape[0] == 1 else table.stride(0)


def _seen(mask: Mask, q_chunks: Sequence[Chunk], k_chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
    """int64 (batch or 1, seqlen_q) each: the rows of keys that a query sees, from the first to before the second.

    Neither ever falls; where the second is not the larger nothing is seen.
    """
    lo, hi = torch.broadcast_tensors(*mask.bounds(positions(q_chunks, "cpu"), LAST_KEY))
    held = positions(k_chunks, "cpu")
    first, stop = (torch.searchsorted(held, x.contiguous()) for x in (lo, hi))
    return first, stop


def _tiles(first: Tensor, stop: Tensor, own_block: int, block: int, by_keys: bool) -> Tensor:
    """int64 (batch or 1, ntiles, 4): `Intervals.tiles`.

    Rows past the end count as seeing all when they are queries, whose results nobody keeps. Keys there see nothing: dq
    is a sum over all rows of a tile.
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
    """In which order owned tiles do something to a tile that they visit, of [begin, end), where they take turns.

    Neither bound ever falls from one tile that visits any to the next, so that those that visit a tile are consecutive.

    Args:
        begin: int64 (batch or 1, ntiles).
        end: the same.
        nothers: tiles of the other side.

    Returns:
        int64 (batch or 1, ntiles + 2 nothers): how many tiles before an owned one visit any; then for each tile of the
        other side that number of the first that visits it, and how many do.
    """
    visits = (end > begin).long()
    opened, closed = (torch.zeros(len(begin), nothers + 1, dtype=torch.int64, device="cpu") for _ in range(2))
    opened.scatter_add_(1, begin.where(visits > 0, nothers), visits)
    closed.scatter_add_(1, end, visits)
    opened, closed = (x.cumsum(1)[:, :nothers] for x in (opened, closed))
    return torch.cat([visits.cumsum(1) - visits, torch.stack([closed, opened - closed], -1).flatten(1)], 1)
