"""What the roles of a Hopper kernel share: buffers that pass between them, and the tiles that they take one by one.

A `Ring` is a few buffers of shared memory with two barriers each. The producer waits for `empty` and starts a copy that
completes `full`; consumers wait for `full` and arrive at `empty`. Use i of a ring is of buffer i % stages, whose
barriers then complete for the (i // stages)-th time.

Programs stay on their multiprocessor and take tiles until there are none, so that copies for the next tile begin while
this one ends. A warp of its own draws the numbers of tiles from a counter in memory and tells the others.
"""

# Gluon's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringflash.kernels.hopper.versions import copy_to_shared, nbytes


class Bounds(NamedTuple):
    """Which rows of the other side each row sees: `Intervals.bounds`."""

    base: Any
    batch: Any


class Ring(NamedTuple):
    """Some buffers of an allocation, and of another the barriers that they are full, followed by those that are empty.

    Rings share allocations because a warpgroup keeps the address of each in a register. Barriers of their own would
    also save the compiler's synchronisation of a warpgroup before each wait, but the forward is slower without it.
    """

    buffers: Any
    barriers: Any
    BUFFER: Any
    BARRIER: Any
    STAGES: Any


class Work(NamedTuple):
    """The tiles of a launch: those of `Intervals`, for `heads` of each sequence in turn."""

    tiles: Any
    tiles_stride: Any
    order: Any
    counter: Any
    ntiles: Any
    heads: Any
    all_heads: Any
    heads_per_wave: Any


class Place(NamedTuple):
    """A tile, and the tiles of the other side that it visits; `tile` is -1 when there are no more."""

    tile: Any
    batch: Any
    head: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    """Barriers, for `make_ring` to start."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def make_tiles(descriptor, COUNT: gl.constexpr):
    """Buffers, for `COUNT` tiles of a view."""
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
    """A ring of two to four buffers, each filled by `WRITERS` roles, and empty when `READERS` have left it."""
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(BARRIER + i), WRITERS)
        mbarrier.init(barriers.index(BARRIER + STAGES + i), READERS)
    return Ring(buffers, barriers, BUFFER, BARRIER, STAGES)


@gluon.jit
def slot_of(i, STAGES: gl.constexpr):
    """Which of the stages use `i` is of."""
    slot = i % STAGES
    if STAGES != 3:  # a power of two; that `i` is not negative is not known to the compiler
        slot = i & (STAGES - 1)
    return slot


@gluon.jit
def phase_of(i, STAGES: gl.constexpr):
    """The parity of how often that stage was used before."""
    uses = i // STAGES
    if STAGES != 3:
        uses = i >> (STAGES // 2)
    return uses & 1


@gluon.jit
def buffer_of(ring, i):
    """The buffer of use `i`."""
    return ring.buffers.index(ring.BUFFER + slot_of(i, ring.STAGES))


@gluon.jit
def full_barrier(ring, i):
    """That which use `i` completes."""
    return ring.barriers.index(ring.BARRIER + slot_of(i, ring.STAGES))


@gluon.jit
def empty_barrier(ring, i):
    """That which completes when the buffer of use `i` has been left."""
    return ring.barriers.index(ring.BARRIER + ring.STAGES + slot_of(i, ring.STAGES))


@gluon.jit
def wait_full(ring, i):
    """Returns when use `i` is full."""
    mbarrier.wait(full_barrier(ring, i), phase_of(i, ring.STAGES))


@gluon.jit
def wait_empty(ring, i):
    """Returns when the buffer of use `i` has been left."""
    mbarrier.wait(empty_barrier(ring, i), phase_of(i, ring.STAGES) ^ 1)


@gluon.jit
def release(ring, i):
    """This role has read use `i`."""
    mbarrier.arrive(empty_barrier(ring, i), count=1)


@gluon.jit
def fill(ring, i, descriptor, place):
    """Starts the copy of the tile at `place` as use `i`, once the buffer is empty."""
    wait_empty(ring, i)
    mbarrier.expect(full_barrier(ring, i), nbytes(descriptor))
    copy_to_shared(descriptor, place, full_barrier(ring, i), buffer_of(ring, i))


@gluon.jit
def filled(ring, i, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Use `i` as a (ROWS, COLUMNS) matrix, once it is full."""
    wait_full(ring, i)
    return buffer_of(ring, i).reshape([ROWS, COLUMNS])


@gluon.jit
def make_mailbox(barriers, BARRIER: gl.constexpr, READERS: gl.constexpr):
    """A ring of two places, for `READERS` roles that each read all."""
    numbers = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return make_ring(numbers, barriers, 0, BARRIER, 2, READERS)


