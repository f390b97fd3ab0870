"""Backward of one hop for sm_90 in one kernel: dK and dV, and dQ added tile by tile to a float32 sum.

A hop is the attention of this rank's queries over the keys of one rank. A program owns one tile of keys of one KV head
at a time. The tile has 128 keys, 64 for each of two consumer warpgroups. For headdim above 128 it has 64 keys: consumer
0 computes dv, and consumer 1 dk (`BY_GRADIENT`). Consumer 0 then passes P^T to consumer 1, which computes dS^T. A group
is the query heads that share a KV head. The program streams the queries of all heads of the group that see its keys.
`kind` is a `BackwardConstants`, and `place` a `Place` (`scheduler.py`): a tile of keys, and the tiles of queries that
see it. With `DESCENDING`, tiles of queries run from the last to the first. Otherwise tiles that need a mask come first.
Tiles of dQ are added in any order, or in a fixed order that gives the same bits in every run (`ORDERED`). Short
sequences use `ORDERED` too, because it needs no zeroed sum. `pipeline.py` explains rings and their uses, and
`scheduler.py` explains the tile queue.

Shapes: q, dout (batch, seqlen_q, nheads, headdim); k, v, dk, dv (batch, seqlen_k, nheads_kv, headdim); lse, delta
(batch, nheads, seqlen_q). lse is in natural logarithms, and delta is the sum of dout * out over headdim, less the
gradient of lse. `dq_accumulator.py` describes the sum of dq and multiplies it by softmax_scale. Scores are computed
transposed, with 64 keys as rows and BLOCK_M queries as columns. The variables s, p, dp, ds hold S^T, P^T, dP^T, dS^T.
In the paper dP does not include the subtraction of delta; here it does.

    S^T = k q^T, P^T = 2^((softmax_scale S^T - lse) log2 e), dP^T = v dout^T - delta, dS^T = P^T * dP^T
    dv = P^T dout, dk = softmax_scale dS^T q, dq = softmax_scale dS k

With `PRELOADED`, `minus_lse` is -lse / softmax_scale; it and -delta initialise the accumulators of S^T and dP^T.
Otherwise `minus_lse` is -lse log2 e. It is then added to the scaled S, and -delta to the result of v dout^T.

`backward_step.py` has the computations of the consumers, and how they share them. dq of a tile of queries is computed
during the next tile, in two or four pieces (`PIECES`): consumer C computes pieces C, C + 2, and so on. Two more warps
add dq to global memory, each every other tile. At headdim 96 dk and dv have two parts (`columns.py`), and dq has pieces
of 64 and 32 columns.
Source: FlashAttention-3 (Shah et al. 2024), appendix B, with tiles and an order of matmuls measured best on an H200.
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
    warpgroup_mma_wait,
)

from ringflash.kernels.hopper.backward_step import STAGES, Shared, start_dq, step
from ringflash.kernels.hopper.columns import count, matmul_layout, zero_parts
from ringflash.kernels.hopper.dkdv_store import Gradients, parts_of_ds, parts_of_pieces, pass_gradients
from ringflash.kernels.hopper.dq_accumulator import SemaphoreOrder, add_tile, make_pieces, pass_dq, wait_passed
from ringflash.kernels.hopper.isolation import isolate_keys
from ringflash.kernels.hopper.launch import Sizes
from ringflash.kernels.hopper.pipeline import (
    Bounds,
    bounds_of,
    buffer_of,
    fill,
    full_barrier,
    make_barriers,
    make_ring,
    make_tiles,
    release,
    slot_of,
    wait_empty,
    wait_full,
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
from ringflash.kernels.versions import copy_to_shared, nbytes


class Inputs(NamedTuple):
    """TMA descriptors of the inputs, and `padded`: the rows of a head in `minus_lse` and `minus_delta`.

    `padded` is seqlen_q rounded up to a multiple of 128.
    """

    q: Any
    dout: Any
    k: Any
    v: Any
    minus_lse: Any
    minus_delta: Any
    padded: Any


class BackwardConstants(NamedTuple):
    """Compile-time parameters of the kernel, all constexpr.

    MASKED, BELOW and ABOVE are as in `Intervals` (`mask_tables.py`): whether tiles need a mask, and on which side.
    BLOCK_D, WIDTHS, BLOCK_M, DOUT_STAGES, DS_STAGES, BY_GRADIENT and PIECES are as in `BackwardConfig` (`config.py`).
    PRELOADED is its `preloaded_masked` if MASKED, else its `preloaded`. With CHECKED, keys are searched for NaN and Inf
    (`isolation.py`) even if lse and delta are finite. ORDERED adds dq in a fixed order; the first addition to a tile is
    then a store. ORDERED needs DESCENDING, under which a tile of queries is processed for all heads before the next
    tile. With BY_HEADS too, all tiles of a head come before those of the next head. ACCUMULATE adds dk and dv to
    memory. HEAD_PARTS counts the parts in which the query heads of a KV head are cut (`head_parts` in `config.py`), and
    GROUP the query heads of a part; `place.head` counts parts. ROWS is 64, the keys of a consumer, and KEY_PARTS counts
    the parts of 64 keys in a tile.
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
    HEAD_PARTS: Any
    PRELOADED: Any
    BLOCK_D: Any
    WIDTHS: Any
    BLOCK_M: Any
    DOUT_STAGES: Any
    DS_STAGES: Any
    BY_GRADIENT: Any
    KEY_PARTS: Any
    PIECES: Any
    ROWS: Any


