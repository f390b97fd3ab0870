"""Float32 sum of dQ on sm_90, stored in the register order of the warpgroups that compute its tiles.

After a matmul, each thread holds numbers of two rows, two adjacent numbers at a time. In row order, writes of
neighbouring rows would use the same banks of shared memory, and half of them would wait for the other half. In register
order, four numbers of a thread are adjacent, followed by those of the next thread. So a thread writes 16 bytes at a
time without bank conflicts, and TMA adds to consecutive memory. At the end another kernel converts the sum to rows.

The sum is (batch, nheads, rows, columns), padded to whole tiles: rows to 128 a sequence, columns to 64, 96, 128 or
256. A tile of queries has two or four consecutive pieces of 64 rows (`BackwardConfig.pieces`): parts of its columns if
headdim is above 64, else of its rows. A piece has 64 columns, or at headdim 96 the second one 32.

In deterministic mode, and for short sequences, programs add to a tile in the order of their tiles of keys. Each tile of
dQ has a counter as semaphore. The tiles of keys that add to a tile are ranked, and its counter is the rank that may add
next, plus one. A program waits for its own rank, adds, waits until the addition is in memory, and then advances the
counter. The last program sets it to 1 for the next launch. 0 means that nothing was added yet and that the memory is
uninitialised. The first program then stores instead of adding.

The scheduler also takes tiles of keys in this order. So the tile that may add next is running or done, however few
programs the GPU runs at a time. All programs process queries from the last to the first. The program of the next tile
of keys then follows closely, and waits no longer than one addition takes.
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ringflash.kernels.contract import DqSum
from ringflash.kernels.hopper.columns import count, total_width, width_of
from ringflash.kernels.hopper.config import dq_sum_shape, dq_tile
from ringflash.kernels.hopper.pipeline import full_barrier, release, wait_empty, wait_full
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED
from ringflash.kernels.versions import copy_from_shared, reduce_add
from ringflash.state import contiguous


@gluon.jit
def arranged(x):
    """Returns a piece, (64, columns) in the layout of a four-warp matmul, reordered as memory stores it."""
    COLUMNS: gl.constexpr = x.shape[1]
    # Warp, row of two, thread of eight; column group, thread of four, column of two.
    x = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2])
    return x.permute((0, 3, 2, 4, 1, 5)).reshape([COLUMNS // 4, 256])


@gluon.jit
def in_rows(x, LAYOUT: gl.constexpr):
    """Returns what `arranged` has reordered as (64, 64) in its first layout."""
    x = x.reshape([4, 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([64, 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


class SemaphoreOrder(NamedTuple):
    """Order of the additions to dq: semaphores, `Intervals.turns` with its stride, and the number of tiles of keys."""

    counters: Any
    table: Any
    stride: Any
    ntiles: Any


@gluon.jit
def make_pieces(view, COUNT: gl.constexpr):
    """Allocates buffers for `COUNT` pieces of 64 by 64; `view` is the descriptor of the sum."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, 16, 256], view.layout)


@gluon.jit
def wait_passed(PIECE: gl.constexpr, i, ring, PIECES: gl.constexpr):
    """Waits until the buffer for piece `PIECE` of dq of tile `i` is empty: pieces are alternately in two buffers."""
    use = i * count(PIECES) + PIECE
    wait_empty(ring, use + 2 * count(PIECES) - 2)  # of use - 2, in the same buffer; the ring has two stages a piece


@gluon.jit
def pass_dq(PIECE: gl.constexpr, dq, i, ring, PIECES: gl.constexpr):
    """Writes piece `PIECE` of dq of tile `i` to shared memory, for the warp that adds it to global memory."""
    wait_passed(PIECE, i, ring, PIECES)
    buffer, x = ring.buffers.index(PIECE % 2), arranged(dq)
    if x.shape[0] < buffer.shape[0]:
        buffer = buffer.slice(0, x.shape[0], 0)
    buffer.store(x)
    fence_async_shared()
    mbarrier.arrive(full_barrier(ring, i * count(PIECES) + PIECE), count=1)


