"""Steps of the Hopper backward: what its two consumer warpgroups compute from one tile of queries.

The consumers share out the work of a tile in one of two ways. `backward.py` has the symbols and the formulas.

    by keys         Each owns 64 of 128 keys and computes dk and dv of these. P^T and dS^T are operands of dv and dk
                    straight from registers. dq needs dS of both consumers, through shared memory.
    by gradients    Both own the same 64 keys (`BY_GRADIENT`). Consumer 0 computes P^T and dv, consumer 1 dP^T, dS^T and
                    dk. P passes from 0 to 1 through shared memory, in the order of registers, and dS from 1 to both.

In heads wider than 128, dk and dv of 64 keys fill the registers of two consumers. Each consumer could own only 32 of
these keys, or compute half of the columns of dk and dv. Either would take more reads of shared memory, as the scores'
matmuls would be half as large, or be computed by both.

dq of a tile is computed during the next tile, in pieces of 64 rows and `PIECES` columns: piece `C` by consumer `C`, and
with `BY_GRADIENT` piece `C + 2` too. A consumer has one buffer for its pieces. Between its two pieces are other
matmuls, during which the first is added to memory.
"""

# Gluon's DSL is not Python to a type checker.
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
    matmul_layout,
    operand_layout,
    start_scores,
    start_sums,
    wait_parts,
    width_of,
)
from ringflash.kernels.hopper.dq_accumulator import arranged, in_rows, pass_dq
from ringflash.kernels.hopper.isolation import isolate_queries
from ringflash.kernels.hopper.pipeline import (
    buffer_of,
    filled,
    fixed,
    full_barrier,
    opaque_index,
    relative,
    release,
    slot_of,
    wait_full,
    where_seen,
)
from ringflash.kernels.versions import FEW_REGISTERS


class Shared(NamedTuple):
    """Shared memory: rings of the inputs, of P, of dS, of dq and of tiles.

    `numbers` holds -lse for each stage of q, then -delta for each stage of dout. A stage of `ds` has two halves, one
    from each consumer; with `BY_GRADIENT` it is whole, from consumer 1. The empty barriers of `ds` are not used. Before
    a consumer writes dS(i + 3), both have written dS(i + 2), and so have finished dq(i), which reads dS(i). So
    `BackwardConfig` asks for three stages or more. With `BY_GRADIENT` two stages suffice: before consumer 1 writes
    dS(i + 2), it waits for P(i + 2), which consumer 0 writes after dq(i). The one stage of `p`, used only then, is free
    for P(i + 1) once dS(i) is written.
    `parts` are buffers for dk and dv on their way to global memory, in memory of `ds` or `dq`.
    """

    q: Any
    dout: Any
    k: Any
    v: Any
    numbers: Any
    p: Any
    ds: Any
    parts: Any
    dq: Any
    tile_queue: Any


STAGES = gl.constexpr(2)  # stages of q, and of dout unless BY_GRADIENT; shared memory has no room for a third


@gluon.jit
def _of_keys(ring, c: gl.constexpr, kind):
    """Returns buffer `c` of the ring k or v. The opaque index keeps its descriptors out of registers between steps.

    With `BY_GRADIENT` the ring has one stage, and the compiler knows the slot of any index.
    """
    buffer = ring.buffers.index(opaque_index(ring.BUFFER)) if kind.BY_GRADIENT else buffer_of(ring, opaque_index(c))
    return buffer.reshape([kind.ROWS, kind.BLOCK_D])


