"""dQ while it is summed on sm_90: float32, in the order in which a warpgroup has the tiles that it adds.

After a matmul each thread has numbers of two rows, two at a time. Written as rows, those of neighbouring rows go to the
same banks of shared memory, and half of the writes wait for the other half. Here a thread's four numbers lie side by
side, and then the next thread's: it writes 16 bytes at a time and waits for nobody, and what the copy engine adds is
consecutive in memory. In the end another kernel puts the sum into rows.

The sum is (batch, nheads, rows, columns), padded to whole tiles: rows to 128 a sequence, columns to 64 or 128. A tile
of queries is two halves of 64 by 64, one after the other: its columns with heads of more than 64, else its rows.
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from ringflash.kernels.dq_sum import DqSum
from ringflash.kernels.hopper.config import dq_sum_shape

HALF = (16, 256)  # of a tile, as the copy engine takes it


@gluon.jit
def arranged(x):
    """A half, (64, 64) as a matmul of four warps leaves it, in the order of memory."""
    x = x.reshape([4, 2, 8, 8, 4, 2])  # warp, one of two rows, eight threads; group of columns, four threads, two
    return x.permute((0, 3, 2, 4, 1, 5)).reshape([16, 256])


class ArrangedSum(DqSum):
    """A sum of arranged tiles, which `finish` multiplies by `scale`, and of rows that other kernels add."""

    def __init__(self, q: Tensor) -> None:
        super().__init__(q, torch.float32)
        self._arranged: Tensor | None = None
        self._scale = 1.0

    def tiles(self, scale: float) -> Tensor:
        """What to add tiles to: zeros at first. In the end their sum is multiplied by `scale`, always the same."""
        total = self._arranged
        if total is None:
            total = self.q.new_zeros(dq_sum_shape(self.q), dtype=torch.float32)
            self._arranged, self._scale = total, scale
        assert scale == self._scale
        return total

    def finish(self) -> Tensor:
        """See `DqSum.finish`."""
        total, self._arranged = self._arranged, None
        if total is None:
            return super().finish()
        if self._rows is None:
            return self._in_rows(total, self.q.dtype)
        self._rows += self._in_rows(total, torch.float32)
        return super().finish()

    def _in_rows(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        dq = self.q.new_empty(self.q.shape, dtype=dtype)
        batch, seqlen, nheads, headdim = dq.shape
        rows, columns = total.shape[2:]
        ntiles = rows * columns // (2 * HALF[0] * HALF[1])
        _finish_kernel[(ntiles * batch * nheads,)](
            total, dq, self._scale, ntiles, seqlen, nheads, HEADDIM=headdim, BLOCK_D=columns
        )
        return dq


@triton.jit(do_not_specialize=["ntiles", "seqlen", "nheads"])
def _finish_kernel(total, dq, scale, ntiles, seqlen, nheads, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program writes a tile of queries of one head."""
    SIZE: tl.constexpr = 64 * 64
    BLOCK_M: tl.constexpr = 2 * SIZE // BLOCK_D
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // ntiles, program % ntiles * BLOCK_M
    target = dq + (head // nheads * seqlen * nheads + head % nheads) * HEADDIM
    for half in tl.static_range(2):
        x = tl.load(total + (program * 2 + half) * SIZE + tl.arange(0, SIZE)) * scale
        x = tl.permute(x.reshape([4, 8, 8, 4, 2, 2]), (0, 4, 2, 1, 3, 5)).reshape([64, 64])  # undoes `arranged`
        row, column = begin, half * 64
        if BLOCK_D == 64:
            row, column = begin + half * 64, 0
        rows, columns = row + tl.arange(0, 64), column + tl.arange(0, 64)
        inside = (rows < seqlen)[:, None] & (columns < HEADDIM)[None, :]
        pointers = target + rows[:, None] * nheads * HEADDIM + columns[None, :]
        tl.store(pointers, x.to(dq.dtype.element_ty), mask=inside)