ADDERS = gl.constexpr(2)  # warps that add dq to memory; the barriers of the dq ring are made for two
AHEAD = gl.constexpr(3)  # tiles of queries still to copy when the producer requests the next tile of keys


@gluon.jit
def _fill_with(ring, i, descriptor, at, vectors, vector, index):
    """Like `fill`, but on the same full barrier also copies -lse or -delta (`vector`) from `index` on.

    `vectors` has one row for each buffer in `ring.buffers`, which holds the stages of q, then of dout.
    """
    wait_empty(ring, i)
    barrier = full_barrier(ring, i)
    mbarrier.expect(barrier, nbytes(descriptor) + nbytes(vector))
    copy_to_shared(descriptor, at, barrier, buffer_of(ring, i))
    copy_to_shared(vector, [index], barrier, vectors.index(ring.BUFFER + slot_of(i, ring.STAGES)))


@gluon.jit
def _vector_index(place, member, row, heads, padded, kind):
    """Returns the index in -lse and -delta of a row of head `member` of the group.

    `heads` counts KV heads, and each head has `padded` rows.
    """
    head = place.batch * heads * kind.GROUP + place.head * kind.GROUP + member
    return head * padded + row


@gluon.jit
def _visit(place, i, kind):
    """Returns the `i`-th tile of queries to process, and its head in the group; `i` counts from 0 for each `place`.

    Without DESCENDING, masked tiles come first, then the others from the last to the first.
    """
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
    index = _vector_index(place, member, row, heads, inputs.padded, kind)
    at = [place.batch, row, head, 0]
    _fill_with(shared.q, use, inputs.q, at, shared.numbers, inputs.minus_lse, index)
    _fill_with(shared.dout, use, inputs.dout, at, shared.numbers, inputs.minus_delta, index)


@gluon.jit
def load_warp(inputs, shared, prefetch, heads, kind):
    """Runs the producer warp: copies k and v of each tile of keys, and the queries that see them, to shared memory."""
    first_use = 0  # tiles of queries before `place`: uses of the rings q and dout
    taken = 0  # tiles of keys so far: uses of the tile queue; the rings k and v have KEY_PARTS uses for each
    place = pop_tile(shared.tile_queue, 0)
    while place.tile >= 0:
        total = (place.end - place.begin) * kind.GROUP
        signal_prefetch(prefetch, taken, 0, total, AHEAD)
        if total > 0:  # before k and v, whose buffers become free only when the previous tile of keys is finished
            _copy_queries(inputs, shared, place, 0, first_use, heads, kind)
        head = place.head // kind.HEAD_PARTS
        for c in gl.static_range(kind.KEY_PARTS):
            at = [place.batch, (place.tile * kind.KEY_PARTS + c) * kind.ROWS, head, 0]
            fill(shared.v, taken * kind.KEY_PARTS + c, inputs.v, at)
            fill(shared.k, taken * kind.KEY_PARTS + c, inputs.k, at)
        for i in range(1, total):
            signal_prefetch(prefetch, taken, i, total, AHEAD)
            _copy_queries(inputs, shared, place, i, first_use + i, heads, kind)
        first_use += total
        release(shared.tile_queue, taken)
        taken += 1
        place = pop_tile(shared.tile_queue, taken)


