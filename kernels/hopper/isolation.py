"""Isolation in the Hopper kernels: what storage holds at masked pairs changes no bit of a row's result.

A masked pair has weight 0, but 0 * NaN and 0 * Inf are NaN. So a matmul over a tile with masked pairs would pass a
NaN of one row on to rows that do not see it. Before such a tile is multiplied, elements that are not finite are
replaced in shared memory, by zeros, where that is needed:

    forward     A tile of queries that ends with a result that is not finite is processed again (`scheduler_warp`).
                Then each tile of keys that needs a mask is isolated first (`isolate_values`). The first hop stores
                both results, since consumers need not agree for that. Later hops add to a state in memory, and
                store only the result of the second time.
    backward    If a row sees or holds such an element, its lse or delta is not finite. The kernel that prepares them
                reports that in `lost` (`vectors.py`). Then each tile of queries that needs a mask is isolated, and so
                are the owned keys (`isolate_queries`, `isolate_keys`). Keys that no row of this device sees do not
                show in `lost`. Where there may be such keys, all keys are checked (`CHECKED`).

A row that sees an element that is not finite gets NaN another way. In the forward the score of a key is NaN if any of
its values is not finite. In the backward, lse or delta of that row is not finite. All sums keep their order, so rows
that see only finite elements get the same bits as without the others.
"""

# Gluon's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ringflash.kernels.hopper.columns import count
from ringflash.kernels.hopper.pipeline import buffer_of, slot_of, wait_full

AT_ONCE = gl.constexpr(2048)  # elements that a warpgroup loads at once: its accumulators leave few registers
BARRIER = gl.constexpr(12)  # a named barrier of all consumers; `pipeline.TURN` has the others


@gluon.jit
def has_not_finite(x):
    """Returns whether any element of a float32 tile (rows, columns) is NaN or infinite."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1] // 4
    parts = gl.sum((x * 0.0).reshape([ROWS, 4, COLUMNS]), 2)  # four sums at once, as each waits for its last addition
    return gl.sum(gl.sum(parts, 1), 0) != 0.0  # NaN differs from 0


@gluon.jit
def lost_finite(x, WIDTHS: gl.constexpr):
    """Returns whether any element of an accumulator is NaN or infinite; `columns.py` describes accumulators."""
    lost = has_not_finite(x[0])
    for P in gl.static_range(1, count(WIDTHS)):
        lost |= has_not_finite(x[P])
    return lost


@gluon.jit
def row_checks(x, WIDTHS: gl.constexpr):
    """Returns one int32 for each pair of rows of an accumulator (64, columns): not 0 if x has NaN or Inf there.

    It reads every second group of eight rows. That suffices because a value that is not finite spreads over a whole
    column of a matmul's result.
    """
    checks = _row_checks(x[0])
    for P in gl.static_range(1, count(WIDTHS)):
        checks |= gl.convert_layout(_row_checks(x[P]), checks.type.layout)
    return checks


@gluon.jit
def _row_checks(x):
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    half, _ = gl.split((x * 0.0).reshape([ROWS // 16, 2, 8, COLUMNS]).permute((0, 2, 3, 1)))
    of_rows = gl.sum(gl.sum(half.reshape([ROWS // 2, 4, COLUMNS // 4]), 2), 1)  # as in `has_not_finite`
    return (of_rows != 0.0).to(gl.int32)


@gluon.jit
def wait_written():
    """Waits until the TMA stores of this thread are in memory; `tma.store_wait` waits until their sources are read."""
    ASM: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _is_finite(x):
    return gl.abs(x.to(gl.float32)) < float("inf")


@gluon.jit
def _sync_consumers(CONSUMERS: gl.constexpr):
    """Blocks until all consumers have called this; their writes to shared memory are then visible to each other."""
    ASM: gl.constexpr = f"bar.sync {BARRIER}, {128 * CONSUMERS}; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [CONSUMERS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _zero_not_finite(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Writes zeros in place of NaN and Inf to a tile (ROWS, COLUMNS) of shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    for row in gl.static_range(0, ROWS, AT_ONCE // COLUMNS):
        rows = tile.slice(row, AT_ONCE // COLUMNS, 0)
        x = rows.load(LAYOUT)
        rows.store(gl.where(_is_finite(x), x, 0.0))


@gluon.jit
def isolate_values(C: gl.constexpr, rings, i, kind):
    """Isolates use `i` of the rings k and v; every consumer calls this.

    Elements of v that are not finite become zeros, and the rows of k with such values become NaN.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // kind.BLOCK_D, kind.BLOCK_D // 8], [4, 1], [1, 0])
    wait_full(rings.k, i)
    wait_full(rings.v, i)
    if C == 0:
        k = buffer_of(rings.k, i).reshape([kind.BLOCK_N, kind.BLOCK_D])
        v = buffer_of(rings.v, i).reshape([kind.BLOCK_N, kind.BLOCK_D])
        for row in gl.static_range(0, kind.BLOCK_N, AT_ONCE // kind.BLOCK_D):
            k_rows = k.slice(row, AT_ONCE // kind.BLOCK_D, 0)
            v_rows = v.slice(row, AT_ONCE // kind.BLOCK_D, 0)
            x = v_rows.load(LAYOUT)
            finite = gl.min(_is_finite(x).to(gl.int32), 1) != 0
            k_rows.store(gl.where(finite[:, None], k_rows.load(LAYOUT), float("nan")))
            v_rows.store(gl.where(_is_finite(x), x, 0.0))
        fence_async_shared()
    _sync_consumers(kind.CONSUMERS)


@gluon.jit
def isolate_keys(C: gl.constexpr, ring, kind):
    """Replaces NaN and Inf by zeros in the keys of consumer `C`, which wait in the ring k."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // kind.BLOCK_D, kind.BLOCK_D // 8], [4, 1], [1, 0])
    k = buffer_of(ring, C).reshape([kind.ROWS, kind.BLOCK_D])
    if has_not_finite(k.load(LAYOUT).to(gl.float32)):
        _zero_not_finite(k, kind.ROWS, kind.BLOCK_D)
        fence_async_shared()


@gluon.jit
def isolate_queries(C: gl.constexpr, shared, i, STAGES: gl.constexpr, kind):
    """Isolates use `i` of the rings q and dout; both consumers call this.

    Elements of q and dout that are not finite become zeros, and lse becomes NaN where delta is not finite.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if C == 0:
        lse_row = shared.numbers.index(slot_of(i, STAGES))
        minus_delta = shared.numbers.index(STAGES + slot_of(i, kind.DOUT_STAGES)).load(LAYOUT)
        lse_row.store(gl.where(_is_finite(minus_delta), lse_row.load(LAYOUT), float("nan")))
        _zero_not_finite(buffer_of(shared.q, i).reshape([kind.BLOCK_M, kind.BLOCK_D]), kind.BLOCK_M, kind.BLOCK_D)
    else:
        dout = buffer_of(shared.dout, i).reshape([kind.BLOCK_M, kind.BLOCK_D])
        _zero_not_finite(dout, kind.BLOCK_M, kind.BLOCK_D)
    fence_async_shared()
    _sync_consumers(2)
