"""Blocks of rows for the eager kernels, the pairs of blocks to process, and the mask inside a pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ringflash.kernels.eager.isolation import is_finite, isolated_matmul
from ringflash.kernels.mask_tables import TileBounds, row_intervals
from ringflash.layouts.layout import Chunk
from ringflash.masks import Bitmap, Mask

BLOCK_Q = 256
BLOCK_K = 1024
SHARED_ROWS = 16  # most rows of a block with several chunks: in larger ones masked pairs cost more than calls


@dataclass(frozen=True)
class Block:
    """Rows `[begin, end)` of storage; `runs` are their global positions, which ascend from `start` to `stop - 1`."""

    begin: int
    end: int
    start: int
    stop: int
    runs: tuple[Chunk, ...]

    @classmethod
    def of(cls, begin: int, runs: tuple[Chunk, ...]) -> Block:
        """Returns the block of rows that are stored from row `begin` on and have the positions `runs`."""
        first, last = runs[0], runs[-1]
        return cls(begin, begin + sum(run.length for run in runs), first.start, last.start + last.length, runs)

    def positions(self, device: torch.device) -> Tensor:
        """Returns the global positions of the rows."""
        if len(self.runs) == 1:
            return torch.arange(self.start, self.stop, device=device)
        return torch.cat([torch.arange(run.start, run.start + run.length, device=device) for run in self.runs])

    def within(self, start: int, stop: int) -> Block | None:
        """Returns the rows with positions `[start, stop)`, or None if there are none."""
        if start <= self.start and self.stop <= stop:
            return self
        cuts = [(max(run.start, start), min(run.start + run.length, stop)) for run in self.runs]
        runs = tuple(Chunk(first, end - first) for first, end in cuts if first < end)
        if not runs:
            return None
        before = sum(min(max(start - run.start, 0), run.length) for run in self.runs)
        return Block.of(self.begin + before, runs)


@lru_cache(maxsize=256)
def blocks(chunks: tuple[Chunk, ...], size: int) -> tuple[Block, ...]:
    """Returns blocks of at most `size` rows of chunks that are stored one after another.

    Short chunks share a block where their positions ascend, because each pair of blocks costs the same operators.
    """
    found, begin = list[Block](), 0
    for chunk in chunks:
        for offset in range(0, chunk.length, size):
            piece = Chunk(chunk.start + offset, min(size, chunk.length - offset))
            last = found[-1] if found else None
            if last and begin + piece.length - last.begin <= min(size, SHARED_ROWS) and last.stop <= piece.start:
                found[-1] = Block.of(last.begin, (*last.runs, piece))
            else:
                found.append(Block.of(begin, (piece,)))
            begin += piece.length
    return tuple(found)


# The next precision (float64 stays), in which these kernels also compute: only results are rounded.
STATE_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32} | dict.fromkeys(
    (torch.float32, torch.float64), torch.float64
)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the state and of unfinished gradients."""
    return STATE_DTYPES[dtype]


def rows_of(x: Tensor, block: Block) -> Tensor:
    """Returns the rows of a block: (batch, heads, rows, headdim), contiguous and in `state_dtype`.

    The order of a matmul's sums, and so its last bits, may depend on strides.
    """
    rows = x[:, block.begin : block.end].transpose(1, 2)
    # `to` does not copy a tensor of that dtype
    return rows.to(STATE_DTYPES[x.dtype], memory_format=torch.contiguous_format).contiguous()


