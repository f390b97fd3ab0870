"""Tile scheduler of the Hopper kernels: a warp takes tiles from a counter, and other roles read them in a queue.

The scheduler warp takes tile numbers from a counter in global memory and pushes each tile into a queue in shared
memory. All other roles of the program read the queue and process the same tiles in the same order (`tile_at`).
`pipeline.py` explains roles and rings.
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

from ringflash.kernels.hopper.pipeline import full_barrier, make_ring, slot_of, wait_empty, wait_full


class Work(NamedTuple):
    """Tiles of a launch: `tiles` and `order` of `Intervals`, for each of `heads` heads of each sequence.

    `counter` holds the next tile number in global memory. `ntiles` counts the tiles of a head and `all_heads` the heads
    of all sequences. `heads_per_wave` counts the heads that share a wave (see `_place_of`).
    """

    tiles: Any
    tiles_stride: Any
    order: Any
    counter: Any
    ntiles: Any
    heads: Any
    all_heads: Any
    heads_per_wave: Any


SLOT = gl.constexpr(8)  # int32 numbers of a stage of the tile queue


class Place(NamedTuple):
    """A tile that the program owns, and the tiles [begin, end) of the other side that it processes.

    Tiles [full_begin, full_end) need no mask. `tile` is -1 when no tile is left. `repeated` is 1 if the program
    processes the tile for the second time (see `scheduler_warp`), else 0.
    """

    tile: Any
    batch: Any
    head: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    repeated: Any


@gluon.jit
def make_tile_queue(barriers, BARRIER: gl.constexpr, READERS: gl.constexpr):
    """Makes the tile queue: a ring of two stages, each of which holds one `Place` that `READERS` roles read."""
    numbers = gl.allocate_shared_memory(gl.int32, [2 * SLOT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return make_ring(numbers, barriers, 0, BARRIER, 2, READERS)


@gluon.jit
def make_checks(CONSUMERS: gl.constexpr, NUMBERS: gl.constexpr):
    """Makes an array of NUMBERS int32 for each stage of the tile queue and each consumer.

    They ask for a repeat of the stage's tile: 32 numbers through `report`, or one through `ask_for_repeat`.
    """
    return gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def make_prefetch_ring(barriers, BARRIER: gl.constexpr):
    """Makes the ring of prefetch signals from the producer to the scheduler: full barriers only, no buffers."""
    return make_ring(barriers, barriers, 0, BARRIER, 2, 1)


@gluon.jit
def signal_prefetch(prefetch, taken, i, total, AHEAD: gl.constexpr):
    """Asks the scheduler for the next tile when only `AHEAD` of `total` copies are left.

    The producer calls this before copy `i` of the owned tile number `taken`. It arrives once for each owned tile.
    """
    mbarrier.arrive(full_barrier(prefetch, taken), count=1, pred=i == gl.maximum(total - AHEAD, 0))


@gluon.jit
def _put(tile_queue, at, number):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile_queue.buffers.index(at).store(gl.full([1], number, gl.int32, LAYOUT))


@gluon.jit
def push_tile(tile_queue, i, place):
    """Writes `place` to the tile queue as use `i`, once its stage is empty. Only the scheduler warp calls this."""
    wait_empty(tile_queue, i)
    slot = slot_of(i, 2) * SLOT
    _put(tile_queue, slot, place.tile)
    _put(tile_queue, slot + 1, place.batch)
    _put(tile_queue, slot + 2, place.head)
    _put(tile_queue, slot + 3, place.begin)
    _put(tile_queue, slot + 4, place.full_begin)
    _put(tile_queue, slot + 5, place.full_end)
    _put(tile_queue, slot + 6, place.end)
    _put(tile_queue, slot + 7, place.repeated)
    mbarrier.arrive(full_barrier(tile_queue, i), count=1)


@gluon.jit
def _get(tile_queue, at):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(tile_queue.buffers.index(at).load(LAYOUT), 0)


@gluon.jit
def _read_tile(tile_queue, i):
    slot = slot_of(i, 2) * SLOT
    return Place(
        _get(tile_queue, slot),
        _get(tile_queue, slot + 1),
        _get(tile_queue, slot + 2),
        _get(tile_queue, slot + 3),
        _get(tile_queue, slot + 4),
        _get(tile_queue, slot + 5),
        _get(tile_queue, slot + 6),
        _get(tile_queue, slot + 7),
    )


@gluon.jit
def pop_tile(tile_queue, i):
    """Waits for use `i` of the tile queue and returns its `Place`. It only reads: nothing leaves the queue.

    The caller releases the stage when it has finished the tile. Until then it may call this again, which is cheaper
    than keeping the `Place` in registers.
    """
    wait_full(tile_queue, i)
    return _read_tile(tile_queue, i)


@gluon.jit
def report(C: gl.constexpr, checks, i, wanted, CONSUMERS: gl.constexpr):
    """Asks the scheduler to repeat use `i` if any of 32 numbers is not 0; the caller has not yet released the stage."""
    checks.index(slot_of(i, 2) * CONSUMERS + C).store(wanted)


@gluon.jit
def ask_for_repeat(C: gl.constexpr, checks, i, place, wanted, CONSUMERS: gl.constexpr):
    """Asks the scheduler to repeat use `i` if `wanted`; the caller has not yet released the stage.

    Returns:
        True if the consumer stores its result now: at its first use if it wants no repeat, else at the second.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = slot_of(i, 2) * CONSUMERS + C
    stores = not wanted
    if place.repeated != 0:
        stores = gl.max(checks.index(at).load(LAYOUT), 0) != 0
    else:
        checks.index(at).store(gl.full([1], wanted.to(gl.int32), gl.int32, LAYOUT))
    return stores


