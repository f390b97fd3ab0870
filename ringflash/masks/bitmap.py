"""Bitmaps over runs of queries and equal blocks of keys, for masks that are not intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bitmap:
    """A relation: the query at position p sees key j iff j // size < C and cells[row, j // size], row = #{edges <= p}.

    Args:
        edges: (R - 1,) int64 on the CPU, rising: the positions at which a new row begins.
        cells: (R, C) bool on the CPU.
        size: number of keys in a column.
    """

    edges: Tensor
    cells: Tensor
    size: int

    @property
    def reach(self) -> int:
        """Returns one past the last key that has a column."""
        return self.cells.shape[1] * self.size

    def rows(self, positions_q: Tensor) -> Tensor:
        """Returns the row of `cells` for each query: int64, never falling with the position."""
        return torch.searchsorted(self.edges.to(positions_q.device), positions_q.contiguous(), right=True)

    def sees(self, positions_q: Tensor, positions_k: Tensor) -> Tensor:
        """Returns the relation elementwise: bool (rows, keys), True where the key is seen."""
        cells = self.cells.to(positions_q.device)
        inside = (positions_k >= 0) & (positions_k < self.reach)
        columns = (positions_k // self.size).clamp(0, cells.shape[1] - 1)
        return cells[self.rows(positions_q)[:, None], columns] & inside

    def sees_any(self, positions_q: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        """Returns for each query whether it sees any of its keys [lo, hi), lo >= 0.

        Args:
            positions_q: (rows,) positions of the queries.
            lo: (batch, rows), first key.
            hi: (batch, rows), one past the last key; hi <= lo is an empty range.

        Returns:
            bool (batch, rows).
        """
        row = self.rows(positions_q)
        columns = self.cells.shape[1]
        begin = (lo // self.size).clamp(max=columns)
        end = torch.maximum(-(-hi // self.size), begin).clamp(max=columns).where(hi > lo, begin)
        least_row, least_column = int(row.min()), int(begin.min())  # only the rows and columns in use are summed
        part = self.cells[least_row : int(row.max()) + 1, least_column : int(end.max())].to(lo.device)
        sums = _sums(part, 1)
        row, begin, end = row - least_row, begin - least_column, end - least_column
        return sums[row, end] > sums[row, begin]

    def over(self, first_rows: Tensor, last_rows: Tensor, starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
        """Returns whether any row of a set sees any key of a set, and whether all rows see all keys.

        Args:
            first_rows: (n,) first row of `cells` in each set of rows.
            last_rows: (n,) last row in each set, included.
            starts: (m,) first key in each set of keys, from 0 on.
            stops: (m,) one past the last key in each set, greater than its start.

        Returns:
            any and all, bool (n, m).
        """
        columns = self.cells.shape[1]
        begin, end = (starts // self.size).clamp(max=columns), (-(-stops // self.size)).clamp(max=columns)
        least = int(begin.min())
        along_keys = _sums(self.cells[:, least : int(end.max())], 1)
        sums = _sums(along_keys[:, end - least] - along_keys[:, begin - least], 0)
        seen = sums[last_rows + 1] - sums[first_rows]
        cells = (last_rows + 1 - first_rows)[:, None] * (end - begin)
        return seen > 0, (seen == cells) & (stops <= self.reach)

    @cached_property
    def hull(self) -> tuple[Tensor, Tensor]:
        """Returns the first visible key of each row and one past its last: int64 lo and hi (R,), 0 if it has none."""
        live = self.cells.any(1)
        cells = self.cells.view(torch.uint8)
        lo = cells.argmax(1) * self.size
        hi = self.reach - cells.flip(1).argmax(1) * self.size
        return lo.where(live, 0), hi.where(live, 0)

    def __and__(self, other: Bitmap) -> Bitmap:
        """Returns the intersection: a row for each overlap of two rows, and columns of a size that divides both."""
        edges = torch.cat([self.edges, other.edges]).unique()
        size = math.gcd(self.size, other.size)
        starts = torch.arange(0, min(self.reach, other.reach), size, device="cpu")
        queries = torch.cat([edges[:1] - 1, edges])  # one query of each row
        return Bitmap(edges, self.sees(queries, starts) & other.sees(queries, starts), size)


def _sums(x: Tensor, dim: int) -> Tensor:
    """Returns the sums of all elements before each index along `dim`, which is one longer than in `x`."""
    shape = list(x.shape)
    shape[dim] += 1
    sums = x.new_zeros(shape, dtype=torch.int64 if dim == 0 else torch.int32)
    torch.cumsum(x, dim, dtype=sums.dtype, out=sums.narrow(dim, 1, x.shape[dim]))
    return sums