@gluon.jit
def _turn_of(turns, place, n):
    """Returns two counter values for tile `n` of queries and the tile of keys `place`.

    The first value allows `place` to add; the second is written after its addition.
    """
    of_sequence = turns.table + place.batch * turns.stride
    entry = of_sequence + turns.ntiles + n * 2
    turn = gl.load(of_sequence + place.tile) - gl.load(entry) + 1
    return turn, gl.where(turn == gl.load(entry + 1), 1, turn + 1)


@gluon.jit
def _await_turn(counter, turn):
    """Waits until the counter allows `turn`, and returns its value: 0 if no launch has added to the tile yet."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred early; .reg .b32 now; again: ld.relaxed.gpu.global.b32 $0, [$1]; max.s32 now, $0, 1; "
        "setp.ne.s32 early, now, $2; @early bra again; fence.acq_rel.gpu; fence.proxy.async.global; }",
        "=&r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_turn(counter, following):
    """Sets the counter to `following` once this warp's additions are in memory.

    One thread of the warp issued these and waits for them. A warp barrier follows before lane 0 writes the counter.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred one; .reg .b32 lane; cp.async.bulk.wait_group 0; fence.proxy.async.global; "
        "bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0; "
        "@one st.release.gpu.global.b32 [$1], $2; mov.b32 $0, lane; }",
        "=r,l,r", [counter, following], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_tile(view, tile, turns, place, n, ring, i, ORDERED: gl.constexpr, PIECES: gl.constexpr):
    """Adds the pieces of tile `i` of dq in `ring` to the sum, and releases them.

    One warp runs this. `tile` counts over the whole sum, `n` over the queries of the tile's head. With `ORDERED` the
    warp first waits until the tile of keys `place` may add. With two pieces, both are added before it waits for
    either. With four, two share a buffer, so that each is released before the next. `view` adds a piece in boxes of
    its own shape.
    """
    ROWS: gl.constexpr = view.block_type.shape[0]
    AT_ONCE: gl.constexpr = 2 if count(PIECES) == 2 else 1
    at_row = tile * (total_width(PIECES) // 4)
    before = 1  # 0 if the tile is not initialised: store instead of adding
    if ORDERED:
        turn, following = _turn_of(turns, place, n)
        before = _await_turn(turns.counters + tile, turn)
    for begin in gl.static_range(0, count(PIECES), AT_ONCE):
        for piece in gl.static_range(begin, begin + AT_ONCE):
            wait_full(ring, i * count(PIECES) + piece)
            for row in gl.static_range(0, width_of(PIECES, piece) // 4, ROWS):
                box = ring.buffers.index(piece % 2)
                if box.shape[0] > ROWS:
                    box = box.slice(row, ROWS, 0)
                at = [at_row + piece * 16 + row, 0]
                if before:
                    reduce_add(view, at, box)
                else:
                    copy_from_shared(view, at, box)
        tma.store_wait(0)
        for piece in gl.static_range(begin, begin + AT_ONCE):
            release(ring, i * count(PIECES) + piece)
    if ORDERED:
        _pass_turn(turns.counters + tile, following)


_finishes = Launches()


class DqAccumulator(DqSum):
    """Sum of dq over `hops`: arranged tiles, which `finish` multiplies by a scale, plus rows that other kernels add.

    If `counters` is a tensor, tiles are added in the order of their keys. Each counter is the semaphore of one tile.
    """

    def __init__(self, q: Tensor, *, hops: int, ordered: bool) -> None:
        super().__init__(q, torch.float32, ordered=ordered)
        self.hops = hops
        self.counters: Tensor | None = None
        self._arranged: Tensor | None = None
        self._scale = 1.0

    def tiles(self, scale: float, *, in_turns: bool, is_cleared: bool = True) -> Tensor:
        """Returns the tensor to which tiles are added; `finish` multiplies it by `scale`.

        `in_turns`, or `ordered`, makes the counters; they begin as zeros. Without counters the tensor begins as zeros.
        The first hop decides for all. Unless `is_cleared`, the caller writes these zeros.
        """
        total = self._arranged
        if total is None:
            in_turns |= self.ordered
            total = self.q.new_empty_strided(*contiguous(dq_sum_shape(self.q)), dtype=torch.float32)
            self._arranged, self._scale, cleared = total, scale, total
            if in_turns:
                cleared = self.counters = total.new_empty(total.numel() // dq_tile(total.shape[3]), dtype=torch.int32)
            if is_cleared:
                cleared.zero_()
        assert scale == self._scale
        return total

    def finish(self) -> Tensor:
        """Returns dq; see `DqSum.finish`."""
        total, counters = self._arranged, self.counters
        self._arranged = self.counters = None
        if total is None:
            return super().finish()
        if self._rows is None:
            return self._in_rows(total, counters, self.q.dtype)
        self._rows += self._in_rows(total, counters, torch.float32)
        return super().finish()

    def _in_rows(self, total: Tensor, counters: Tensor | None, dtype: torch.dtype) -> Tensor:
        dq = self.q.new_empty_strided(*contiguous(self.q.shape), dtype=dtype)
        batch, seqlen, nheads, headdim = dq.shape
        rows, columns = total.shape[2:]
        ntiles = rows * columns // dq_tile(columns)
        tensors = (total, dq) if counters is None else (total, dq, counters)
        key = self._scale, counters is None, *layout(dq)
        if not _finishes.repeat(key, tensors):
            arguments = total, counters, dq, self._scale, ntiles, seqlen, nheads, headdim, columns
            _finishes.first(key, _finish_kernel, (ntiles * batch * nheads,), arguments, FUSED, tensors)
        return dq


@triton.jit
def _load_in_rows(numbers, came, COLUMNS: tl.constexpr):
    """Loads a piece of 64 rows that `arranged` has reordered, as (64, COLUMNS); zeros unless `came`."""
    x = tl.load(numbers + tl.arange(0, 64 * COLUMNS), mask=came, other=0.0)
    return tl.permute(x.reshape([4, COLUMNS // 8, 8, 4, 2, 2]), (0, 4, 2, 1, 3, 5)).reshape([64, COLUMNS])


@triton.jit(do_not_specialize=["ntiles", "seqlen", "nheads"])
def _finish_kernel(total, counters, dq, scale, ntiles, seqlen, nheads, HEADDIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Converts one tile of queries of a head to rows of dq: zeros if its counter shows that nothing was added."""
    BLOCK_M: tl.constexpr = 128 if COLUMNS == 64 else 64
    PIECES: tl.constexpr = (BLOCK_M // 64 * COLUMNS + 63) // 64
    program = tl.program_id(0).to(tl.int64)
    head, begin = program // ntiles, program % ntiles * BLOCK_M
    came = True
    if counters is not None:
        came = tl.load(counters + program) != 0
    target = dq + (head // nheads * seqlen * nheads + head % nheads) * HEADDIM
    for piece in tl.static_range(PIECES):
        numbers = total + program * BLOCK_M * COLUMNS + piece * 64 * 64
        x = _load_in_rows(numbers, came, 32 if piece * 64 + 32 == COLUMNS else 64) * scale
        row, column = begin, piece * 64
        if COLUMNS == 64:
            row, column = begin + piece * 64, 0
        rows, columns = row + tl.arange(0, 64), column + tl.arange(0, x.shape[1])
        inside = (rows < seqlen)[:, None] & (columns < HEADDIM)[None, :]
        pointers = target + rows[:, None] * nheads * HEADDIM + columns[None, :]
        tl.store(pointers, x.to(dq.dtype.element_ty), mask=inside)
