"""Matmuls over the columns of heads, in parts: 96 columns as 64 and 32, because Gluon's shapes are powers of two.

A tile of shared memory is as wide as the next power of two, and TMA fills it with zeros past headdim. Matmuls leave out
the columns past the last part: at headdim 96 that is a quarter of their work.

`WIDTHS` of a kernel's constants are the widths of the parts, (64, 32) or one power of two. An accumulator (rows,
headdim) is a tuple with a float32 tensor for each part. `warpgroup_mma_wait` counts the matmul of each part.
"""

# Gluon's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def count(widths):
    """Returns the number of parts."""
    return len(widths)


@gluon.constexpr_function
def width_of(widths, part):
    """Returns the columns of part number `part`."""
    return widths[part]


@gluon.constexpr_function
def total_width(widths):
    """Returns the columns of all parts."""
    return sum(widths)


@gluon.constexpr_function
def matmul_layout(columns):
    """Returns the layout of the result of a warpgroup's matmul, 64 rows by `columns`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Returns the layout of a register operand whose product has `columns` columns."""
    return gl.DotOperandLayout(0, matmul_layout(columns), 2)


@gluon.jit
def part_of(tile, P: gl.constexpr, WIDTHS: gl.constexpr):
    """Returns part `P` of a tile (rows, columns) of shared memory; all parts before it have the width of the first."""
    if count(WIDTHS) > 1:
        tile = tile.slice(width_of(WIDTHS, 0) * P, width_of(WIDTHS, P), 1)
    return tile


@gluon.jit
def zero_parts(ROWS: gl.constexpr, WIDTHS: gl.constexpr):
    """Returns an accumulator of zeros."""
    x = ()
    for P in gl.static_range(count(WIDTHS)):
        x += (gl.zeros([ROWS, width_of(WIDTHS, P)], gl.float32, matmul_layout(width_of(WIDTHS, P))),)
    return x


@gluon.jit
def load_parts(tile, WIDTHS: gl.constexpr):
    """Loads a float32 tile of shared memory as an accumulator."""
    x = ()
    for P in gl.static_range(count(WIDTHS)):
        x += (part_of(tile, P, WIDTHS).load(matmul_layout(width_of(WIDTHS, P))),)
    return x


@gluon.jit
def store_parts(tile, x, WIDTHS: gl.constexpr):
    """Writes an accumulator to a tile of shared memory, in the tile's dtype."""
    for P in gl.static_range(count(WIDTHS)):
        part_of(tile, P, WIDTHS).store(x[P].to(tile.dtype))


@gluon.jit
def scale_rows(x, factors, WIDTHS: gl.constexpr):
    """Multiplies each row of an accumulator by one of `factors` (rows,)."""
    scaled = ()
    for P in gl.static_range(count(WIDTHS)):
        of_rows = gl.convert_layout(factors, gl.SliceLayout(1, matmul_layout(width_of(WIDTHS, P))))
        scaled += (x[P] * of_rows[:, None],)
    return scaled


@gluon.jit
def scale_all(x, factor, WIDTHS: gl.constexpr):
    """Multiplies an accumulator by one number."""
    scaled = ()
    for P in gl.static_range(count(WIDTHS)):
        scaled += (x[P] * factor,)
    return scaled


@gluon.jit
def start_scores(a, b, acc, USE_ACC: gl.constexpr, WIDTHS: gl.constexpr):
    """Issues a b^T of two tiles of shared memory, plus `acc` with `USE_ACC`: one sum over the columns of all parts."""
    for P in gl.static_range(count(WIDTHS)):
        of_b = part_of(b, P, WIDTHS).permute((1, 0))
        acc = warpgroup_mma(part_of(a, P, WIDTHS), of_b, acc, use_acc=USE_ACC or P > 0, is_async=True)
    return acc


@gluon.jit
def start_sums(a, b, acc, WIDTHS: gl.constexpr):
    """Issues acc + a b, in which `a` (rows, k) is an operand in registers and `b` (k, columns) is in shared memory."""
    sums = ()
    for P in gl.static_range(count(WIDTHS)):
        operand = gl.convert_layout(a, operand_layout(width_of(WIDTHS, P)), assert_trivial=True)
        sums += (warpgroup_mma(operand, part_of(b, P, WIDTHS), acc[P], is_async=True),)
    return sums


@gluon.jit
def wait_parts(PENDING: gl.constexpr, sums, WIDTHS: gl.constexpr):
    """Returns the accumulator `sums` once at most `PENDING` matmuls, all of them later ones, are in flight."""
    if count(WIDTHS) == 1:
        sums = (warpgroup_mma_wait(PENDING, deps=[sums[0]]),)
    else:
        sums = warpgroup_mma_wait(PENDING, deps=sums)
    return sums
