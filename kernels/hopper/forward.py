"""Forward of one hop for sm_90: two or three consumer warpgroups of 64 queries each, and one TMA producer warp.

Shapes: q (batch, seqlen_q, nheads, headdim); k, v (batch, seqlen_k, nheads_kv, headdim); out as q; m, l of the state
and lse (batch, nheads, seqlen_q); o of the state as q, float32. A program owns a tile of queries of one head at a
time, 64 queries for each consumer. It processes the tiles of keys that these queries see: tiles that need a mask come
before tiles that need none.

In step i a consumer issues S(i) = q k(i)^T and O += P(i-1) v(i-1). It waits for S(i) and computes P(i) from it. Only
then does it wait for O, so that the softmax overlaps the second matmul. With `TURNS` consumers also issue their matmuls
in a fixed cyclic order, ping-pong by named barriers. So the softmax of one overlaps the matmuls of another. Without
`OVERLAPS` a consumer waits for O before it issues S(i), because its registers have no room for both P(i-1) and S(i).
`columns.py` describes the accumulator of O, which has two parts at headdim 96.
Source: FlashAttention-3 (Shah et al. 2024), section 3.1 and algorithm 2. The online softmax is the one of
`ringflash.kernels.triton.forward`.
"""

# Gluon's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from ringflash.kernels.hopper.columns import (
    count,
    load_parts,
    matmul_layout,
    operand_layout,
    scale_rows,
    start_scores,
    start_sums,
    store_parts,
    wait_parts,
    width_of,
    zero_parts,
)
from ringflash.kernels.hopper.isolation import isolate_values, lost_finite, row_checks, wait_written
from ringflash.kernels.hopper.launch import Sizes
from ringflash.kernels.hopper.pipeline import (
    Bounds,
    bounds_of,
    buffer_of,
    fill,
    filled,
    make_barriers,
    make_ring,
    make_tiles,
    opaque_index,
    pack_operand,
    relative,
    release,
    scheduler_barrier_arrive,
    scheduler_barrier_wait,
    unpack_operand,
    wait_full,
    where_seen,
)
from ringflash.kernels.hopper.scheduler import (
    Work,
    ask_for_repeat,
    make_checks,
    make_prefetch_ring,
    make_tile_queue,
    masked_visits,
    pop_tile,
    report,
    scheduler_warp,
    signal_prefetch,
    tile_at,
)
from ringflash.kernels.versions import FEW_REGISTERS, copy_from_shared, reinterpret


class Tiles(NamedTuple):
    """Tensors that are copied tile by tile: as TMA descriptors (`views`), or as shared-memory rings (`rings`).

    The ring `out` has one buffer for each consumer, which holds the o of the incoming state, if any, and then the
    result. With `OUT_IN_Q` there is no room for these buffers, and `out` is the ring `q`.
    """

    q: Any
    k: Any
    v: Any
    out: Any


class Rows(NamedTuple):
    """Contiguous vectors with one number for each row: m and l of the state, and lse."""

    m: Any
    l: Any  # noqa: E741
    lse: Any
    heads: Any
    seqlen: Any


class ForwardConstants(NamedTuple):
    """Compile-time parameters of the kernel, all constexpr.

    Args:
        FIRST: the hop has no incoming state.
        LAST: the hop writes out and lse; any other hop writes the state.
        MASKED: some processed tile needs a mask.
        LOOPS: loops of `_attend` over steps, 2 if MASKED else 1.
        BELOW, ABOVE: as in `Intervals`.
        GROUP: query heads of one KV head.
        BLOCK_D, WIDTHS, BLOCK_N, STAGES, CONSUMERS, REGISTERS, OUT_IN_Q, TURNS, OVERLAPS: as in `ForwardConfig`.
        PASS_OVER: consumers skip the first tiles of keys if none of their queries sees them.
        ROWS: queries of a consumer.
    """

    FIRST: Any
    LAST: Any
    MASKED: Any
    LOOPS: Any
    BELOW: Any
    ABOVE: Any
    GROUP: Any
    BLOCK_D: Any
    WIDTHS: Any
    BLOCK_N: Any
    STAGES: Any
    CONSUMERS: Any
    REGISTERS: Any
    OUT_IN_Q: Any
    TURNS: Any
    OVERLAPS: Any
    PASS_OVER: Any
    ROWS: Any


