"""Backward of one hop for sm_90 in one kernel: dK and dV, and dQ added tile by tile to a float32 sum.

A hop is the attention of this rank's queries over the keys of one rank. A program owns 128 keys of one KV head at a
time, 64 for each of two consumer warpgroups. A group is the query heads that share a KV head. The program streams the
queries of all heads of the group that see its keys. With `DESCENDING`, tiles of queries run from the last to the first.
Otherwise those that need a mask come first. Tiles of dQ are added in any order, or in a fixed order that gives the same
bits in every run (`ORDERED`). `pipeline.py` explains rings, their uses and the tile queue.

Shapes: q, dout (batch, seqlen_q, nheads, headdim); k, v, dk, dv (batch, seqlen_k, nheads_kv, headdim); lse, delta
(batch, nheads, seqlen_q). lse is in natural logarithms, and delta is the sum of dout * out over headdim, less the
gradient of lse. `dq_accumulator.py` describes the sum of dq and multiplies it by softmax_scale. Scores are computed
transposed, with 64 keys as rows and BLOCK_M queries as columns. The variables s, p, dp, ds hold S^T, P^T, dP^T, dS^T.
Unlike in the paper, dP here includes the subtraction of delta.

    S^T = k q^T, P^T = 2^((softmax_scale S^T - lse) log2 e), dP^T = v dout^T - delta, dS^T = P^T * dP^T
    dv = P^T dout, dk = softmax_scale dS^T q, dq = softmax_scale dS k

With `PRELOADED`, `minus_lse` is -lse / softmax_scale; it and -delta initialise the accumulators of S^T and dP^T.
Otherwise `minus_lse` is -lse log2 e. It is then added to the scaled S, and -delta to the result of v dout^T.

P^T and dS^T are operands of dv and dk straight from registers. dq needs dS of both warpgroups, which passes through
shared memory. dq of a tile is computed during the next tile, and each consumer computes one half. Two more warps add dq
to global memory, each every other tile.
At headdim 96 dk and dv have two parts (`columns.py`), and the second half of dq includes 32 columns of zeros.
Source: FlashAttention-3 (Shah et al. 2024), section B, with tiles and an order of matmuls measured best on an H200.
"""

# Gluon's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringflash.kernels.hopper.columns import (
    count,
    operand_layout,
    start_scores,
    start_sums,
    wait_parts,
    width_of,
    zero_parts,
)
from ringflash.kernels.hopper.dkdv_store import Gradients, make_parts, pass_gradients
from ringflash.kernels.hopper.dq_accumulator import SemaphoreOrder, add_tile, pass_dq
from ringflash.kernels.hopper.isolation import isolate_keys, isolate_queries
from ringflash.kernels.hopper.launch import Sizes
from ringflash.kernels.hopper.pipeline import (
    Bounds,
    bounds_of,
    buffer_of,
    fill,
    filled,
    fixed,
    full_barrier,
    make_barriers,
    make_ring,
    make_tiles,
    opaque_index,
    relative,
    release,
    slot_of,
    wait_empty,
    wait_full,
    where_seen,
)
from ringflash.kernels.hopper.scheduler import (
    Work,
    make_prefetch_ring,
    make_tile_queue,
    masked_visits,
    pop_tile,
    scheduler_warp,
    signal_prefetch,
    tile_at,
    visit_from_end,
)
from ringflash.kernels.hopper.versions import FEW_REGISTERS, copy_to_shared, nbytes


class Inputs(NamedTuple):
    """TMA descriptors of the inputs, and `padded`: the rows of a head in `minus_lse` and `minus_delta`, whole tiles."""

    q: Any
    dout: Any
    k: Any
    v: Any
    minus_lse: Any
    minus_delta: Any
    padded: Any


