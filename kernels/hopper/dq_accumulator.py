"""dQ while it is summed on sm_90: float32, in the order in which a warpgroup has the tiles that it adds.

After a matmul each thread has numbers of two rows, two at a time. Written as rows, those of neighbouring rows go to the
same banks of shared memory, and half of the writes wait for the other half. Here a thread's four numbers lie side by
side, and then the next thread's: it writes 16 bytes at a time and waits for nobody, and what the copy engine adds is
consecutive in memory. In the end another kernel puts the sum into rows.

The sum is (batch, nheads, rows, columns), padded to whole tiles: rows to 128 a sequence, columns to 64 or 128. A tile
of queries is two halves of 64 by 64, one after the other: its columns with heads of more than 64, else its rows.

Where every run is to give the same bits, or sequences are short, programs add to a tile in the order of their tiles of
keys. Each tile has a counter: whose turn it is, plus one. A program waits for its own, adds, waits until that is in
memory, and passes the turn on; the last leaves 1 for the next launch. At 0 nobody has come yet, and memory holds
anything: the first stores in place of adding. Tiles of keys are drawn in that order too, so that whose turn it is runs
or has run, however few programs the GPU runs at a time. And all visit queries from the last to the first: who began
with the next tile of keys follows at the heels, and waits for no more than what an addition takes.
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ringflash.kernels.hopper.config import dq_sum_shape
from ringflash.kernels.hopper.pipeline import release, wait_full
from ringflash.kernels.hopper.versions import copy_from_shared, reduce_add
from ringflash.kernels.triton.config import FUSED
from ringflash.kernels.triton.dq_accumulator import DqSum

HALF = (16, 256)  # of a tile, as the copy engine takes it
TILE = 2 * HALF[0] * HALF[1]


@gluon.jit
def arranged(x):
    """A half, (64, 64) as a matmul of four warps leaves it, in the order of memory."""
    x = x.reshape([4, 2, 8, 8, 4, 2])  # warp, one of two rows, eight threads; group of columns, four threads, two
    return x.permute((0, 3, 2, 4, 1, 5)).reshape([16, 256])


class SemaphoreOrder(NamedTuple):
    """Whose turn it is to add to each tile of dq; `Intervals.turns`, its stride, and how many tiles keys have."""

    counters: Any
    table: Any
    stride: Any
    ntiles: Any


@gluon.jit
def _turn_of(turns, place, n):
    """What the `n`-th tile's counter is when the tile of keys at `place` may add to that, and what it is to be then."""
    of_sequence = turns.table + place.batch * turns.stride
    entry = of_sequence + turns.ntiles + n * 2
    turn = gl.load(of_sequence + place.tile) - gl.load(entry) + 1
    return turn, gl.where(turn == gl.load(entry + 1), 1, turn + 1)


@gluon.jit
def _await_turn(counter, turn):
    """Holds a warp until those before it have added theirs; 0 if there was nobody, in this launch or one before."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred early; .reg .b32 now; again: ld.relaxed.gpu.global.b32 $0, [$1]; max.s32 now, $0, 1; "
        "setp.ne.s32 early, now, $2; @early bra again; fence.acq_rel.gpu; fence.proxy.async.global; }",
        "=&r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_turn(counter, following):
    """Tells the next one, when all that this warp has added is in memory; one of its threads began the additions."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 lane; cp.async.bulk.wait_group 0; fence.proxy.async.global; "
        "bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0; "
        "@one st.release.gpu.global.b32 [$1], $2; mov.b32 $0, lane; }",
        "=r,l,r", [counter, following], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_tile(view, tile, turns, place, n, ring, use, ORDERED: gl.constexpr):
    """One warp's: adds uses `use` and `use + 1` of a ring, which are two halves, to a tile of the sum and leaves them.

    With `ORDERED` when it is the turn of the tile of keys at `place`; the tile is the `n`-th of queries of its head.
    """
    ROWS: gl.constexpr = view.block_type.shape[0]
    before = 1  # 0 if there is nothing yet to add to
    if ORDERED:
        turn, following = _turn_of(turns, place, n)
        before = _await_turn(turns.counters + tile, turn)
    for c in gl.static_range(2):
        wait_full(ring, use + c)
        at = [(tile * 2 + c) * ROWS, 0]
        if before:
            reduce_add(view, at, ring.buffers.index(c))
        else:
            copy_from_shared(view, at, ring.buffers.index(c))
    tma.store_wait(0)
    for c in gl.static_range(2):
        release(ring, use + c)
    if ORDERED:
        _pass_turn(turns.counters + tile, following)


