"""What the portable kernels know of a mask: nothing, the causal rule, or a table of bounds.

FULL and CAUSAL are worked out from positions. Any other mask is two int32 vectors, lo and hi (batch or 1, seqlen_q), in
global positions, and for the dK/dV kernel, whose keys stay while queries stream, the rows that each tile of keys meets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ringflash.layout import Chunk, positions
from ringflash.masks import Causal, Full, Mask

FULL, CAUSAL, TABLE = 0, 1, 2
LAST_KEY = 2**31 - 1  # positions are int32 in the kernels


@dataclass(frozen=True)
class RowBounds:
    """How a kernel is told which keys its rows see.

    Args:
        kind: FULL, CAUSAL or TABLE.
        lo: first key a row sees, contiguous; with FULL and CAUSAL not read.
        hi: one past the last.
        batch_stride: elements from one sequence's bounds to the next's, 0 when they are all alike.
    """

    kind: int
    lo: Tensor
    hi: Tensor
    batch_stride: int


@lru_cache(maxsize=128)
def row_bounds(mask: Mask, q_chunks: Sequence[Chunk], device: torch.device) -> RowBounds:
    """The bounds of the rows that `q_chunks` store."""
    if isinstance(mask, Full | Causal):
        unread = torch.zeros(1, dtype=torch.int32, device=device)
        return RowBounds(FULL if isinstance(mask, Full) else CAUSAL, unread, unread, 0)
    lo, hi = torch.broadcast_tensors(*mask.bounds(positions(q_chunks, "cpu"), LAST_KEY))
    lo, hi = (x.to(torch.int32).contiguous().to(device) for x in (lo, hi))
    return RowBounds(TABLE, lo, hi, 0 if lo.shape[0] == 1 else lo.shape[1])


@lru_cache(maxsize=1024)
def rows_met(
    mask: Mask, q_chunks: Sequence[Chunk], k_chunks: Sequence[Chunk], block_n: int, device: torch.device
) -> Tensor:
    """For each tile of keys and chunk of queries the rows that see some of it, and among them those that see all of it.

    Returns int32 (batch or 1, tiles, nq_chunks, 4): begin, full_begin, full_end, end, counted from the chunk's first
    row. They are consecutive because neither bound of a row ever falls.
    """
    tiles = [(c.start + n, c.start + min(n + block_n, c.length)) for c in k_chunks for n in range(0, c.length, block_n)]
    first, last = torch.tensor(tiles, device="cpu").unbind(1)
    columns = []
    for chunk in q_chunks:
        lo, hi = torch.broadcast_tensors(*mask.bounds(positions([chunk], "cpu"), LAST_KEY))
        lo, hi = lo.contiguous(), hi.contiguous()
        starts, stops = (x.expand(lo.shape[0], -1).contiguous() for x in (first, last))
        begin = torch.searchsorted(hi, starts, right=True)  # hi > first
        end = torch.searchsorted(lo, stops)  # lo < last
        full_begin = torch.searchsorted(hi, stops)  # hi >= last
        full_end = torch.searchsorted(lo, starts, right=True)  # lo <= first
        end = torch.maximum(begin, end)
        full_begin = full_begin.clamp(begin, end)
        full_end = torch.maximum(full_begin, full_end.clamp(begin, end))
        columns.append(torch.stack([begin, full_begin, full_end, end], dim=-1))
    return torch.stack(columns, dim=2).to(torch.int32).contiguous().to(device)