@gluon.jit
def make_pace(barriers, BARRIER: gl.constexpr):
    """A ring of signals, with no buffers."""
    return make_ring(barriers, barriers, 0, BARRIER, 2, 1)


@gluon.jit
def signal_prefetch(pace, taken, i, total, AHEAD: gl.constexpr):
    """The producer's, before it copies the `i`-th of `total`: when few are left, the next tile is to be drawn."""
    mbarrier.arrive(full_barrier(pace, taken), count=1, pred=i == gl.maximum(total - AHEAD, 0))


@gluon.jit
def _put(tile_queue, at, number):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile_queue.buffers.index(at).store(gl.full([1], number, gl.int32, LAYOUT))


@gluon.jit
def push_tile(tile_queue, i, place):
    """One warp's: the `i`-th place."""
    wait_empty(tile_queue, i)
    slot = slot_of(i, 2)
    _put(tile_queue, slot * 8, place.tile)
    _put(tile_queue, slot * 8 + 1, place.batch)
    _put(tile_queue, slot * 8 + 2, place.head)
    _put(tile_queue, slot * 8 + 3, place.begin)
    _put(tile_queue, slot * 8 + 4, place.full_begin)
    _put(tile_queue, slot * 8 + 5, place.full_end)
    _put(tile_queue, slot * 8 + 6, place.end)
    mbarrier.arrive(full_barrier(tile_queue, i), count=1)


@gluon.jit
def _get(tile_queue, at):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(tile_queue.buffers.index(at).load(LAYOUT), 0)


@gluon.jit
def pop_tile(tile_queue, i):
    """The `i`-th place. Who reads leaves it when done: to hear it again is cheaper than to keep it in registers."""
    wait_full(tile_queue, i)
    slot = slot_of(i, 2)
    return Place(
        _get(tile_queue, slot * 8),
        _get(tile_queue, slot * 8 + 1),
        _get(tile_queue, slot * 8 + 2),
        _get(tile_queue, slot * 8 + 3),
        _get(tile_queue, slot * 8 + 4),
        _get(tile_queue, slot * 8 + 5),
        _get(tile_queue, slot * 8 + 6),
    )