AHEAD = gl.constexpr(8)  # tiles of keys left to copy when the producer asks for the next tile


@gluon.jit
def _copy_state(state, rings, place, taken, kind):
    """Copies the o of the incoming state to the ring `out`, once the previous results have left its buffers.

    The producer calls this after the first two tiles of keys, which need not wait for these buffers. A later call would
    deadlock: a tile of V without a free stage waits for the first P v, which needs o.
    """
    for c in gl.static_range(kind.CONSUMERS):
        at = [place.batch, (place.tile * kind.CONSUMERS + c) * kind.ROWS, place.head, 0]
        fill(rings.out, taken * kind.CONSUMERS + c, state, at)


@gluon.jit
def load_warp(views, state, rings, tile_queue, prefetch, kind):
    """Runs the producer warp: copies q, k, v and the o of the state of each tile of queries to shared memory."""
    keys = 0  # tiles of keys so far: uses of the rings k and v
    taken = 0
    place = pop_tile(tile_queue, 0)
    while place.tile >= 0:
        total = place.end - place.begin
        signal_prefetch(prefetch, taken, 0, total, AHEAD)
        head = place.head // kind.GROUP
        n, _ = tile_at(place, 0)
        if total > 0:  # before q, since the buffers of q are free only when the consumers finish the previous tile
            fill(rings.k, keys, views.k, [place.batch, n * kind.BLOCK_N, head, 0])
        for c in gl.static_range(kind.CONSUMERS):
            at = [place.batch, (place.tile * kind.CONSUMERS + c) * kind.ROWS, place.head, 0]
            fill(rings.q, taken * kind.CONSUMERS + c, views.q, at)
        if total > 0:
            fill(rings.v, keys, views.v, [place.batch, n * kind.BLOCK_N, head, 0])
        if not kind.FIRST and total < 2:
            _copy_state(state, rings, place, taken, kind)
        for i in range(1, total):
            signal_prefetch(prefetch, taken, i, total, AHEAD)
            n, _ = tile_at(place, i)
            at = [place.batch, n * kind.BLOCK_N, head, 0]
            fill(rings.k, keys + i, views.k, at)
            fill(rings.v, keys + i, views.v, at)
            if not kind.FIRST and i == 1:
                _copy_state(state, rings, place, taken, kind)
        keys += total
        release(tile_queue, taken)
        taken += 1
        place = pop_tile(tile_queue, taken)


@gluon.jit
def _softmax(s, m, l, scale, first, stop, row, MASKED: gl.constexpr, kind):  # noqa: E741
    """Computes the probabilities of the scores `s` of the keys from `row` on, and updates the online softmax.

    Returns:
        p in float32, the new m and l, and the factor for the rows of O.
    """
    S: gl.constexpr = matmul_layout(kind.BLOCK_N)
    if MASKED:
        keys = row + gl.arange(0, kind.BLOCK_N, gl.SliceLayout(0, S))
        if FEW_REGISTERS and (kind.TURNS or not kind.OVERLAPS) and not (kind.BELOW and kind.ABOVE):
            keys, first, stop = relative(keys, first, stop, kind.BLOCK_N)
        s = where_seen(s, keys, first, stop, float("-inf"), kind.BELOW, kind.ABOVE)
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    shift = m_new
    if MASKED:  # for rows that saw no key yet: -inf minus -inf is NaN
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale - shift[:, None])
    rescale = gl.exp2(m - shift)
    l = l * rescale + gl.sum(p, 1)  # noqa: E741
    return p, m_new, l, rescale