class Shared(NamedTuple):
    """Shared memory: rings of the inputs, of dS, of dq and of tiles.

    `numbers` holds -lse for each stage of q, then -delta for each stage of dout. A stage of `ds` has two halves, one
    from each consumer. The empty barriers of `ds` are not used. Before a consumer writes dS(i + 3), both have written
    dS(i + 2), and so have finished dq(i), which reads dS(i). So `BackwardConfig` asks for three stages or more.
    `parts` is the memory of `ds` again, as buffers for dk and dv on their way to global memory.
    """

    q: Any
    dout: Any
    k: Any
    v: Any
    numbers: Any
    ds: Any
    parts: Any
    dq: Any
    tile_queue: Any


class BackwardConstants(NamedTuple):
    """Compile-time parameters of the kernel, all constexpr.

    MASKED, BELOW and ABOVE are as in `Intervals` (`mask_tables.py`): whether tiles need a mask, and on which side.
    BLOCK_D, WIDTHS, BLOCK_M, DS_STAGES and PRELOADED are as in `BackwardConfig` (`config.py`). With CHECKED, keys are
    searched for NaN and Inf (`isolation.py`) even if lse and delta are finite. ORDERED adds dq in a fixed order; the
    first addition to a tile is then a store. ORDERED needs DESCENDING, under which a tile of queries is processed for
    all heads before the next tile. With BY_HEADS too, all tiles of a head come before those of the next head.
    ACCUMULATE adds dk and dv to memory. GROUP counts the query heads of a KV head. ROWS is 64, the keys of a consumer.
    """

    MASKED: Any
    BELOW: Any
    ABOVE: Any
    CHECKED: Any
    ORDERED: Any
    DESCENDING: Any
    BY_HEADS: Any
    ACCUMULATE: Any
    GROUP: Any
    PRELOADED: Any
    BLOCK_D: Any
    WIDTHS: Any
    BLOCK_M: Any
    DS_STAGES: Any
    ROWS: Any


STAGES = gl.constexpr(2)  # stages of q, and of dout; shared memory has no room for a third
ADDERS = gl.constexpr(2)  # warps that add dq to memory; the barriers of the dq ring are made for two
AHEAD = gl.constexpr(3)  # tiles of queries still to copy when the producer requests the next tile of keys


@gluon.jit
def _fill_with(ring, i, descriptor, at, numbers, vector, number):
    """Like `fill`, but on the same full barrier also copies -lse or -delta (`vector`) from index `number` on.

    A stage of `numbers` has the index of its buffer in `ring.buffers`, which holds the stages of q, then of dout.
    """
    wait_empty(ring, i)
    barrier = full_barrier(ring, i)
    mbarrier.expect(barrier, nbytes(descriptor) + nbytes(vector))
    copy_to_shared(descriptor, at, barrier, buffer_of(ring, i))
    copy_to_shared(vector, [number], barrier, numbers.index(ring.BUFFER + slot_of(i, STAGES)))


@gluon.jit
def _number(place, member, row, heads, padded, kind):
    """Returns the index in -lse and -delta of a row of head `member` of the group: each head has `padded` rows."""
    head = place.batch * heads * kind.GROUP + place.head * kind.GROUP + member
    return head * padded + row


@gluon.jit
def _visit(place, i, kind):
    """Returns the `i`-th tile of queries to process, and its head in the group: `i` counts from 0 for each `place`."""
    if kind.DESCENDING:
        n, member = visit_from_end(place, i, kind.GROUP, kind.BY_HEADS)
    else:
        n, member = tile_at(place, i, kind.GROUP, FROM_END=True)
    return n, member


@gluon.jit
def _copy_queries(inputs, shared, place, i, use, heads, kind):
    """Copies the `i`-th tile of q and dout to process, with -lse and -delta, as use `use` of their rings."""
    n, member = _visit(place, i, kind)
    head = place.head * kind.GROUP + member
    row = n * kind.BLOCK_M
    number = _number(place, member, row, heads, inputs.padded, kind)
    at = [place.batch, row, head, 0]
    _fill_with(shared.q, use, inputs.q, at, shared.numbers, inputs.minus_lse, number)
    _fill_with(shared.dout, use, inputs.dout, at, shared.numbers, inputs.minus_delta, number)