@gluon.jit
def _place_of(work, number):
    """The tile with a number: `heads_per_wave` heads at a time, of them the tiles that visit most first."""
    group = number // (work.ntiles * work.heads_per_wave)
    within = number - group * work.ntiles * work.heads_per_wave
    size = gl.minimum(work.heads_per_wave, work.all_heads - group * work.heads_per_wave)
    tile = gl.load(work.order + within // size)
    of_all = group * work.heads_per_wave + within % size
    batch = of_all // work.heads
    entry = work.tiles + batch * work.tiles_stride + tile * 4
    begin, full_begin = gl.load(entry), gl.load(entry + 1)
    full_end, end = gl.load(entry + 2), gl.load(entry + 3)
    return Place(tile, batch, of_all % work.heads, begin, full_begin, full_end, end)


@gluon.jit
def scheduler_warp(work, tile_queue, pace, IN_ORDER: gl.constexpr = False):
    """One warp's role: draws tiles and tells the others which: no sooner than needed, so that none waits at the end.

    With `IN_ORDER` no tile is drawn before those with lower numbers: programs need not start in the order of theirs.
    """
    total = work.ntiles * work.all_heads
    drawn = 0
    number = gl.program_id(0)
    if IN_ORDER:
        number = gl.atomic_add(work.counter, 1)
    while number < total:
        push_tile(tile_queue, drawn, _place_of(work, number))
        wait_full(pace, drawn)
        drawn += 1
        number = gl.atomic_add(work.counter, 1)
    push_tile(tile_queue, drawn, Place(-1, 0, 0, 0, 0, 0, 0))


@gluon.jit
def masked_visits(place):
    """How many visited tiles need a mask: these come first."""
    return place.full_begin - place.begin + place.end - place.full_end


@gluon.jit
def tile_at(place, i, GROUP: gl.constexpr = 1, FROM_END: gl.constexpr = False):
    """The `i`-th tile that is visited, and of which of `GROUP` heads: those that need a mask come first.

    Of these the last is the first. With `FROM_END` the others too are visited from the last to the first.
    """
    high = place.end - place.full_end
    masked = high + place.full_begin - place.begin
    full = place.full_end - place.full_begin
    of_masked, of_full = i, i - masked * GROUP
    member = 0
    if GROUP > 1:
        member = gl.where(of_full < 0, of_masked // gl.maximum(masked, 1), of_full // gl.maximum(full, 1))
        of_masked -= member * masked
        of_full -= member * full
    before = gl.where(of_masked < high, place.end - 1 - of_masked, place.begin + of_masked - high)
    after = place.full_begin + of_full
    if FROM_END:
        after = place.full_end - 1 - of_full
    return gl.where(i < masked * GROUP, before, after), member


@gluon.jit
def visit_from_end(place, i, GROUP: gl.constexpr, BY_HEADS: gl.constexpr):
    """The `i`-th tile that is visited, and of which of `GROUP` heads: from the last tile on, of all heads in turn.

    With `BY_HEADS` all tiles of one head come before those of the next.
    """
    before, member = i // GROUP, i % GROUP
    if BY_HEADS:
        visits = place.end - place.begin
        before, member = i % visits, i // visits
    return place.end - 1 - before, member


@gluon.jit
def bounds_of(bounds, batch, rows, inside):
    """First row of the other side that each of `rows` sees, and the one after the last."""
    entry = bounds.base + batch * bounds.batch + rows * 2
    inside &= rows >= 0  # where there are no more tiles
    return gl.load(entry, mask=inside, other=2**30), gl.load(entry + 1, mask=inside, other=0)


@gluon.jit
def where_seen(x, others, first, stop, OTHERWISE: gl.constexpr, BELOW: gl.constexpr, ABOVE: gl.constexpr):
    """`x` where its row sees that of the other side, else -inf or 0; only the first, the last or both may lie here.

    In assembly, since comparisons that the compiler makes ahead of `x` are kept as bits and taken apart again.
    """
    FILLING: gl.constexpr = "0f00000000" if OTHERWISE == 0.0 else "0fFF800000"
    KEPT: gl.constexpr = "selp.f32 $0, $1, " + FILLING + ", seen; }"
    if BELOW and ABOVE:
        x = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.ge.s32 seen, $2, $3; setp.lt.and.s32 seen, $2, $4, seen; " + KEPT,
            "=f,f,r,r,r", [x, others[None, :], first[:, None], stop[:, None]], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif BELOW:
        x = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.ge.s32 seen, $2, $3; " + KEPT,
            "=f,f,r,r", [x, others[None, :], first[:, None]], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.lt.s32 seen, $2, $3; " + KEPT,
            "=f,f,r,r", [x, others[None, :], stop[:, None]], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


@gluon.jit
def apply_mask(i):
    """`i`, where the compiler does not know it.

    A matmul's operand has a descriptor for every 16 columns. Those of a buffer whose number is known are made before
    the loop, in more registers than there are.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fixed(x):
    """`x`, where the compiler does not know it: it would fill a second accumulator while the first is in use."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def pack_operand(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, LOOPS: gl.constexpr):
    """Float32 numbers as the operand of `DTYPE` that a later step multiplies, on its way there through `LOOPS` loops.

    Through two they go as pairs, an int32 each: numbers of 16 bits would be taken out of their registers between the
    loops, and each register put together again in every step.
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


@builtin
def _halves(pairs, dtype, _semantic=None):
    types = (gl.constexpr(dtype).value,) * 2  # which a kernel could not write
    asm = "mov.b32 {$0, $1}, $2;"
    return gl.inline_asm_elementwise(asm, "=h,=h,r", [pairs], types, is_pure=True, pack=1, _semantic=_semantic)


@gluon.jit
def unpack_operand(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """What was `pack_operand`, as the matmul takes it from registers."""
    if x.dtype == gl.int32:
        ROWS: gl.constexpr = x.shape[0]
        COLUMNS: gl.constexpr = x.shape[1] * 2
        even, odd = _halves(x, DTYPE)
        x = gl.convert_layout(gl.join(even, odd).reshape([ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
    return x


TURN = gl.constexpr(9)  # the first of three named barriers: Gluon takes 0, 1, and from 2 on one for each role's warps


@gluon.jit
def scheduler_barrier_wait(C: gl.constexpr):
    """Holds consumer `C` until the one before it has passed its turn."""
    ASM: gl.constexpr = f"bar.sync {TURN + C}, 256; mov.b32 $0, $1;"  # 256: the threads of both
    gl.inline_asm_elementwise(ASM, "=r,r", [C], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scheduler_barrier_arrive(C: gl.constexpr, CONSUMERS: gl.constexpr):
    """The next consumer's turn begins; `C` does not wait for it."""
    ASM: gl.constexpr = f"bar.arrive {TURN + (C + 1) % CONSUMERS}, 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [C], dtype=gl.int32, is_pure=False, pack=1)