class Visibility:
    """Keys that the rows of one block of queries see."""

    def __init__(self, mask: Mask, q_chunks: tuple[Chunk, ...], block: Block, group: int, device: torch.device) -> None:
        rows = row_intervals(mask, q_chunks)
        lo, hi, live = (x[:, block.begin : block.end] for x in (rows.lo, rows.hi, rows.live))
        seen = TileBounds.of(lo, hi, live, np.zeros(1, np.int64))
        self._lo_min, self._lo_max = int(seen.some_lo.min()), int(seen.all_lo.max())
        self._hi_min, self._hi_max = int(seen.all_hi.min()), int(seen.some_hi.max())
        self._bounds = lo, hi = tuple(torch.from_numpy(x).to(device, torch.int64) for x in (lo, hi))
        self._lo, self._hi = (x.repeat(1, group)[:, None, :, None] for x in (lo, hi))
        self._bitmap, self._positions, self._group = mask.bitmap(), block.positions(device), group
        # The hull of the keys that the rows of each sequence see; storage outside may hold anything.
        hull = (torch.from_numpy(x).to(device)[:, None, None] for x in (seen.some_lo, seen.some_hi))
        self._first, self._last = hull
        self.rows = self._rows_in_hull if len(lo) > 1 else rows_of
        self._kept: dict[tuple[Chunk, ...], list[tuple[Block, bool]]] = {}

    def of(self, keys: Block) -> Block | None:
        """Returns the keys of a block that any row may see, or None if there are none; other keys are never read."""
        seen = keys.within(self._lo_min, self._hi_max)
        if seen is None:
            return None
        return seen if self._bitmap is None or self._shown(seen, self._bitmap) else None

    def _shown(self, keys: Block, bitmap: Bitmap) -> bool:
        """Returns whether the bitmap shows any row a key of its interval from the block's first key to its last."""
        lo, hi = self._bounds
        first, last = lo.clamp(min=keys.start), hi.clamp(max=keys.stop)
        return bool(bitmap.sees_any(self._positions, first, last).any())

    def _rows_in_hull(self, x: Tensor, keys: Block) -> Tensor:
        """Returns `rows_of` a KV-side tensor, with zeros outside the hull of a sequence's seen keys."""
        rows, columns = rows_of(x, keys), keys.positions(x.device)[:, None]
        return rows.masked_fill((columns < self._first) | (columns >= self._last), 0.0)

    def _bounds_cut(self, keys: Block) -> bool:
        """Returns True if the intervals mask a key of the block for some row."""
        return self._lo_max > keys.start or keys.stop > self._hi_min

    def over_keys(self, weights: Tensor, x: Tensor, keys: Block) -> Tensor:
        """Returns weights @ x over a block of keys; masked pairs add nothing, even where `x` is not finite.

        Args:
            weights: (batch, nheads_kv, group * rows, keys), 0 where the key is masked.
            x: (batch, nheads_kv, keys, headdim).
            keys: the block.
        """
        if not self._hides(keys):
            return weights @ x
        return isolated_matmul(weights, x, lambda: self._seen(keys, x.device), finite=is_finite(x))

    def over_rows(self, weights: Tensor, x: Tensor, keys: Block) -> Tensor:
        """Returns weights^T @ x over the rows, likewise; x (batch, nheads_kv, group * rows, headdim)."""
        weights = weights.transpose(-1, -2)
        if not self._hides(keys):
            return weights @ x
        seen = lambda: self._seen(keys, x.device).transpose(-1, -2)  # noqa: E731
        return isolated_matmul(weights, x, seen, finite=is_finite(x))

    def _hides(self, keys: Block) -> bool:
        """Returns True if the block may hold a key that some row does not see."""
        return self._bitmap is not None or self._bounds_cut(keys)

    def _seen(self, keys: Block, device: torch.device) -> Tensor:
        """Returns the mask inside a block: bool (batch or 1, 1, group * rows, keys), True where the key is seen."""
        shape = (*self._lo.shape[:3], keys.end - keys.begin)
        return self.hide(torch.ones(shape, dtype=torch.bool, device=device), keys, False)

    def hide(self, x: Tensor, keys: Block, value: float) -> Tensor:
        """Writes `value` to `x` (batch, nheads_kv, group * rows, keys) where the key is not seen; returns `x`."""
        columns = keys.positions(x.device)
        if self._bounds_cut(keys):
            x.masked_fill_((columns < self._lo) | (columns >= self._hi), value)
        if self._bitmap is not None:
            x.masked_fill_(~self._bitmap.sees(self._positions, columns).repeat(self._group, 1), value)
        return x

    def over(self, chunks: tuple[Chunk, ...]) -> list[tuple[Block, bool]]:
        """Returns blocks of the keys of `chunks` that any row may see, and whether some row does not see all of one."""
        found = self._kept.get(chunks)
        if found is None:
            seen = [keys for block in blocks(chunks, BLOCK_K) if (keys := self.of(block)) is not None]
            found = self._kept[chunks] = [(keys, self._hides(keys)) for keys in seen]
        return found


_kept_visibility = lru_cache(maxsize=64)(Visibility)


def visibility(mask: Mask, q_chunks: tuple[Chunk, ...], block: Block, group: int, device: torch.device) -> Visibility:
    """Returns the visibility of a block of the rows that `q_chunks` store.

    On the CPU it is cached for the next hop or pass. On a GPU other streams would read the cached one too.
    """
    return (_kept_visibility if device.type == "cpu" else Visibility)(mask, q_chunks, block, group, device)
