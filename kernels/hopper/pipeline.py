"""Pipeline of the warp-specialised Hopper kernels: rings of shared-memory buffers, masks in tiles, and operands.

The warps of a program have roles. One producer warp (`load_warp`) copies tiles by TMA. Two or three consumer
warpgroups (`mma_warpgroup`) multiply them. One warp (`scheduler_warp`) decides which tile the program owns next. In the
backward two more warps add dQ to global memory.

A `Ring` has one to four stages, or eight, each a buffer of shared memory with two mbarriers, full and empty. The
producer waits for empty and starts a copy that completes full. Consumers wait for full, read the buffer and arrive at
empty. Use i of a ring is the i-th fill, counted from 0 over all tiles of the program. It has stage i % STAGES, and the
parity of i // STAGES is its phase. No barrier is ever reset.

Programs are persistent: each stays on its multiprocessor until no tile is left. So copies for the next tile begin while
the current tile ends (`scheduler.py`).

A program owns a tile of one side and processes tiles of the other side. The forward owns queries and processes keys,
the backward owns keys and processes queries.
"""

# Gluon's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringflash.kernels.versions import copy_to_shared, halves, nbytes


class Bounds(NamedTuple):
    """Table of the rows of the other side that each row sees (`Intervals.bounds`), and its stride over sequences."""

    base: Any
    batch: Any