@gluon.jit
def start_dq(PIECE: gl.constexpr, i, shared, kind):
    """Issues the matmuls of a piece of dq of tile `i` of queries: columns, or half of the rows if BLOCK_D is 64."""
    COLUMNS: gl.constexpr = width_of(kind.PIECES, PIECE)
    dq = gl.zeros([64, COLUMNS], gl.float32, matmul_layout(COLUMNS))
    for c in gl.static_range(kind.KEY_PARTS):
        ds = shared.ds.buffers.index(slot_of(i, kind.DS_STAGES) * kind.KEY_PARTS + c)
        k = _of_keys(shared.k, c, kind)
        if kind.BLOCK_D == 64:
            ds = ds.slice(PIECE * 64, 64, 1)
        else:
            k = k.slice(PIECE * 64, COLUMNS, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def _numbers_of(shared, i, FIRST: gl.constexpr, COUNT: gl.constexpr, S: gl.constexpr):
    """Loads -lse (FIRST = 0) or -delta (FIRST = STAGES) of tile `i`; there are `COUNT` stages.

    With an `i` from `opaque_index`, the compiler cannot load early and hold the numbers in registers.
    """
    return shared.numbers.index(FIRST + slot_of(i, COUNT)).load(gl.SliceLayout(0, S))


@gluon.jit
def _p_of(s, i, row, first, stop, gradients, shared, MASKED: gl.constexpr, S: gl.constexpr, kind):
    """Returns P^T of tile `i` from the result of the matmul of S^T, with zeros at masked pairs."""
    if kind.PRELOADED:
        p = gl.exp2(s * gradients.scale)
    else:
        p = gl.exp2(s * gradients.scale + _numbers_of(shared, opaque_index(i), 0, STAGES, S)[None, :])
    if MASKED:
        queries = row + gl.arange(0, kind.BLOCK_M, gl.SliceLayout(0, S))
        if FEW_REGISTERS:
            queries, first, stop = relative(queries, first, stop, kind.BLOCK_M)
        p = where_seen(p, queries, first, stop, 0.0, kind.BELOW, kind.ABOVE)
    return p


@gluon.jit
def _ds_of(p, dp, gradients, MASKED: gl.constexpr, kind):
    """Returns dS^T = P^T * dP^T, with zeros where P is 0."""
    ds = p * dp
    if MASKED and (kind.CHECKED or gradients.lost < 0):
        ds = gl.where(p == 0.0, 0.0, ds)  # dP may be NaN or infinite at masked pairs
    return ds


@gluon.jit
def _step_of_keys(
    C: gl.constexpr, i, row, dk, dv, first, stop, gradients, shared, MASKED: gl.constexpr, BEGINS: gl.constexpr, kind
):
    """`step` of consumers that share out the keys."""
    S: gl.constexpr = matmul_layout(kind.BLOCK_M)
    OPERAND: gl.constexpr = operand_layout(width_of(kind.WIDTHS, 0))
    PARTS: gl.constexpr = count(kind.WIDTHS)  # matmuls of S, dP, dv and dk each; dq has two
    shape = gl.zeros([kind.ROWS, kind.BLOCK_M], gl.float32, S)
    k = _of_keys(shared.k, C, kind)
    v = _of_keys(shared.v, C, kind)
    q = filled(shared.q, i, kind.BLOCK_M, kind.BLOCK_D)
    dout = filled(shared.dout, i, kind.BLOCK_M, kind.BLOCK_D)
    if MASKED and gradients.lost < 0:
        isolate_queries(C, shared, i, STAGES, kind)
    if kind.PRELOADED:
        minus_lse, _ = gl.broadcast(_numbers_of(shared, i, 0, STAGES, S)[None, :], shape)
        minus_delta, _ = gl.broadcast(_numbers_of(shared, i, STAGES, kind.DOUT_STAGES, S)[None, :], shape)
        minus_delta = fixed(minus_delta)
        s = start_scores(k, q, minus_lse, True, kind.WIDTHS)
        dp = start_scores(v, dout, minus_delta, True, kind.WIDTHS)
    else:
        s = start_scores(k, q, shape, False, kind.WIDTHS)
        dp = start_scores(v, dout, shape, False, kind.WIDTHS)
    s = warpgroup_mma_wait(PARTS, deps=[s])
    p = _p_of(s, i, row, first, stop, gradients, shared, MASKED, S, kind)
    p_operand = gl.convert_layout(p.to(q.dtype), OPERAND)
    dp = warpgroup_mma_wait(0, deps=[dp])
    if not kind.PRELOADED:
        dp = dp + _numbers_of(shared, opaque_index(i), STAGES, kind.DOUT_STAGES, S)[None, :]
    ds = _ds_of(p, dp, gradients, MASKED, kind)
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
        dq = start_dq(C, i - 1, shared, kind)
        dk = start_sums(ds_operand, q, dk, kind.WIDTHS)
        dv = wait_parts(2 + PARTS, dv, kind.WIDTHS)  # the later matmuls are two of dq and those of dk
        release(shared.dout, i)
        dq = warpgroup_mma_wait(PARTS, deps=[dq])
        pass_dq(C, dq, i - 1, shared.dq, kind.PIECES)
    else:
        dk = start_sums(ds_operand, q, dk, kind.WIDTHS)
        dv = wait_parts(PARTS, dv, kind.WIDTHS)
        release(shared.dout, i)
    dk = wait_parts(0, dk, kind.WIDTHS)
    release(shared.q, i)
    return dk, dv


@gluon.jit
def _start_scores(keys, queries, i, FIRST: gl.constexpr, COUNT: gl.constexpr, shared, S: gl.constexpr, kind):
    """Issues the matmul of S^T from k and q, or of dP^T from v and dout; the rest is as in `_numbers_of`."""
    shape = gl.zeros([kind.ROWS, kind.BLOCK_M], gl.float32, S)
    if kind.PRELOADED:
        scores, _ = gl.broadcast(_numbers_of(shared, i, FIRST, COUNT, S)[None, :], shape)
        scores = start_scores(keys, queries, scores, True, kind.WIDTHS)
    else:
        scores = start_scores(keys, queries, shape, False, kind.WIDTHS)
    return scores


@gluon.jit
def _end_step(C: gl.constexpr, total, ring, i, shared, BEGINS: gl.constexpr, kind):
    """Waits for `total` (dv or dk), releases use `i` of `ring` (dout or q), and passes piece `C + 2` of dq(i - 1)."""
    if BEGINS:
        tma.store_wait(0)  # stores of the previous gradient may still read the buffer of dq, memory of `parts` too
        total = wait_parts(0, total, kind.WIDTHS)
        release(ring, i)
    else:
        dq = start_dq(C + 2, i - 1, shared, kind)
        total = wait_parts(1, total, kind.WIDTHS)
        release(ring, i)
        dq = warpgroup_mma_wait(0, deps=[dq])
        pass_dq(C + 2, dq, i - 1, shared.dq, kind.PIECES)
    return total


@gluon.jit
def _step_of_dv(i, row, dv, first, stop, gradients, shared, MASKED: gl.constexpr, BEGINS: gl.constexpr, kind):
    """`step` of consumer 0 with `BY_GRADIENT`: adds tile `i` to dv, and passes P to consumer 1."""
    S: gl.constexpr = matmul_layout(kind.BLOCK_M)
    k = _of_keys(shared.k, 0, kind)
    q = filled(shared.q, i, kind.BLOCK_M, kind.BLOCK_D)
    if MASKED and gradients.lost < 0:
        wait_full(shared.dout, i)
        isolate_queries(0, shared, i, STAGES, kind)
    s = _start_scores(k, q, i, 0, STAGES, shared, S, kind)
    if BEGINS:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        wait_full(shared.ds, i - 1)
        dq = start_dq(0, i - 1, shared, kind)
        s = warpgroup_mma_wait(1, deps=[s])
    p = _p_of(s, i, row, first, stop, gradients, shared, MASKED, S, kind)
    release(shared.q, i)
    buffer_of(shared.p, i).store(arranged(p))
    mbarrier.arrive(full_barrier(shared.p, i), count=1)
    p_operand = gl.convert_layout(p.to(q.dtype), operand_layout(kind.BLOCK_D))
    dout = filled(shared.dout, i, kind.BLOCK_M, kind.BLOCK_D)
    dv = start_sums(p_operand, dout, dv, kind.WIDTHS)
    if not BEGINS:
        dq = warpgroup_mma_wait(1, deps=[dq])
        pass_dq(0, dq, i - 1, shared.dq, kind.PIECES)
    return _end_step(0, dv, shared.dout, i, shared, BEGINS, kind)


@gluon.jit
def _step_of_dk(i, dk, gradients, shared, MASKED: gl.constexpr, BEGINS: gl.constexpr, kind):
    """`step` of consumer 1 with `BY_GRADIENT`: adds tile `i` to dk, with P from consumer 0.

    It passes its first piece of dq while consumer 0 computes P.
    """
    S: gl.constexpr = matmul_layout(kind.BLOCK_M)
    v = _of_keys(shared.v, 0, kind)
    wait_full(shared.dout, i)
    dout = shared.dout.buffers.index(opaque_index(shared.dout.BUFFER))  # as in `_of_keys`, likewise of one stage
    dout = dout.reshape([kind.BLOCK_M, kind.BLOCK_D])
    if MASKED and gradients.lost < 0:
        wait_full(shared.q, i)
        isolate_queries(1, shared, i, STAGES, kind)
    dp = _start_scores(v, dout, i, STAGES, kind.DOUT_STAGES, shared, S, kind)
    if BEGINS:
        dp = warpgroup_mma_wait(0, deps=[dp])
    else:
        dq = start_dq(1, i - 1, shared, kind)  # this consumer itself has written dS(i - 1)
        dp = warpgroup_mma_wait(1, deps=[dp])
    if not kind.PRELOADED:
        dp = dp + _numbers_of(shared, opaque_index(i), STAGES, kind.DOUT_STAGES, S)[None, :]
    release(shared.dout, i)
    if not BEGINS:
        dq = warpgroup_mma_wait(0, deps=[dq])
        pass_dq(1, dq, i - 1, shared.dq, kind.PIECES)
    wait_full(shared.p, i)
    dp = arranged(dp)
    p = buffer_of(shared.p, i).load(dp.type.layout)
    q = filled(shared.q, i, kind.BLOCK_M, kind.BLOCK_D)
    ds = in_rows(_ds_of(p, dp, gradients, MASKED, kind).to(q.dtype), S)
    ds_operand = gl.convert_layout(ds, operand_layout(kind.BLOCK_D))
    shared.ds.buffers.index(slot_of(i, kind.DS_STAGES)).store(ds)
    fence_async_shared()
    mbarrier.arrive(full_barrier(shared.ds, i), count=1)
    dk = start_sums(ds_operand, q, dk, kind.WIDTHS)
    return _end_step(1, dk, shared.q, i, shared, BEGINS, kind)


@gluon.jit
def step(
    C: gl.constexpr, i, row, dk, dv, first, stop, gradients, shared, MASKED: gl.constexpr, BEGINS: gl.constexpr, kind
):
    """Adds tile `i` of queries to (dk, dv), and computes `C`'s pieces of dq of tile i - 1. `i` is a use of q and dout.

    dk and dv are accumulators (`columns.py`) of ROWS rows; with `BY_GRADIENT` each consumer has one of them. `first`
    and `stop` (ROWS,) bound the queries that see each key, and `row` is the tile's first query; these are read only if
    MASKED, which is about this tile. `gradients.lost` is negative if any lse or delta is not finite. `BEGINS` marks the
    first tile of queries for these keys: a tile i - 1 belongs to earlier keys, and `mma_warpgroup` has computed its dq.
    Otherwise all of dS(i - 1) must be written before its dq is computed. Matmuls are issued as early as their operands
    allow, so that they overlap the arithmetic.
    """
    if not kind.BY_GRADIENT:
        dk, dv = _step_of_keys(C, i, row, dk, dv, first, stop, gradients, shared, MASKED, BEGINS, kind)
    elif C == 0:
        dv = _step_of_dv(i, row, dv, first, stop, gradients, shared, MASKED, BEGINS, kind)
    else:
        dk = _step_of_dk(i, dk, gradients, shared, MASKED, BEGINS, kind)
    return dk, dv