@gluon.jit
def load_warp(inputs, shared, prefetch, heads, kind):
    """Runs the producer warp: copies k and v of each tile of keys, and the queries that see them, to shared memory."""
    queries = 0  # tiles of queries so far: uses of the rings q and dout
    taken = 0  # tiles of keys so far: uses of the tile queue, and half the uses of the rings k and v
    place = pop_tile(shared.tile_queue, 0)
    while place.tile >= 0:
        total = (place.end - place.begin) * kind.GROUP
        signal_prefetch(prefetch, taken, 0, total, AHEAD)
        if total > 0:  # before k and v, whose buffers become free only when the previous tile of keys is finished
            _copy_queries(inputs, shared, place, 0, queries, heads, kind)
        for c in gl.static_range(2):
            at = [place.batch, (place.tile * 2 + c) * kind.ROWS, place.head, 0]
            fill(shared.v, taken * 2 + c, inputs.v, at)
            fill(shared.k, taken * 2 + c, inputs.k, at)
        for i in range(1, total):
            signal_prefetch(prefetch, taken, i, total, AHEAD)
            _copy_queries(inputs, shared, place, i, queries + i, heads, kind)
        queries += total
        release(shared.tile_queue, taken)
        taken += 1
        place = pop_tile(shared.tile_queue, taken)


