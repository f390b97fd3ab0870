"""Exact counts of the visible (query, key) pairs of a mask, without a loop over pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.masks.bitmap import Bitmap

if TYPE_CHECKING:
    from ringflash.masks.base import Mask


@lru_cache(maxsize=1)
def area_of(mask: Mask, seqlen: int) -> PairCounts:
    """Returns the pair counts of a whole sequence; only the last is cached, as it holds numbers for every query."""
    return mask.area(seqlen, seqlen)


class PairCounts:
    """Visible pairs of consecutive queries with the keys of a sequence, summed over a batch.

    Neither bound of an interval mask ever falls, so sum_i min(hi_i, y) is a prefix sum of hi and a product. The pairs
    of a chunk with the keys before y thus take one search. Under a bitmap they take one search a row of the bitmap.

    Args:
        lo: (batch or 1, rows) int64 on the CPU: first key that each query sees.
        hi: one past the last key that each query sees; hi <= lo means none.
        first: global position of the first query.
        bitmap: selects keys within the intervals; None selects all.
    """

    def __init__(self, lo: Tensor, hi: Tensor, first: int, bitmap: Bitmap | None) -> None:
        self._hi, self._first, self._bitmap = hi, first, bitmap
        self._lo = torch.minimum(lo, hi)
        self.batch = lo.shape[0]

    @property
    def row_pairs(self) -> Tensor:
        """Returns the number of keys that each query sees: int64 (rows,)."""
        if self._bitmap is None:
            return (self._hi - self._lo).sum(0)
        return torch.stack([runs.row_pairs for runs in self._runs]).sum(0)

    @property
    def components(self) -> Tensor:
        """Returns the edges of the parts of the sequence that see nothing of each other: int64, from 0 to its length.

        The counts must cover all queries of the sequence, at the same positions as the keys.
        """
        rows = self._hi.shape[1]
        live = self._hi > self._lo
        furthest = self._hi.where(live, 0).amax(0).cummax(0).values
        earliest = self._lo.where(live, rows).amin(0).flip(0).cummin(0).values.flip(0)
        inner = torch.arange(1, rows, device="cpu")
        cuts = inner[(furthest[:-1] <= inner) & (earliest[1:] >= inner)]
        return torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), rows)])

    def seen(self, queries: Sequence[tuple[int, int]], edges: Tensor) -> Tensor:
        """Returns the visible pairs of the queries of several ranges with the keys between neighbouring edges.

        Args:
            queries: ranges [start, stop) of global positions, without overlap.
            edges: (n + 1,) int64, rising.

        Returns:
            int64 (n,).
        """
        if self._bitmap is None:
            return self._seen(queries, edges, self._searched(edges))
        starts, stops = self._spans(queries)
        return torch.stack([runs.below(starts, stops, edges) for runs in self._runs]).sum(0).diff()

    def reach(self, queries: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns ranges of keys, rising and disjoint, that contain every key visible to `queries`.

        For each range of queries [start, stop) and each sequence of the batch, they hold the keys from the first to the
        last visible one. Overlapping and adjoining ranges are joined.
        """
        spans = [(start - self._first, stop - self._first) for start, stop in queries]
        if self._bitmap is None:  # bounds never fall
            starts, stops = (torch.tensor(x, device="cpu") for x in zip(*spans, strict=True))
            firsts, lasts = self._lo[:, starts], self._hi[:, stops - 1]
        else:
            firsts = torch.stack([self._lo[:, start:stop].amin(1) for start, stop in spans])
            lasts = torch.stack([self._hi[:, start:stop].amax(1) for start, stop in spans])
        ranges: list[tuple[int, int]] = []
        for begin, end in sorted(zip(firsts.flatten().tolist(), lasts.flatten().tolist(), strict=True)):
            if begin < end and ranges and begin <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(ranges[-1][1], end)
            elif begin < end:
                ranges.append((begin, end))
        return ranges

    def between(self, cut: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """Returns the visible pairs of each rank's queries with each rank's keys: int64 (ranks, ranks).

        Args:
            cut: the ranges of positions of each rank; together they cover the whole sequence.
        """
        pieces = sorted((start, stop, rank) for rank, ranges in enumerate(cut) for start, stop in ranges)
        edges = torch.tensor([0, *(stop for _, stop, _ in pieces)], device="cpu")
        owners = torch.tensor([rank for _, _, rank in pieces], device="cpu")
        searched = self._searched(edges) if self._bitmap is None else []
        pairs = torch.zeros(len(cut), len(cut), dtype=torch.int64, device="cpu")
        for row, ranges in zip(pairs, cut, strict=True):
            if ranges:
                seen = self._seen(ranges, edges, searched) if searched else self.seen(ranges, edges)
                row.index_add_(0, owners, seen)
        return pairs

    def _spans(self, queries: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Returns the first rows of the ranges and one past their last rows: int64, rising."""
        starts, stops = (torch.tensor(x, device="cpu") - self._first for x in zip(*sorted(queries), strict=True))
        return starts, stops

    def _searched(self, edges: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Returns, for hi and lo of each sequence, the sign, prefix sums, and the number of rows below each edge."""
        signed = (1, self._hi, self._hi_sums), (-1, self._lo, self._lo_sums)
        return [
            (sign, prefix, torch.searchsorted(values.contiguous(), edges))
            for sign, bound, sums in signed
            for values, prefix in zip(bound, sums, strict=True)
        ]

    def _seen(
        self, queries: Sequence[tuple[int, int]], edges: Tensor, searched: Sequence[tuple[int, Tensor, Tensor]]
    ) -> Tensor:
        """Computes `seen` without a bitmap, from the sums over all rows of min(hi, edge) and of min(lo, edge).

        Whole ranges below an edge are summed beforehand, so that an edge takes one more search.
        """
        starts, stops = self._spans(queries)
        ends = (stops - starts).cumsum(0)
        begins = ends - (stops - starts)
        last = len(starts) - 1
        total = torch.zeros_like(edges)
        for sign, prefix, short in searched:
            whole = torch.nn.functional.pad((prefix[stops] - prefix[starts]).cumsum(0), (1, 0))
            index = torch.searchsorted(stops, short, right=True).clamp(max=last)  # the range that `short` lies in
            start = starts[index]
            place = torch.minimum(torch.maximum(short, start), stops[index])
            before = begins[index] + place - start
            total += sign * (whole[index] + prefix[place] - prefix[start] + edges * (ends[-1] - before))
        return total.diff()

    @cached_property
    def _hi_sums(self) -> Tensor:
        return torch.nn.functional.pad(self._hi.cumsum(1), (1, 0))

    @cached_property
    def _lo_sums(self) -> Tensor:
        return torch.nn.functional.pad(self._lo.cumsum(1), (1, 0))

    @cached_property
    def _runs(self) -> list[_Runs]:
        """Returns for each sequence of the batch its runs of queries that see the same keys."""
        assert self._bitmap is not None
        positions = torch.arange(self._first, self._first + self._hi.shape[1], device="cpu")
        bit_rows = self._bitmap.rows(positions)
        shown = _Shown(self._bitmap)
        return [_Runs(bit_rows, lo, hi, shown) for lo, hi in zip(self._lo, self._hi, strict=True)]


class _Shown:
    """Prefix counts of the keys that each row of a bitmap shows."""

    def __init__(self, bitmap: Bitmap) -> None:
        self._bitmap = bitmap
        self._sums = torch.nn.functional.pad(bitmap.cells.cumsum(1, dtype=torch.int32), (1, 0))

    def before(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Returns the number of keys before positions `keys` that `rows` show: int64; both arguments broadcast."""
        size, columns = self._bitmap.size, self._bitmap.cells.shape[1]
        keys = keys.clamp(0, self._bitmap.reach)
        column, rest = keys // size, keys % size  # rest is 0 past the last column
        return self._sums[rows, column].long() * size + rest * self._bitmap.cells[rows, column.clamp(max=columns - 1)]


class _Runs:
    """Runs of consecutive queries that see the same keys under a bitmap."""

    def __init__(self, bit_rows: Tensor, lo: Tensor, hi: Tensor, shown: _Shown) -> None:
        changed = (bit_rows.diff() != 0) | (lo.diff() != 0) | (hi.diff() != 0)
        self._begins = torch.cat([changed.new_ones(1), changed]).nonzero()[:, 0]
        ends = torch.cat([self._begins[1:], self._begins.new_full((1,), len(bit_rows))])
        self._lengths = ends - self._begins
        self._rows, self._shown = bit_rows[self._begins], shown
        self._bounds = [bound[self._begins] for bound in (hi, lo)]

    @property
    def row_pairs(self) -> Tensor:
        """Returns the number of keys that each query sees: int64 (queries,)."""
        hi, lo = (self._shown.before(self._rows, bound) for bound in self._bounds)
        return (hi - lo).repeat_interleave(self._lengths)

    def below(self, starts: Tensor, stops: Tensor, edges: Tensor) -> Tensor:
        """Returns the pairs of the queries in ranges [starts, stops) with keys before each edge: int64 like `edges`."""
        weights = self._rows_in(starts, stops)
        there = weights.nonzero()[:, 0]
        rows, weights = self._rows[there], weights[there]
        hi, lo = (self._clipped(rows, bound[there], weights, edges) for bound in self._bounds)
        return hi - lo

    def _rows_in(self, starts: Tensor, stops: Tensor) -> Tensor:
        """Returns the number of queries of each run that lie in the ranges: int64 (runs,)."""
        total = torch.zeros_like(self._lengths)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            upto = torch.minimum((stop - self._begins).clamp(min=0), self._lengths)
            total += upto - torch.minimum((start - self._begins).clamp(min=0), self._lengths)
        return total

    def _clipped(self, rows: Tensor, bound: Tensor, weights: Tensor, edges: Tensor) -> Tensor:
        """Returns sum_i weights_i * (number of keys before min(bound_i, edge) that row_i shows), for each edge.

        The sum takes one search a row of the bitmap.
        """
        distinct, number = rows.unique(return_inverse=True)
        width = int(bound.max()) + int(edges[-1]) + 1 if len(bound) else 1
        keys, order = (number * width + bound).sort()
        weights = weights[order]
        counted = weights * self._shown.before(rows[order], bound[order])
        counted, weights = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (counted, weights))
        base = torch.arange(len(distinct), device="cpu")[:, None] * width
        first, place, last = (torch.searchsorted(keys, x) for x in (base, base + edges, base + width))
        shorter = counted[place] - counted[first]
        longer = (weights[last] - weights[place]) * self._shown.before(distinct[:, None], edges)
        return (shorter + longer).sum(0)