@gluon.jit
def _start_values(p, acc, keys, rings, DTYPE: gl.constexpr, kind):
    """Issues acc + P v of tile `keys`, a use of the ring v; `p` is a result of `pack_operand`."""
    if FEW_REGISTERS or not kind.OVERLAPS:  # descriptors of v are made after the wait, not before
        wait_full(rings.v, keys)
        v = buffer_of(rings.v, opaque_index(keys)).reshape([kind.BLOCK_N, kind.BLOCK_D])
    else:
        v = filled(rings.v, keys, kind.BLOCK_N, kind.BLOCK_D)
    return start_sums(unpack_operand(p, DTYPE, operand_layout(width_of(kind.WIDTHS, 0))), v, acc, kind.WIDTHS)


@gluon.jit
def _add_values(p, acc, keys, rings, DTYPE: gl.constexpr, kind):
    """Returns acc + P v of tile `keys`, and releases v."""
    acc = _start_values(p, acc, keys, rings, DTYPE, kind)
    acc = wait_parts(0, acc, kind.WIDTHS)
    release(rings.v, keys)
    return acc


@gluon.jit
def _step(C: gl.constexpr, q, p, acc, m, l, keys, row, first, stop, scale, rings, isolated, MASKED: gl.constexpr, kind):  # noqa: E741
    """Computes the scores of tile `keys`, adds P v of tile `keys` - 1 to `acc`, and returns the new P.

    `keys` is a use of the rings k and v, and `row` the first key of its tile. The file's docstring gives the order.
    """
    S: gl.constexpr = matmul_layout(kind.BLOCK_N)
    OPERAND: gl.constexpr = operand_layout(width_of(kind.WIDTHS, 0))
    IN_FLIGHT: gl.constexpr = count(kind.WIDTHS) if kind.OVERLAPS else 0
    if MASKED and isolated:
        isolate_values(C, rings, keys, kind)
    if not kind.OVERLAPS:
        acc = _add_values(p, acc, keys - 1, rings, q.dtype, kind)
    k = filled(rings.k, keys, kind.BLOCK_N, kind.BLOCK_D)
    zeros = gl.zeros([kind.ROWS, kind.BLOCK_N], gl.float32, S)
    if kind.TURNS:
        scheduler_barrier_wait(C)
    s = start_scores(q, k, zeros, False, kind.WIDTHS)
    if kind.OVERLAPS:
        acc = _start_values(p, acc, keys - 1, rings, q.dtype, kind)
    if kind.TURNS:
        scheduler_barrier_arrive(C, kind.CONSUMERS)
    s = warpgroup_mma_wait(IN_FLIGHT, deps=[s])
    release(rings.k, keys)
    p, m, l, rescale = _softmax(s, m, l, scale, first, stop, row, MASKED, kind)  # noqa: E741
    if kind.OVERLAPS:
        acc = wait_parts(0, acc, kind.WIDTHS)
        release(rings.v, keys - 1)
    acc = scale_rows(acc, rescale, kind.WIDTHS)
    return pack_operand(p, q.dtype, OPERAND, kind.LOOPS), acc, m, l


@gluon.jit
def _pass_over(C: gl.constexpr, keys, rings, kind):
    """Releases tile `keys` of k and v unread, and takes part in the issue order as `_step` does."""
    wait_full(rings.k, keys)  # an earlier arrival could count for the previous use of the stage
    release(rings.k, keys)
    wait_full(rings.v, keys)
    release(rings.v, keys)
    if kind.TURNS:
        scheduler_barrier_wait(C)
        scheduler_barrier_arrive(C, kind.CONSUMERS)