@gluon.jit
def add_warp(ADDER: gl.constexpr, view, turns, shared, heads, padded, kind):
    """Runs warp `ADDER` of the `ADDERS` warps that add dq to memory: it adds every `ADDERS`-th tile of queries.

    `view` is the descriptor of the sum of dq, and `turns` a `SemaphoreOrder`.
    """
    first_use = 0
    taken = 0
    place = pop_tile(shared.tile_queue, 0)
    while place.tile >= 0:
        total = (place.end - place.begin) * kind.GROUP
        for i in range((ADDER + first_use) % ADDERS, total, ADDERS):
            n, member = _visit(place, i, kind)
            index = _vector_index(place, member, n * kind.BLOCK_M, heads, padded, kind)  # the sum is padded like -lse
            add_tile(view, index // kind.BLOCK_M, turns, place, n, shared.dq, first_use + i, kind.ORDERED, kind.PIECES)
        first_use += total
        release(shared.tile_queue, taken)
        taken += 1
        place = pop_tile(shared.tile_queue, taken)


@gluon.jit
def _release_all(ring, kind):
    """Releases all buffers of the ring k or v for this consumer.

    Each empty barrier needs an arrival from both consumers. The caller must have waited for every buffer, also for
    those that it does not read.
    """
    for c in gl.static_range(kind.KEY_PARTS):
        release(ring, c)  # all uses taken * KEY_PARTS + c have stage c


@gluon.jit
def _seen_by(C: gl.constexpr, place, bounds, gradients, kind):
    """Returns the first query that sees each key of consumer `C`, and one past the last query."""
    S: gl.constexpr = matmul_layout(kind.BLOCK_M)
    keys = (place.tile * kind.KEY_PARTS + C % kind.KEY_PARTS) * kind.ROWS + gl.arange(
        0, kind.ROWS, gl.SliceLayout(1, S)
    )
    first, stop = keys, keys  # not read without a mask
    if kind.MASKED:
        first, stop = bounds_of(bounds, place.batch, keys, keys < gradients.seqlen)
    return first, stop


@gluon.jit
def mma_warpgroup(C: gl.constexpr, shared, gradients, bounds, kind):
    """Runs consumer `C`: its share of dk and dv of each tile of keys, and its pieces of dq."""
    first_use = 0  # tiles of queries before `place`: uses of the rings q, dout and ds
    taken = 0
    place = pop_tile(shared.tile_queue, 0)
    first, stop = _seen_by(C, place, bounds, gradients, kind)
    while place.tile >= 0:
        for c in gl.static_range(kind.KEY_PARTS):
            wait_full(shared.k, taken * kind.KEY_PARTS + c)
            wait_full(shared.v, taken * kind.KEY_PARTS + c)
        # `lost` < 0: some lse or delta is not finite. Isolation replaces NaN and Inf in k by zeros; with BY_GRADIENT
        # consumer 0 does this for both.
        if kind.MASKED and C < kind.KEY_PARTS and (kind.CHECKED or gradients.lost < 0):
            isolate_keys(C, shared.k, kind)
        dk = zero_parts(kind.ROWS, kind.WIDTHS)
        dv = zero_parts(kind.ROWS, kind.WIDTHS)
        if place.end > place.begin:
            n, _ = _visit(place, 0, kind)
            row = n * kind.BLOCK_M
            # If any tile needs a mask, the first step always applies it: in other tiles it changes nothing. The two
            # flags before `kind` are MASKED and BEGINS; BEGINS marks the first tile of queries of a `place`.
            dk, dv = step(C, first_use, row, dk, dv, first, stop, gradients, shared, kind.MASKED, True, kind)
            HEADS: gl.constexpr = 1 if kind.BY_HEADS else kind.GROUP  # heads whose tiles one pass of this loop covers
            end, next_use = first_use, first_use + 1
            # Up to three loops: masked tiles, tiles without a mask, and with DESCENDING and BELOW masked tiles again.
            # Names without `place.` are ring uses.
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
                    for i in range(next_use, begin_full):
                        n, _ = _visit(place, i - first_use, kind)
                        row = n * kind.BLOCK_M
                        dk, dv = step(C, i, row, dk, dv, first, stop, gradients, shared, True, False, kind)
                for i in range(gl.maximum(next_use, begin_full), end_full):
                    dk, dv = step(C, i, 0, dk, dv, first, stop, gradients, shared, False, False, kind)
                if kind.DESCENDING and kind.BELOW:
                    for i in range(gl.maximum(next_use, end_full), end):
                        row = (place.begin + (end - 1 - i) // HEADS) * kind.BLOCK_M  # as `_visit`, in fewer registers
                        dk, dv = step(C, i, row, dk, dv, first, stop, gradients, shared, True, False, kind)
                next_use = end
            first_use = end
            _release_all(shared.v, kind)
            wait_full(shared.ds, end - 1)
            for piece in gl.static_range(C, count(kind.PIECES), 2):
                dq = warpgroup_mma_wait(0, deps=[start_dq(piece, end - 1, shared, kind)])
                if piece + 2 >= count(kind.PIECES):
                    _release_all(shared.k, kind)
                pass_dq(piece, dq, end - 1, shared.dq, kind.PIECES)
        else:
            _release_all(shared.v, kind)
            _release_all(shared.k, kind)
            tma.store_wait(0)  # the zero gradients reuse buffers that stores of the previous ones may still read
        done = pop_tile(shared.tile_queue, taken)  # the same tile again, instead of keeping it in registers
        release(shared.tile_queue, taken)
        taken += 1
        place = pop_tile(shared.tile_queue, taken)  # now: its bounds load while the gradients are stored
        first, stop = _seen_by(C, place, bounds, gradients, kind)
        if kind.BY_GRADIENT:
            wait_passed(C, first_use, shared.dq, kind.PIECES)  # `parts` reuse this consumer's buffer of dq
        pass_gradients(C, dk, dv, done, first_use, gradients, shared.parts, kind)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["turns_stride", "padded", "seqlen_k", *Sizes._fields])
def _backward_kernel(
    q, dout, k, v, minus_lse, minus_delta, lost, dq, dk, dv, counters, turns, turns_stride, padded, seqlen_k, scale,
    softmax_scale, tables, bounds_stride, tiles_stride, ntiles, heads, all_heads, heads_per_wave, kind,
):  # fmt: skip
    # `dq` is the descriptor of the float32 sum, and `scale` is softmax_scale log2 e. `Gradients` describes the number
    # that `lost` points to. `tables` has the tensors of `Bounds` and `Work`. `counters` and `turns` are the first two
    # fields of the `SemaphoreOrder` made below, which then has the name `turns`. The order of barriers is q, dout, k,
    # v, prefetch, tile queue, dq, ds, p: of each ring the full barriers, then as many empty ones.
    bounds = Bounds(tables.bounds, bounds_stride)
    work = Work(tables.tiles, tiles_stride, tables.order, tables.counter, ntiles, heads, all_heads, heads_per_wave)
    inputs = Inputs(q, dout, k, v, minus_lse, minus_delta, padded)
    gradients = Gradients(dk, dv, seqlen_k, scale, softmax_scale, gl.load(lost))
    # k and v have room for two stages each; with BY_GRADIENT they and dout leave barriers unused.
    K_BARRIER: gl.constexpr = 4 * STAGES
    V_BARRIER: gl.constexpr = K_BARRIER + 4
    PREFETCH: gl.constexpr = V_BARRIER + 4
    QUEUE_BARRIER: gl.constexpr = PREFETCH + 4
    DQ_BARRIER: gl.constexpr = QUEUE_BARRIER + 4
    DS_BARRIER: gl.constexpr = DQ_BARRIER + 4 * count(kind.PIECES)
    P_BARRIER: gl.constexpr = DS_BARRIER + 2 * kind.DS_STAGES
    q_dout_tiles = make_tiles(q, STAGES + kind.DOUT_STAGES)
    kv_tiles = make_tiles(k, 2 * kind.KEY_PARTS)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES + kind.DOUT_STAGES, kind.BLOCK_M], minus_lse.layout)
    barriers = make_barriers(P_BARRIER + 2 * kind.BY_GRADIENT)
    q_ring = make_ring(q_dout_tiles, barriers, 0, 0, STAGES, 2)
    dout_ring = make_ring(q_dout_tiles, barriers, STAGES, 2 * STAGES, kind.DOUT_STAGES, 2)
    k_ring = make_ring(kv_tiles, barriers, 0, K_BARRIER, kind.KEY_PARTS, 2)
    v_ring = make_ring(kv_tiles, barriers, kind.KEY_PARTS, V_BARRIER, kind.KEY_PARTS, 2)
    prefetch = make_prefetch_ring(barriers, PREFETCH)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([kind.ROWS, kind.BLOCK_M], q.dtype)
    ds = gl.allocate_shared_memory(q.dtype, [kind.KEY_PARTS * kind.DS_STAGES, kind.ROWS, kind.BLOCK_M], DS)
    # Each consumer has one buffer for its pieces of dq, but each piece has two pairs of barriers, one for each warp
    # that adds. With one pair, a warp would wait for every second phase only. All these phases have the same parity, so
    # its wait could return early. The buffer of a piece is `piece % 2`, so `buffer_of` does not apply to this ring.
    gl.static_assert(ADDERS == 2)
    pieces = make_pieces(dq, 2)
    dq_ring = make_ring(pieces, barriers, 0, DQ_BARRIER, 2 * count(kind.PIECES), 1)
    # Both consumers write ds. Its empty barriers are not used (`Shared`).
    ds_ring = make_ring(ds, barriers, 0, DS_BARRIER, kind.DS_STAGES, 1, kind.KEY_PARTS)
    if kind.BY_GRADIENT:
        parts = parts_of_pieces(pieces, dk)
        p_ring = make_ring(make_pieces(dq, 1), barriers, 0, P_BARRIER, 1, 1)
    else:
        parts = parts_of_ds(ds, dk, kind.DS_STAGES, kind.BLOCK_M)
        p_ring = ds_ring  # not used
    tile_queue = make_tile_queue(barriers, QUEUE_BARRIER, 3 + ADDERS)
    shared = Shared(q_ring, dout_ring, k_ring, v_ring, numbers, p_ring, ds_ring, parts, dq_ring, tile_queue)
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