@gluon.jit
def add_warp(ADDER: gl.constexpr, view, turns, shared, heads, padded, kind):
    """Runs warp `ADDER` of the `ADDERS` warps that add dq to memory: it adds every `ADDERS`-th tile of queries."""
    queries = 0
    taken = 0
    place = pop_tile(shared.tile_queue, 0)
    while place.tile >= 0:
        total = (place.end - place.begin) * kind.GROUP
        for i in range((ADDER + queries) % ADDERS, total, ADDERS):
            n, member = _visit(place, i, kind)
            number = _number(place, member, n * kind.BLOCK_M, heads, padded, kind)  # the sum is padded like -lse
            add_tile(view, number // kind.BLOCK_M, turns, place, n, shared.dq, (queries + i) * 2, kind.ORDERED)
        queries += total
        release(shared.tile_queue, taken)
        taken += 1
        place = pop_tile(shared.tile_queue, taken)


@gluon.jit
def _start_dq(C: gl.constexpr, i, shared, kind):
    """Issues the matmuls of half `C` of dq of tile `i` of queries: 64 columns, or 64 rows if BLOCK_D is 64."""
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq = gl.zeros([64, 64], gl.float32, Q)
    for c in gl.static_range(2):
        ds = shared.ds.buffers.index(slot_of(i, kind.DS_STAGES) * 2 + c)
        k = buffer_of(shared.k, opaque_index(c)).reshape([kind.ROWS, kind.BLOCK_D])
        if kind.BLOCK_D == 64:
            ds = ds.slice(C * 64, 64, 1)
        else:
            k = k.slice(C * 64, 64, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def _numbers_of(shared, i, FIRST: gl.constexpr, S: gl.constexpr):
    """Loads -lse (FIRST = 0) or -delta (FIRST = STAGES) of tile `i`.

    With an `i` from `opaque_index`, the compiler cannot load early and hold the numbers in registers.
    """
    return shared.numbers.index(FIRST + slot_of(i, STAGES)).load(gl.SliceLayout(0, S))


@gluon.jit
def _step(
    C: gl.constexpr, i, row, dk, dv, first, stop, gradients, shared, MASKED: gl.constexpr, BEGINS: gl.constexpr, kind
):
    """Adds tile `i` of queries to (dk, dv), and computes half `C` of dq of tile i - 1. `i` is a use of q, dout and ds.

    dk and dv are float32 (ROWS, BLOCK_D), in registers. `first` and `stop` (ROWS,) bound the queries that see each key,
    and `row` is the tile's first query; these are read only if MASKED, which is about this tile. `gradients.lost` is
    negative if any lse or delta is not finite. `BEGINS` marks the first tile of queries for these keys: a tile i - 1
    belongs to earlier keys, and `mma_warpgroup` has computed its dq. Otherwise both halves of dS(i - 1) must be written
    before its dq is computed. Matmuls are issued as early as their operands allow, so that they overlap the arithmetic.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_M, 16])
    OPERAND: gl.constexpr = operand_layout(width_of(kind.WIDTHS, 0))
    PARTS: gl.constexpr = count(kind.WIDTHS)  # matmuls of S, dP, dv and dk each; dq has two
    shape = gl.zeros([kind.ROWS, kind.BLOCK_M], gl.float32, S)
    # The opaque index keeps the descriptors of k and v out of registers between steps.
    k = buffer_of(shared.k, opaque_index(C)).reshape([kind.ROWS, kind.BLOCK_D])
    v = buffer_of(shared.v, opaque_index(C)).reshape([kind.ROWS, kind.BLOCK_D])
    q = filled(shared.q, i, kind.BLOCK_M, kind.BLOCK_D)
    dout = filled(shared.dout, i, kind.BLOCK_M, kind.BLOCK_D)
    if MASKED and gradients.lost < 0:
        isolate_queries(C, shared, i, STAGES, kind)
    if kind.PRELOADED:
        minus_lse, _ = gl.broadcast(_numbers_of(shared, i, 0, S)[None, :], shape)
        minus_delta, _ = gl.broadcast(_numbers_of(shared, i, STAGES, S)[None, :], shape)
        minus_delta = fixed(minus_delta)
        s = start_scores(k, q, minus_lse, True, kind.WIDTHS)
        dp = start_scores(v, dout, minus_delta, True, kind.WIDTHS)
        s = warpgroup_mma_wait(PARTS, deps=[s])
        p = gl.exp2(s * gradients.scale)
    else:
        s = start_scores(k, q, shape, False, kind.WIDTHS)
        dp = start_scores(v, dout, shape, False, kind.WIDTHS)
        s = warpgroup_mma_wait(PARTS, deps=[s])
        p = gl.exp2(s * gradients.scale + _numbers_of(shared, opaque_index(i), 0, S)[None, :])
    if MASKED:
        queries = row + gl.arange(0, kind.BLOCK_M, gl.SliceLayout(0, S))
        if FEW_REGISTERS:
            queries, first, stop = relative(queries, first, stop, kind.BLOCK_M)
        p = where_seen(p, queries, first, stop, 0.0, kind.BELOW, kind.ABOVE)
    p_operand = gl.convert_layout(p.to(q.dtype), OPERAND)
    dp = warpgroup_mma_wait(0, deps=[dp])
    if not kind.PRELOADED:
        dp = dp + _numbers_of(shared, opaque_index(i), STAGES, S)[None, :]
    ds = p * dp
    if MASKED and (kind.CHECKED or gradients.lost < 0):
        ds = gl.where(p == 0.0, 0.0, ds)  # dP may be NaN or infinite at masked pairs
    dv = start_sums(p_operand, dout, dv, kind.WIDTHS)
    ds = ds.to(q.dtype)
    ds_operand = gl.convert_layout(ds, OPERAND)
    if BEGINS:
        tma.store_wait(0)  # stores of the previous dk and dv may still read this stage, whose memory `parts` shares
    else:
        wait_full(shared.ds, i - 1)
    shared.ds.buffers.index(slot_of(i, kind.DS_STAGES) * 2 + C).store(ds)
    fence_async_shared()
    mbarrier.arrive(full_barrier(shared.ds, i), count=1)
    if not BEGINS:
        dq = _start_dq(C, i - 1, shared, kind)
        dk = start_sums(ds_operand, q, dk, kind.WIDTHS)
        dv = wait_parts(2 + PARTS, dv, kind.WIDTHS)  # the later matmuls are two of dq and those of dk
        release(shared.dout, i)
        dq = warpgroup_mma_wait(PARTS, deps=[dq])
        pass_dq(C, dq, i - 1, shared.dq)
    else:
        dk = start_sums(ds_operand, q, dk, kind.WIDTHS)
        dv = wait_parts(PARTS, dv, kind.WIDTHS)
        release(shared.dout, i)
    dk = wait_parts(0, dk, kind.WIDTHS)
    release(shared.q, i)
    return dk, dv


@gluon.jit
def _release_both(ring):
    """Releases both buffers of k or v. Each consumer reads both buffers of k, for dq; v is released in the same way.

    Every consumer therefore waits for both buffers of v too, although it reads only one.
    """
    for c in gl.static_range(2):
        release(ring, c)  # all uses taken * 2 + c have stage c


@gluon.jit
def _seen_by(C: gl.constexpr, place, bounds, gradients, kind):
    """Returns the first query that sees each key of consumer `C`, and one past the last query."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_M, 16])
    keys = (place.tile * 2 + C) * kind.ROWS + gl.arange(0, kind.ROWS, gl.SliceLayout(1, S))
    first, stop = keys, keys  # not read without a mask
    if kind.MASKED:
        first, stop = bounds_of(bounds, place.batch, keys, keys < gradients.seqlen)
    return first, stop


@gluon.jit
def mma_warpgroup(C: gl.constexpr, shared, gradients, bounds, kind):
    """Runs consumer `C`: dk and dv of 64 keys of each tile, and half of dq of the queries that see the 128 keys."""
    begin = 0  # tiles of queries so far: uses of the rings q, dout and ds
    taken = 0
    place = pop_tile(shared.tile_queue, 0)
    first, stop = _seen_by(C, place, bounds, gradients, kind)
    while place.tile >= 0:
        for c in gl.static_range(2):
            wait_full(shared.k, taken * 2 + c)
            wait_full(shared.v, taken * 2 + c)
        if kind.MASKED and (kind.CHECKED or gradients.lost < 0):
            isolate_keys(C, shared.k, kind)
        dk = zero_parts(kind.ROWS, kind.WIDTHS)
        dv = zero_parts(kind.ROWS, kind.WIDTHS)
        if place.end > place.begin:
            n, _ = _visit(place, 0, kind)
            row = n * kind.BLOCK_M
            # One copy of the first step: it applies the mask even to a tile that needs none.
            dk, dv = _step(C, begin, row, dk, dv, first, stop, gradients, shared, kind.MASKED, True, kind)
            HEADS: gl.constexpr = 1 if kind.BY_HEADS else kind.GROUP  # heads whose tiles one pass of this loop covers
            end, next_visit = begin, begin + 1
            for _ in range(kind.GROUP // HEADS):  # uses [begin_full, end_full) of each pass need no mask
                begin_full = end
                end += (place.end - place.begin) * HEADS
                end_full = end
                if kind.MASKED and not kind.DESCENDING:
                    begin_full += masked_visits(place) * HEADS
                if kind.DESCENDING and kind.ABOVE:
                    begin_full += (place.end - place.full_end) * HEADS
                if kind.DESCENDING and kind.BELOW:
                    end_full -= (place.full_begin - place.begin) * HEADS
                if kind.MASKED and (kind.ABOVE or not kind.DESCENDING):
                    for i in range(next_visit, begin_full):
                        n, _ = _visit(place, i - begin, kind)
                        row = n * kind.BLOCK_M
                        dk, dv = _step(C, i, row, dk, dv, first, stop, gradients, shared, True, False, kind)
                for i in range(gl.maximum(next_visit, begin_full), end_full):
                    dk, dv = _step(C, i, 0, dk, dv, first, stop, gradients, shared, False, False, kind)
                if kind.DESCENDING and kind.BELOW:
                    for i in range(gl.maximum(next_visit, end_full), end):
                        row = (place.begin + (end - 1 - i) // HEADS) * kind.BLOCK_M  # as `_visit`, in fewer registers
                        dk, dv = _step(C, i, row, dk, dv, first, stop, gradients, shared, True, False, kind)
                next_visit = end
            begin = end
            _release_both(shared.v)
            wait_full(shared.ds, end - 1)
            dq = warpgroup_mma_wait(0, deps=[_start_dq(C, end - 1, shared, kind)])
            _release_both(shared.k)
            pass_dq(C, dq, end - 1, shared.dq)
        else:
            _release_both(shared.v)
            _release_both(shared.k)
            tma.store_wait(0)  # the zero gradients reuse buffers that stores of the previous ones may still read
        done = pop_tile(shared.tile_queue, taken)  # the same tile again, instead of keeping it in registers
        release(shared.tile_queue, taken)
        taken += 1
        place = pop_tile(shared.tile_queue, taken)  # now: its bounds load while the gradients are stored
        first, stop = _seen_by(C, place, bounds, gradients, kind)
        pass_gradients(C, dk, dv, done, begin, gradients, shared.parts, kind)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["turns_stride", "padded", "seqlen_k", *Sizes._fields])
def _backward_kernel(
    q, dout, k, v, minus_lse, minus_delta, lost, dq, dk, dv, counters, turns, turns_stride, padded, seqlen_k, scale,
    softmax_scale, tables, bounds_stride, tiles_stride, ntiles, heads, all_heads, heads_per_wave, kind,
):  # fmt: skip
    # `dq` is the descriptor of the float32 sum. The order of barriers is q, dout, k, v, prefetch, tile queue, dq, ds:
    # of each ring the full barriers, then as many empty ones.
    bounds = Bounds(tables.bounds, bounds_stride)
    work = Work(tables.tiles, tiles_stride, tables.order, tables.counter, ntiles, heads, all_heads, heads_per_wave)
    inputs = Inputs(q, dout, k, v, minus_lse, minus_delta, padded)
    gradients = Gradients(dk, dv, seqlen_k, scale, softmax_scale, gl.load(lost))
    queries = make_tiles(q, 2 * STAGES)
    keys = make_tiles(k, 4)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * STAGES, kind.BLOCK_M], minus_lse.layout)
    barriers = make_barriers(4 * STAGES + 24 + 2 * kind.DS_STAGES)
    q_ring = make_ring(queries, barriers, 0, 0, STAGES, 2)
    dout_ring = make_ring(queries, barriers, STAGES, 2 * STAGES, STAGES, 2)
    k_ring = make_ring(keys, barriers, 0, 4 * STAGES, 2, 2)
    v_ring = make_ring(keys, barriers, 2, 4 * STAGES + 4, 2, 2)
    prefetch = make_prefetch_ring(barriers, 4 * STAGES + 8)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([kind.ROWS, kind.BLOCK_M], q.dtype)
    ds = gl.allocate_shared_memory(q.dtype, [2 * kind.DS_STAGES, kind.ROWS, kind.BLOCK_M], DS)
    parts = make_parts(ds, dk, kind.DS_STAGES, kind.BLOCK_M)
    # Each half of dq has one buffer but two pairs of barriers, one pair for each warp that adds. One pair would not do:
    # a warp waits for every second completion only, and these have equal parity. `buffer_of` does not fit this ring.
    gl.static_assert(ADDERS == 2)
    dq_ring = make_ring(make_tiles(dq, 2), barriers, 0, 4 * STAGES + 16, 4, 1)
    ds_ring = make_ring(ds, barriers, 0, 4 * STAGES + 24, kind.DS_STAGES, 1, 2)
    tile_queue = make_tile_queue(barriers, 4 * STAGES + 12, 3 + ADDERS)
    shared = Shared(q_ring, dout_ring, k_ring, v_ring, numbers, ds_ring, parts, dq_ring, tile_queue)
    fence_async_shared()
    turns = SemaphoreOrder(counters, turns, turns_stride, ntiles)
    gl.warp_specialize(
        [
            (mma_warpgroup, (0, shared, gradients, bounds, kind)),
            (mma_warpgroup, (1, shared, gradients, bounds, kind)),
            (load_warp, (inputs, shared, prefetch, heads, kind)),
            (scheduler_warp, (work, tile_queue, prefetch, kind.ORDERED)),
            (add_warp, (0, dq, turns, shared, heads, padded, kind)),
            (add_warp, (1, dq, turns, shared, heads, padded, kind)),
        ],
        [4, 1, 1, 1, 1],  # warps of each role but the first, which runs in the launch's own four
        [240, 24, 24, 24, 24],  # registers of a thread in these roles
    )


KERNEL = _backward_kernel