class DqAccumulator(DqSum):
    """A sum of arranged tiles of `hops`, which `finish` multiplies by `scale`, and of rows that other kernels add.

    Where there are `counters` tiles are added in the order of their keys, and these tell whose turn it is at each.
    """

    def __init__(self, q: Tensor, *, hops: int, ordered: bool) -> None:
        super().__init__(q, torch.float32, ordered=ordered)
        self.hops = hops
        self.counters: Tensor | None = None
        self._arranged: Tensor | None = None
        self._scale = 1.0

    def tiles(self, scale: float, *, in_turns: bool) -> Tensor:
        """What to add tiles to: zeros at first, unless there are `counters`. `finish` multiplies it by `scale`.

        These there are `in_turns`, and always when `ordered`; the first hop decides for all.
        """
        total = self._arranged
        if total is None:
            in_turns |= self.ordered
            new = self.q.new_empty if in_turns else self.q.new_zeros
            total = new(dq_sum_shape(self.q), dtype=torch.float32)
            self._arranged, self._scale = total, scale
            self.counters = total.new_zeros(total.numel() // TILE, dtype=torch.int32) if in_turns else None
        assert scale == self._scale
        return total

    def finish(self) -> Tensor:
        """See `DqSum.finish`."""
        total, counters = self._arranged, self.counters
        self._arranged = self.counters = None
        if total is None:
            return super().finish()
        if self._rows is None:
            return self._in_rows(total, counters, self.q.dtype)
        self._rows += self._in_rows(total, counters, torch.float32)
        return super().finish()

    def _in_rows(self, total: Tensor, counters: Tensor | None, dtype: torch.dtype) -> Tensor:
        dq = self.q.new_empty(self.q.shape, dtype=dtype)
        batch, seqlen, nheads, headdim = dq.shape
        rows, columns = total.shape[2:]
        ntiles = rows * columns // TILE
        _finish_kernel[(ntiles * batch * nheads,)](
            total, counters, dq, self._scale, ntiles, seqlen, nheads, HEADDIM=headdim, BLOCK_D=columns, **FUSED
        )
        return dq


@triton.jit(do_not_specialize=["ntiles", "seqlen", "nheads"])
def _finish_kernel(total, counters, dq, scale, ntiles, seqlen, nheads, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program writes a tile of queries of one head: zeros where turns were taken, but by nobody."""
    SIZE: tl.constexpr = 64 * 64
    BLOCK_M: tl.constexpr = 2 * SIZE // BLOCK_D
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // ntiles, program % ntiles * BLOCK_M
    came = True
    if counters is not None:
        came = tl.load(counters + program) != 0
    target = dq + (head // nheads * seqlen * nheads + head % nheads) * HEADDIM
    for half in tl.static_range(2):
        x = tl.load(total + (program * 2 + half) * SIZE + tl.arange(0, SIZE), mask=came, other=0.0) * scale
        x = tl.permute(x.reshape([4, 8, 8, 4, 2, 2]), (0, 4, 2, 1, 3, 5)).reshape([64, 64])  # undoes `arranged`
        row, column = begin, half * 64
        if BLOCK_D == 64:
            row, column = begin + half * 64, 0
        rows, columns = row + tl.arange(0, 64), column + tl.arange(0, 64)
        inside = (rows < seqlen)[:, None] & (columns < HEADDIM)[None, :]
        pointers = target + rows[:, None] * nheads * HEADDIM + columns[None, :]
        tl.store(pointers, x.to(dq.dtype.element_ty), mask=inside)
