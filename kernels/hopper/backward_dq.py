"""dQ of one hop for sm_90, for the deterministic backward: each row is summed by one warpgroup, in one order.

A program owns 128 queries of one head at a time, 64 for each of two warpgroups, and streams the keys that they see:
first the tiles that need a mask. Shapes as in `backward`, whose dK and dV are the other half.

    S = q k^T - lse / softmax_scale, P = 2^(S softmax_scale log2 e), dS = P * (dout v^T - delta)
    dq = softmax_scale dS k

The product of dS with the keys is issued one tile late, so that it runs while the next dS is made.
"""

# Gluon's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ringflash.kernels.hopper.config import ROWS, dq_config
from ringflash.kernels.hopper.intervals import intervals
from ringflash.kernels.hopper.pipeline import (
    Bounds,
    Sizes,
    Work,
    arrived,
    bounds_of,
    carried,
    constants,
    draw,
    fill,
    filled,
    fixed,
    hear,
    keep_pace,
    leave,
    make_barriers,
    make_mailbox,
    make_pace,
    make_ring,
    make_tiles,
    masked_visits,
    store_rows,
    visit,
    where_seen,
    work_arguments,
)
from ringflash.kernels.hopper.views import tile_view
from ringflash.kernels.meeting import Meeting


class Tiles(NamedTuple):
    """What is copied tile by tile, in memory as views, in shared memory as rings."""

    q: Any
    dout: Any
    k: Any
    v: Any


class Rows(NamedTuple):
    """A number for each row of q, and the result, contiguous; of how many heads and rows."""

    lse: Any
    delta: Any
    dq: Any
    heads: Any
    seqlen: Any


class Kind(NamedTuple):
    """What the kernel is compiled for, all constexpr."""

    MASKED: Any
    LOOPS: Any
    BELOW: Any
    ABOVE: Any
    ACCUMULATE: Any
    GROUP: Any
    HEADDIM: Any
    BLOCK_D: Any
    BLOCK_N: Any
    STAGES: Any
    ROWS: Any


AHEAD = gl.constexpr(4)  # tiles of keys: what is left to copy when the next tile of queries is drawn