class Ring(NamedTuple):
    """A ring of buffers: STAGES buffers from index BUFFER on, and their barriers from index BARRIER on.

    STAGES full barriers come first, then STAGES empty barriers. Rings share the allocations `buffers` and `barriers`,
    because a warpgroup keeps the address of each allocation in a register. If each ring allocated its own barriers, the
    compiler would also omit a synchronisation of the warpgroup before each wait. The forward is slower without this
    synchronisation.
    """

    buffers: Any
    barriers: Any
    BUFFER: Any
    BARRIER: Any
    STAGES: Any


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    """Allocates `COUNT` mbarriers, which `make_ring` initialises."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def make_tiles(descriptor, COUNT: gl.constexpr):
    """Allocates shared-memory buffers for `COUNT` tiles of a TMA descriptor."""
    shape: gl.constexpr = [COUNT] + descriptor.block_shape  # noqa: RUF005 - Gluon unpacks no lists
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def make_ring(
    buffers,
    barriers,
    BUFFER: gl.constexpr,
    BARRIER: gl.constexpr,
    STAGES: gl.constexpr,
    READERS: gl.constexpr,
    WRITERS: gl.constexpr = 1,
):
    """Makes a ring of one, two, three, four or eight stages and initialises its barriers.

    A full barrier completes after `WRITERS` arrivals and an empty barrier after `READERS` arrivals, one from each role.
    """
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(BARRIER + i), WRITERS)
        mbarrier.init(barriers.index(BARRIER + STAGES + i), READERS)
    return Ring(buffers, barriers, BUFFER, BARRIER, STAGES)


@gluon.jit
def slot_of(i, STAGES: gl.constexpr):
    """Returns the stage of use `i`: i % STAGES."""
    slot = i % STAGES
    if STAGES != 3:  # a power of two; the compiler does not know that `i` is not negative
        slot = i & (STAGES - 1)
    return slot


@gluon.jit
def phase_of(i, STAGES: gl.constexpr):
    """Returns the phase of use `i`: the parity of i // STAGES, the number of earlier uses of its stage."""
    uses = i // STAGES
    if STAGES != 3:
        uses = i >> (STAGES // 2 - STAGES // 8)  # log2 of 1, 2, 4 or 8
    return uses & 1


@gluon.jit
def buffer_of(ring, i):
    """Returns the buffer of use `i`."""
    return ring.buffers.index(ring.BUFFER + slot_of(i, ring.STAGES))


@gluon.jit
def full_barrier(ring, i):
    """Returns the barrier that completes when use `i` has filled its buffer."""
    return ring.barriers.index(ring.BARRIER + slot_of(i, ring.STAGES))


@gluon.jit
def empty_barrier(ring, i):
    """Returns the barrier that completes when all readers have released the buffer of use `i`."""
    return ring.barriers.index(ring.BARRIER + ring.STAGES + slot_of(i, ring.STAGES))


@gluon.jit
def wait_full(ring, i):
    """Waits until the buffer of use `i` is full."""
    mbarrier.wait(full_barrier(ring, i), phase_of(i, ring.STAGES))


@gluon.jit
def wait_empty(ring, i):
    """Waits until use i - STAGES, which had the same buffer, is released. The first STAGES uses do not wait."""
    mbarrier.wait(empty_barrier(ring, i), phase_of(i, ring.STAGES) ^ 1)


@gluon.jit
def release(ring, i):
    """Arrives at the empty barrier of use `i`: this role has read the buffer."""
    mbarrier.arrive(empty_barrier(ring, i), count=1)


@gluon.jit
def fill(ring, i, descriptor, place):
    """Waits until the buffer of use `i` is empty, then starts the TMA copy of the tile at `place` into it."""
    wait_empty(ring, i)
    mbarrier.expect(full_barrier(ring, i), nbytes(descriptor))
    copy_to_shared(descriptor, place, full_barrier(ring, i), buffer_of(ring, i))


@gluon.jit
def filled(ring, i, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Waits until the buffer of use `i` is full, and returns it as a (ROWS, COLUMNS) matrix."""
    wait_full(ring, i)
    return buffer_of(ring, i).reshape([ROWS, COLUMNS])


@gluon.jit
def bounds_of(bounds, batch, rows, inside):
    """Returns the first row of the other side that each of `rows` sees, and one past the last row.

    Rows outside `inside` see nothing.
    """
    entry = bounds.base + batch * bounds.batch + rows * 2
    inside &= rows >= 0  # rows are negative when no tile is left
    return gl.load(entry, mask=inside, other=2**30), gl.load(entry + 1, mask=inside, other=0)


@gluon.jit
def where_seen(x, others, first, stop, OTHERWISE: gl.constexpr, BELOW: gl.constexpr, ABOVE: gl.constexpr):
    """Returns `x` where its row sees the row of the other side, else `OTHERWISE` (-inf or 0).

    `BELOW` compares with `first`, `ABOVE` with `stop`; at least one of them is set. The comparison is in assembly,
    because the compiler would compare before `x` is known, pack the results as bits and unpack them again.
    Bounds and `others` may also come from `relative`.
    """
    SHARED: gl.constexpr = len(first.shape) == 1  # one bound for all columns of a row
    FILLING: gl.constexpr = "0f00000000" if OTHERWISE == 0.0 else "0fFF800000"
    KEPT: gl.constexpr = "selp.f32 $0, $1, " + FILLING + ", seen; }"
    if BELOW and ABOVE:
        x = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.ge.s32 seen, $2, $3; setp.lt.and.s32 seen, $2, $4, seen; " + KEPT,
            "=f,f,r,r,r",
            [x, others[None, :], first[:, None] if SHARED else first, stop[:, None] if SHARED else stop],
            gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif BELOW:
        x = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.ge.s32 seen, $2, $3; " + KEPT,
            "=f,f,r,r", [x, others[None, :], first[:, None] if SHARED else first], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.lt.s32 seen, $2, $3; " + KEPT,
            "=f,f,r,r", [x, others[None, :], stop[:, None] if SHARED else stop], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


@gluon.jit
def relative(others, first, stop, COLUMNS: gl.constexpr):
    """Returns `others`, `first` and `stop` for `where_seen`, all less the part of `others` that varies.

    `others` are `COLUMNS` consecutive rows, a power of two, from a multiple of `COLUMNS` on. A thread has the columns
    0 and 1 of every eight, plus an even number below 8 of its own. Without this number and the first row, `others` are
    constants, the same in all threads and steps. Otherwise a thread keeps one number for each column through the loop.
    """
    REST: gl.constexpr = 6 - COLUMNS  # the bits of the first row and of the thread's number
    base = (others & REST)[None, :]
    return others & (COLUMNS - 7), first[:, None] - base, stop[:, None] - base


@gluon.jit
def opaque_index(i):
    """Returns `i` through a volatile move, so that the compiler does not know its value.

    A matmul's operand in shared memory has a descriptor for every 16 columns. If the compiler knows
    the index of the buffer, it makes all descriptors before the loop, and they do not fit in the registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fixed(x):
    """Returns `x` through a volatile move, so that the compiler does not know its value.

    It initialises the second of two accumulators. Without the move, the compiler would fill this accumulator while the
    first matmul is in flight, which serialises the matmuls (ptxas C7517).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def pack_operand(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, LOOPS: gl.constexpr):
    """Converts float32 numbers to `DTYPE`, for a later step that multiplies them as a register operand.

    `LOOPS` counts the loops through which they are carried until then. For one loop the result is the operand. For two
    loops it is pairs of numbers, each packed in an int32. The compiler would unpack 16-bit numbers from their registers
    between the two loops, and pack each register again in every step.
    """
    if LOOPS == 1:
        x = gl.convert_layout(x.to(DTYPE), LAYOUT)
    else:
        ROWS: gl.constexpr = x.shape[0]
        PAIRS: gl.constexpr = x.shape[1] // 2
        even, odd = gl.split(x.reshape([ROWS, PAIRS, 2]))
        ASM: gl.constexpr = f"cvt.rn.{'bf16' if gl.bfloat16 == DTYPE else 'f16'}x2.f32 $0, $2, $1;"
        x = gl.inline_asm_elementwise(ASM, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    return x


@gluon.jit
def unpack_operand(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the result of `pack_operand` as a register operand of a matmul."""
    if x.dtype == gl.int32:
        ROWS: gl.constexpr = x.shape[0]
        COLUMNS: gl.constexpr = x.shape[1] * 2
        even, odd = halves(x, DTYPE)
        x = gl.convert_layout(gl.join(even, odd).reshape([ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
    return x


TURN = gl.constexpr(9)  # the first of three named barriers; Gluon uses 0 and 1, and from 2 on one for each role


@gluon.jit
def scheduler_barrier_wait(C: gl.constexpr):
    """Blocks consumer `C` until the consumer before it has called `scheduler_barrier_arrive`."""
    ASM: gl.constexpr = f"bar.sync {TURN + C}, 256; mov.b32 $0, $1;"  # 256: the threads of both consumers
    gl.inline_asm_elementwise(ASM, "=r,r", [C], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scheduler_barrier_arrive(C: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the consumer after `C` issue its matmuls; `C` itself does not wait."""
    ASM: gl.constexpr = f"bar.arrive {TURN + (C + 1) % CONSUMERS}, 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [C], dtype=gl.int32, is_pure=False, pack=1)