@gluon.jit
def _repeat_tile(tile_queue, prefetch, checks, i, used, CONSUMERS: gl.constexpr):
    """Pushes the tile of use `used` again, as use `i`, if a consumer has asked for that.

    Its readers have released use `used`, and the stage of use `i` is empty. Returns the number of the next use.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    last = slot_of(used, 2) * CONSUMERS
    wanted = checks.index(last).load(LAYOUT)
    for c in gl.static_range(1, CONSUMERS):
        wanted |= checks.index(last + c).load(LAYOUT)
    if (gl.max(wanted, 0) != 0) & (_get(tile_queue, slot_of(used, 2) * SLOT + 7) == 0):
        tile, batch, head, begin, full_begin, full_end, end, _ = _read_tile(tile_queue, used)
        for c in gl.static_range(CONSUMERS):
            checks.index(slot_of(i, 2) * CONSUMERS + c).store(checks.index(last + c).load(LAYOUT))
        push_tile(tile_queue, i, Place(tile, batch, head, begin, full_begin, full_end, end, 1))
        wait_full(prefetch, i)
        i += 1
    return i


@gluon.jit
def _repeat_finished(tile_queue, prefetch, checks, i, CONSUMERS: gl.constexpr):
    """Repeats the tile in the stage of use `i` if that was asked for, then likewise the tile of the other stage.

    Returns the number of the next use.
    """
    before = i - 1
    while (before < i) & (i >= 2):
        before = i
        wait_empty(tile_queue, i)
        i = _repeat_tile(tile_queue, prefetch, checks, i, i - 2, CONSUMERS)
    return i


@gluon.jit
def _place_of(work, number):
    """Returns the `Place` of a tile number.

    Numbers run through waves of `heads_per_wave` heads; the last wave may have fewer. Within a wave they run through
    the tiles as `Intervals.order` lists them, and for each tile through the heads of the wave.
    """
    group = number // (work.ntiles * work.heads_per_wave)
    within = number - group * work.ntiles * work.heads_per_wave
    size = gl.minimum(work.heads_per_wave, work.all_heads - group * work.heads_per_wave)
    tile = gl.load(work.order + within // size)
    of_all = group * work.heads_per_wave + within % size
    batch = of_all // work.heads
    entry = work.tiles + batch * work.tiles_stride + tile * 4
    begin, full_begin = gl.load(entry), gl.load(entry + 1)
    full_end, end = gl.load(entry + 2), gl.load(entry + 3)
    return Place(tile, batch, of_all % work.heads, begin, full_begin, full_end, end, 0)


@gluon.jit
def scheduler_warp(work, tile_queue, prefetch, IN_ORDER: gl.constexpr = False, checks=None, REPEATS: gl.constexpr = 0):
    """Runs the scheduler warp: takes tile numbers from the counter and pushes their tiles into the queue.

    It takes the next number only when the producer signals that few copies are left. Taken earlier, the last tiles of
    the launch would wait in busy programs while other programs are idle. A `Place` with tile -1 ends the queue.

    The first number is the program's own id. With `IN_ORDER` the counter gives the first number too, because programs
    may start in any order. A tile is then taken only after all tiles with lower numbers.

    `REPEATS` is the number of consumers if they may ask for a tile again through `checks`, else 0. Before a stage is
    written again, the scheduler repeats its tile if that was asked for. At the end it waits for the last tiles before
    it ends the queue.
    """
    total = work.ntiles * work.all_heads
    drawn = 0
    number = gl.program_id(0)
    if IN_ORDER:
        number = gl.atomic_add(work.counter, 1)
    while number < total:
        if REPEATS > 0:
            drawn = _repeat_finished(tile_queue, prefetch, checks, drawn, REPEATS)
        push_tile(tile_queue, drawn, _place_of(work, number))
        wait_full(prefetch, drawn)
        drawn += 1
        number = gl.atomic_add(work.counter, 1)
    if REPEATS > 0:
        drawn = _repeat_finished(tile_queue, prefetch, checks, drawn, REPEATS)
        wait_empty(tile_queue, drawn + 1)
        drawn = _repeat_tile(tile_queue, prefetch, checks, drawn, drawn - 1, REPEATS)
    push_tile(tile_queue, drawn, Place(-1, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def masked_visits(place):
    """Returns the number of processed tiles that need a mask. `tile_at` returns these first."""
    return place.full_begin - place.begin + place.end - place.full_end


@gluon.jit
def tile_at(place, i, GROUP: gl.constexpr = 1, FROM_END: gl.constexpr = False):
    """Returns the `i`-th tile to process and its head among `GROUP` heads: tiles that need a mask come first.

    For each head these are [full_end, end) in descending order, then [begin, full_begin) in ascending order. The tiles
    without a mask follow, again head by head, ascending or with `FROM_END` descending.
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
    """Returns the `i`-th tile to process and its head among `GROUP` heads, from the last tile to the first.

    Each tile is processed for all heads before the next tile. With `BY_HEADS`, all tiles of one head come before the
    tiles of the next head.
    """
    before, member = i // GROUP, i % GROUP
    if BY_HEADS:
        visits = place.end - place.begin
        before, member = i % visits, i // visits
    return place.end - 1 - before, member
