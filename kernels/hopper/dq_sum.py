"""dQ while it is summed on sm_90: float32, in the order in which a warpgroup has the tiles that it adds.

After a matmul each thread has numbers of two rows, two at a time. Written as rows, those of neighbouring rows go to the
same banks of shared memory, and half of the writes wait for the other half. Here a thread's four numbers lie side by
side, and then the next thread's: it writes 16 bytes at a time and waits for nobody, and what the copy engine adds is
consecutive in memory. In the end another kernel puts the sum into rows.

The sum is (batch, nheads, tokens, columns), of whole tiles of queries. Each tile is two halves of 64 by 64: the columns
of one are followed by those of the other, or with heads of 64 the rows.
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from ringflash.kernels.dq_sum import DqSum
from ringflash.kernels.hopper.config import KEYS, backward_config
from ringflash.kernels.tiles import Strided, strided

HALF = (16, 256)  # of a tile, as the copy engine takes it


@gluon.jit
def arranged(x):
    """A half, (64, 64) as a matmul of four warps leaves it, in the order of memory."""
    x = x.reshape([4, 2, 8, 8, 4, 2])  # warp, one of two rows, eight threads; group of columns, four threads, two
    return x.permute((0, 3, 2, 4, 1, 5)).reshape([16, 256])


class ArrangedSum(DqSum):
    """Of tiles that are arranged so, times `scale`, and of rows where other kernels had to add."""

    def __init__(self, q: Tensor) -> None:
        super().__init__(q, torch.float32)
        self._arranged: Tensor | None = None
        self._scale = 1.0

    def tiles(self, scale: float) -> Tensor:
        """What to add tiles to: zeros at first. In the end the sum is multiplied by `scale`, always the same."""
        total = self._arranged
        if total is None:
            batch, seqlen, nheads, headdim = self._q.shape
            tokens = triton.cdiv(seqlen, KEYS) * KEYS
            columns = backward_config(headdim, with_dq=True).block_d
            total = self._q.new_zeros((batch, nheads, tokens, columns), dtype=torch.float32)
            self._arranged, self._scale = total, scale
        assert scale == self._scale
        return total

    def finish(self) -> Tensor:
        """The sum, as q; zeros where nothing was added."""
        if self._arranged is None:
            return super().finish()
        if self._rows is None:
            return self._in_rows(self._arranged, self._q.dtype)
        return self._rows.add_(self._in_rows(self._arranged, torch.float32)).to(self._q.dtype)

    def _in_rows(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        dq = torch.empty(self._q.shape, dtype=dtype, device=self._q.device)
        batch, seqlen, nheads, headdim = dq.shape
        tokens, columns = total.shape[2:]
        block_m = backward_config(headdim, with_dq=True).block_m
        _finish_kernel[(tokens // block_m, batch * nheads)](
            total, strided(dq), self._scale, seqlen, tokens, nheads,
            HEADDIM=headdim, BLOCK_D=columns, BLOCK_M=block_m,
        )  # fmt: skip
        return dq


@triton.jit(do_not_specialize=["seqlen", "tokens", "nheads"])
def _finish_kernel(
    total,
    dq: Strided,
    scale,
    seqlen,
    tokens,
    nheads,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    begin = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    tile = total + (head * tokens + begin) * BLOCK_D
    target = dq.base + head // nheads * dq.batch + head % nheads * dq.head
    for half in tl.static_range(2):
        x = tl.load(tile + half * 4096 + tl.arange(0, 4096)) * scale
        x = tl.permute(x.reshape([4, 8, 8, 4, 2, 2]), (0, 4, 2, 1, 3, 5)).reshape([64, 64])
        row, column = begin, half * 64
        if BLOCK_D == 64:
            row, column = begin + half * 64, 0
        rows, columns = row + tl.arange(0, 64), column + tl.arange(0, 64)
        inside = (rows < seqlen)[:, None] & (columns < HEADDIM)[None, :]
        pointers = target + rows.to(tl.int64)[:, None] * dq.row + columns[None, :]
        tl.store(pointers, x.to(target.dtype.element_ty), mask=inside)