@gluon.jit
def _attend(C: gl.constexpr, q, acc, m, l, keys, use, place, first, stop, unseen, scale, rings, kind):  # noqa: E741
    """Accumulates the processed tiles of keys, except the first `unseen`, into (acc, m, l).

    `keys` is the use of the rings k and v at the first tile. `use` is this consumer's use of the rings q and out.
    """
    S: gl.constexpr = matmul_layout(kind.BLOCK_N)
    OPERAND: gl.constexpr = operand_layout(width_of(kind.WIDTHS, 0))
    isolated = place.repeated != 0
    begin = 0
    if kind.PASS_OVER:
        begin = gl.where(isolated, 0, gl.minimum(unseen, place.end - place.begin - 1))
        for i in range(begin):
            _pass_over(C, keys + i, rings, kind)
    if kind.MASKED and isolated:
        if kind.FIRST:
            wait_written()  # the results of the first time are in memory, before this time's are stored
        isolate_values(C, rings, keys + begin, kind)
    k = filled(rings.k, keys + begin, kind.BLOCK_N, kind.BLOCK_D)
    zeros = gl.zeros([kind.ROWS, kind.BLOCK_N], gl.float32, S)
    s = start_scores(q, k, zeros, False, kind.WIDTHS)
    s = warpgroup_mma_wait(0, deps=[s])
    release(rings.k, keys + begin)
    n, _ = tile_at(place, begin)  # masked even if every row sees all of this tile
    p, m, l, rescale = _softmax(s, m, l, scale, first, stop, n * kind.BLOCK_N, kind.MASKED, kind)  # noqa: E741
    p = pack_operand(p, q.dtype, OPERAND, kind.LOOPS)
    if not kind.FIRST:
        wait_full(rings.out, use)
        acc = load_parts(buffer_of(rings.out, C).reshape([kind.ROWS, kind.BLOCK_D]), kind.WIDTHS)
        acc = scale_rows(acc, rescale, kind.WIDTHS)
    begin_full = 0
    total = place.end - place.begin
    if kind.MASKED:
        begin_full = masked_visits(place)
        for i in range(begin + 1, begin_full):
            n, _ = tile_at(place, i)
            row = n * kind.BLOCK_N
            p, acc, m, l = _step(C, q, p, acc, m, l, keys + i, row, first, stop, scale, rings, isolated, True, kind)  # noqa: E741
    for i in range(gl.maximum(begin_full, begin + 1), total):
        p, acc, m, l = _step(C, q, p, acc, m, l, keys + i, 0, first, stop, scale, rings, isolated, False, kind)  # noqa: E741
    keys += total
    if not kind.OUT_IN_Q:
        release(rings.q, use)
    return _add_values(p, acc, keys - 1, rings, q.dtype, kind), m, l, keys


@gluon.jit
def _rows_of(C: gl.constexpr, place, rows, bounds, kind):
    """Locates the queries of consumer `C` in a tile, and the keys that they see.

    Returns:
        The first query, all queries, and for each query the first key that it sees and one past the last key. The last
        number counts the tiles of keys, from the first processed one on, that none of these queries sees. Tiles on a
        diagonal are processed from the last to the first, and the queries of the first consumers see fewer of them.
    """
    S: gl.constexpr = matmul_layout(kind.BLOCK_N)
    row = (place.tile * kind.CONSUMERS + C) * kind.ROWS
    queries = row + gl.arange(0, kind.ROWS, gl.SliceLayout(1, S))
    first, stop = queries, queries  # not read without a mask
    unseen = 0
    if kind.MASKED:
        first, stop = bounds_of(bounds, place.batch, queries, queries < rows.seqlen)
    if kind.PASS_OVER:
        last = gl.minimum(row + kind.ROWS, rows.seqlen) - 1
        _, end = bounds_of(bounds, place.batch, last, last < rows.seqlen)  # the largest: ends never fall
        unseen = gl.minimum(gl.maximum(place.end - gl.cdiv(end, kind.BLOCK_N), 0), place.end - place.full_end)
    return row, queries, first, stop, unseen