@gluon.jit
def _copy_keys(views, rings, place, i, use, kind):
    """The `i`-th tile of keys that is visited."""
    n, _ = visit(place, i)
    at = [place.batch, n * kind.BLOCK_N, place.head // kind.GROUP, 0]
    fill(rings.k, use, views.k, at)
    fill(rings.v, use, views.v, at)


@gluon.jit
def _produce(views, rings, mailbox, pace, kind):
    """One warp's role: copies what the consumers need."""
    keys = 0  # tiles of them so far
    taken = 0
    place = hear(mailbox, 0)
    while place.tile >= 0:
        total = place.end - place.begin
        keep_pace(pace, taken, 0, total, AHEAD)
        if total > 0:  # before the queries, for whose buffers the consumers' last tile is waited for
            _copy_keys(views, rings, place, 0, keys, kind)
        for c in gl.static_range(2):
            at = [place.batch, (place.tile * 2 + c) * kind.ROWS, place.head, 0]
            fill(rings.q, taken * 2 + c, views.q, at)
            fill(rings.dout, taken * 2 + c, views.dout, at)
        for i in range(1, total):
            keep_pace(pace, taken, i, total, AHEAD)
            _copy_keys(views, rings, place, i, keys + i, kind)
        keys += total
        leave(mailbox, taken)
        taken += 1
        place = hear(mailbox, taken)


@gluon.jit
def _step(q, dout, minus_lse, minus_delta, ds, dq, keys, row, first, stop, scale, rings, MASKED: gl.constexpr,
          BEGINS: gl.constexpr, kind):  # fmt: skip
    """dS of the tile that is number `keys`, and dq of the one before, unless it begins."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    shape = gl.zeros([kind.ROWS, kind.BLOCK_N], gl.float32, S)
    k = filled(rings.k, keys, kind.BLOCK_N, kind.BLOCK_D)
    v = filled(rings.v, keys, kind.BLOCK_N, kind.BLOCK_D)
    of_lse, _ = gl.broadcast(minus_lse[:, None], shape)
    of_delta, _ = gl.broadcast(minus_delta[:, None], shape)
    of_delta = fixed(of_delta)
    s = warpgroup_mma(q, k.permute((1, 0)), of_lse, is_async=True)
    dp = warpgroup_mma(dout, v.permute((1, 0)), of_delta, is_async=True)
    if BEGINS:
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        before = filled(rings.k, keys - 1, kind.BLOCK_N, kind.BLOCK_D)
        dq = warpgroup_mma(arrived(ds, q.dtype, OPERAND), before, dq, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s])
    p = gl.exp2(s * scale)
    if MASKED:
        columns = row + gl.arange(0, kind.BLOCK_N, gl.SliceLayout(0, S))
        p = where_seen(p, columns, first, stop, 0.0, kind.BELOW, kind.ABOVE)
    dp = warpgroup_mma_wait(0 if BEGINS else 1, deps=[dp])
    leave(rings.v, keys)
    new = carried(p * dp, q.dtype, OPERAND, kind.LOOPS)
    if not BEGINS:
        dq = warpgroup_mma_wait(0, deps=[dq])
        leave(rings.k, keys - 1)
    return new, dq


@gluon.jit
def _consume(C: gl.constexpr, rings, rows, bounds, mailbox, scale, softmax_scale, kind):
    """A warpgroup's role: dq of 64 queries of each tile."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    keys = 0
    taken = 0
    place = hear(mailbox, 0)
    while place.tile >= 0:
        queries = (place.tile * 2 + C) * kind.ROWS + gl.arange(0, kind.ROWS, gl.SliceLayout(1, S))
        inside = queries < rows.seqlen
        vector = (place.batch * rows.heads + place.head) * rows.seqlen + queries
        minus_lse = gl.load(rows.lse + vector, mask=inside, other=float("inf")) * (-1.0 / softmax_scale)
        minus_delta = -gl.load(rows.delta + vector, mask=inside, other=0.0)
        first, stop = queries, queries  # not read
        if kind.MASKED:
            first, stop = bounds_of(bounds, place.batch, queries, inside)
        dq = gl.zeros([kind.ROWS, kind.BLOCK_D], gl.float32, A)
        use = taken * 2 + C
        q = filled(rings.q, use, kind.ROWS, kind.BLOCK_D)
        dout = filled(rings.dout, use, kind.ROWS, kind.BLOCK_D)
        if place.end > place.begin:
            n, _ = visit(place, 0)  # it may be one that every row sees whole
            row = n * kind.BLOCK_N
            ds, dq = _step(
                q, dout, minus_lse, minus_delta, q, dq, keys, row, first, stop, scale, rings, kind.MASKED, True, kind
            )
            begin_full = 0
            total = place.end - place.begin
            if kind.MASKED:
                begin_full = masked_visits(place)
                for i in range(1, begin_full):
                    n, _ = visit(place, i)
                    row = n * kind.BLOCK_N
                    ds, dq = _step(
                        q, dout, minus_lse, minus_delta, ds, dq, keys + i, row, first, stop, scale, rings, True, False,
                        kind,
                    )  # fmt: skip
            for i in range(gl.maximum(begin_full, 1), total):
                ds, dq = _step(
                    q, dout, minus_lse, minus_delta, ds, dq, keys + i, 0, first, stop, scale, rings, False, False, kind
                )
            keys += total
            last = filled(rings.k, keys - 1, kind.BLOCK_N, kind.BLOCK_D)
            dq = warpgroup_mma(arrived(ds, q.dtype, OPERAND), last, dq, is_async=True)
            leave(rings.q, use)
            leave(rings.dout, use)
            dq = warpgroup_mma_wait(0, deps=[dq])
            leave(rings.k, keys - 1)
        else:
            leave(rings.q, use)
            leave(rings.dout, use)
        store_rows(rows.dq, dq * softmax_scale, place, C, rows.heads, rows.seqlen, kind)
        leave(mailbox, taken)
        taken += 1
        place = hear(mailbox, taken)


@gluon.jit(do_not_specialize=["seqlen_q", *Sizes._fields])
def _dq_kernel(
    q,
    dout,
    k,
    v,
    lse,
    delta,
    dq,
    seqlen_q,
    scale,
    softmax_scale,
    tables,
    bounds_stride,
    tiles_stride,
    ntiles,
    heads,
    all_heads,
    together,
    kind,
):
    bounds = Bounds(tables.bounds, bounds_stride)
    work = Work(tables.tiles, tiles_stride, tables.order, tables.counter, ntiles, heads, all_heads, together)
    views = Tiles(q, dout, k, v)
    queries = make_tiles(q, 4)
    keys = make_tiles(k, 2 * kind.STAGES)
    barriers = make_barriers(16 + 4 * kind.STAGES)
    rings = Tiles(
        make_ring(queries, barriers, 0, 0, 2, 1),
        make_ring(queries, barriers, 2, 4, 2, 1),
        make_ring(keys, barriers, 0, 8, kind.STAGES, 2),
        make_ring(keys, barriers, kind.STAGES, 8 + 2 * kind.STAGES, kind.STAGES, 2),
    )
    mailbox = make_mailbox(barriers, 8 + 4 * kind.STAGES, 3)
    pace = make_pace(barriers, 12 + 4 * kind.STAGES)
    rows = Rows(lse, delta, dq, heads, seqlen_q)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, rings, rows, bounds, mailbox, scale, softmax_scale, kind)),
            (_consume, (1, rings, rows, bounds, mailbox, scale, softmax_scale, kind)),
            (_produce, (views, rings, mailbox, pace, kind)),
            (draw, (work, mailbox, pace)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def backward_dq(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    meeting: Meeting,
    *,
    accumulate: bool,
) -> None:
    """One hop's dq; see `TileKernels.backward_dq`. lse, delta and dq are contiguous."""
    batch, seqlen_q, nheads, headdim = q.shape
    config = dq_config(headdim)
    own = 2 * ROWS
    known = intervals(meeting.mask, meeting.q_chunks, meeting.k_chunks, own, config.block_n, q.device, by_keys=False)
    group = nheads // k.shape[2]  # whose heads stream the same
    streamed = 2 * k.shape[1] * headdim * k.itemsize // group
    tables, sizes, programs = work_arguments(known, batch, nheads, streamed, q.device)
    kind = Kind(
        MASKED=known.masked,
        LOOPS=1 + known.masked,
        BELOW=known.below,
        ABOVE=known.above,
        ACCUMULATE=accumulate,
        GROUP=group,
        HEADDIM=headdim,
        BLOCK_D=config.block_d,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        ROWS=ROWS,
    )
    _dq_kernel[(programs,)](
        *(tile_view(x, ROWS, config.block_d) for x in (q, dout)),
        *(tile_view(x, config.block_n, config.block_d) for x in (k, v)),
        lse, delta, dq, seqlen_q, meeting.scoring.to_base2, meeting.scoring.softmax_scale, tables, *sizes,
        constants(kind), num_warps=4,
    )  # fmt: skip