@gluon.jit
def mma_warpgroup(C: gl.constexpr, views, state, rings, rows, bounds, tile_queue, checks, scale, kind):
    """Runs consumer `C`: the attention of 64 queries of each tile."""
    S: gl.constexpr = matmul_layout(kind.BLOCK_N)
    keys = 0
    taken = 0
    if kind.TURNS and C == kind.CONSUMERS - 1:
        scheduler_barrier_arrive(C, kind.CONSUMERS)  # lets consumer 0 issue first: no consumer is before it
    place = pop_tile(tile_queue, 0)
    row, queries, first, stop, unseen = _rows_of(C, place, rows, bounds, kind)
    while place.tile >= 0:
        inside = queries < rows.seqlen
        vector = (place.batch * rows.heads + place.head) * rows.seqlen + queries  # into m, l and lse
        use = taken * kind.CONSUMERS + C
        if kind.FIRST:
            m = gl.full([kind.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
            l = gl.zeros([kind.ROWS], gl.float32, gl.SliceLayout(1, S))  # noqa: E741
        else:
            m = gl.load(rows.m + vector, mask=inside, other=float("-inf"))
            l = gl.load(rows.l + vector, mask=inside, other=0.0)  # noqa: E741
        acc = zero_parts(kind.ROWS, kind.WIDTHS)  # `_attend` loads o of the state later
        q = filled(rings.q, use, kind.ROWS, kind.BLOCK_D)
        if place.end > place.begin:
            acc, m, l, keys = _attend(C, q, acc, m, l, keys, use, place, first, stop, unseen, scale, rings, kind)  # noqa: E741
        else:
            if not kind.FIRST:
                acc = load_parts(filled(rings.out, use, kind.ROWS, kind.BLOCK_D), kind.WIDTHS)
            if not kind.OUT_IN_Q:
                release(rings.q, use)

        if not kind.FIRST:  # computed again, since registers are too few to keep these
            place = pop_tile(tile_queue, taken)
            row = (place.tile * kind.CONSUMERS + C) * kind.ROWS
            queries = row + gl.arange(0, kind.ROWS, gl.SliceLayout(1, S))
            inside = queries < rows.seqlen
            vector = (place.batch * rows.heads + place.head) * rows.seqlen + queries
        at = [place.batch, row, place.head, 0]
        stores = True
        if kind.MASKED and kind.FIRST:
            report(C, checks, taken, row_checks(acc, kind.WIDTHS), kind.CONSUMERS)
        elif kind.MASKED:  # a repeat reads the state again
            stores = ask_for_repeat(C, checks, taken, place, lost_finite(acc, kind.WIDTHS), kind.CONSUMERS)
            inside &= stores
        release(tile_queue, taken)
        taken += 1
        place = pop_tile(tile_queue, taken)  # now: its bounds load while the results are stored
        row, queries, first, stop, unseen = _rows_of(C, place, rows, bounds, kind)
        buffer = buffer_of(rings.out, C)
        if kind.FIRST and not kind.OUT_IN_Q:  # the previous tile's store may still read the buffer
            tma.store_wait(0)
        if kind.LAST:
            fully_masked = l == 0.0
            divisor = gl.where(fully_masked, 1.0, l)
            lse = (m + gl.log2(divisor)) * 0.6931471805599453
            gl.store(rows.lse + vector, gl.where(fully_masked, float("-inf"), lse), mask=inside)
            acc = scale_rows(acc, 1.0 / divisor, kind.WIDTHS)
            if not kind.FIRST:
                buffer = reinterpret(buffer, views.out.dtype, views.out.block_shape, views.out.layout)
            if kind.FIRST or not kind.MASKED or stores:
                store_parts(buffer.reshape([kind.ROWS, kind.BLOCK_D]), acc, kind.WIDTHS)
                fence_async_shared()
                copy_from_shared(views.out, at, buffer)
        else:
            gl.store(rows.m + vector, m, mask=inside)
            gl.store(rows.l + vector, l, mask=inside)
            if kind.FIRST or not kind.MASKED or stores:
                store_parts(buffer.reshape([kind.ROWS, kind.BLOCK_D]), acc, kind.WIDTHS)
                fence_async_shared()
                copy_from_shared(state, at, buffer)
        if kind.OUT_IN_Q or not kind.FIRST:
            tma.store_wait(0)
        if kind.OUT_IN_Q:
            release(rings.q, use)
        elif not kind.FIRST:
            release(rings.out, use)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seqlen_q", *Sizes._fields])
def _forward_kernel(
    q, k, v, out, state, m, l, lse, seqlen_q, scale, tables, bounds_stride, tiles_stride, ntiles, heads, all_heads,  # noqa: E741
    heads_per_wave, kind,
):  # fmt: skip
    bounds = Bounds(tables.bounds, bounds_stride)
    work = Work(tables.tiles, tiles_stride, tables.order, tables.counter, ntiles, heads, all_heads, heads_per_wave)
    views = Tiles(q, k, v, out)
    barriers = make_barriers(4 * kind.CONSUMERS + 4 * kind.STAGES + 8)
    queries = make_tiles(q, kind.CONSUMERS)
    keys = make_tiles(k, 2 * kind.STAGES)
    q_ring = make_ring(queries, barriers, 0, 0, kind.CONSUMERS, 1)
    out_ring = q_ring
    if not kind.OUT_IN_Q:
        of_out = out if kind.FIRST and kind.LAST else state
        outs = make_tiles(of_out, kind.CONSUMERS)
        out_ring = make_ring(outs, barriers, 0, 2 * kind.CONSUMERS, kind.CONSUMERS, 1)
    k_ring = make_ring(keys, barriers, 0, 4 * kind.CONSUMERS, kind.STAGES, kind.CONSUMERS)
    v_ring = make_ring(keys, barriers, kind.STAGES, 4 * kind.CONSUMERS + 2 * kind.STAGES, kind.STAGES, kind.CONSUMERS)
    rings = Tiles(q_ring, k_ring, v_ring, out_ring)
    rows = Rows(m, l, lse, heads, seqlen_q)
    tile_queue = make_tile_queue(barriers, 4 * kind.CONSUMERS + 4 * kind.STAGES, kind.CONSUMERS + 1)
    checks = make_checks(kind.CONSUMERS, 32 if kind.FIRST else 1)
    prefetch = make_prefetch_ring(barriers, 4 * kind.CONSUMERS + 4 * kind.STAGES + 4)
    fence_async_shared()
    if kind.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (mma_warpgroup, (0, views, state, rings, rows, bounds, tile_queue, checks, scale, kind)),
                (mma_warpgroup, (1, views, state, rings, rows, bounds, tile_queue, checks, scale, kind)),
                (load_warp, (views, state, rings, tile_queue, prefetch, kind)),
                (scheduler_warp, (work, tile_queue, prefetch, False, checks, kind.CONSUMERS if kind.MASKED else 0)),
            ],
            [4, 1, 1],
            [kind.REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (mma_warpgroup, (0, views, state, rings, rows, bounds, tile_queue, checks, scale, kind)),
                (mma_warpgroup, (1, views, state, rings, rows, bounds, tile_queue, checks, scale, kind)),
                (mma_warpgroup, (2, views, state, rings, rows, bounds, tile_queue, checks, scale, kind)),
                (load_warp, (views, state, rings, tile_queue, prefetch, kind)),
                (scheduler_warp, (work, tile_queue, prefetch, False, checks, kind.CONSUMERS if kind.MASKED else 0)),
            ],
            [4, 4, 1, 1],
            [kind.REGISTERS, kind.REGISTERS, 24, 24],
        )


KERNEL = _forward_kernel
