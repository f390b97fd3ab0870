"""Tables of the Hopper kernels for packed documents, made on the GPU from the cumulative lengths alone.

The host makes tables of a mask row by row. Documents change in each training step, and a GPU makes their tables in one
short launch, which the host only queues. So it needs no values of documents that are on the GPU.

The tables are those of `hopper.mask_tables.intervals`. They stay with the mask, as all layers of a step share them.
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock, get_ident

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.contract import Tiling
from ringflash.kernels.device_tables import is_capturing, unfilled
from ringflash.kernels.launch import PER_THREAD, Launches, current_stream
from ringflash.kernels.triton.config import FUSED
from ringflash.masks import Documents
from ringflash.torch_private import assert_async

ROWS, TILES, ENDS = 512, 128, 1024  # rows, tiles and cumulative lengths that a program handles at a time
MOST = 64  # tables that documents keep: of forward and backward, under a few windows, for a few shapes and streams
_WRONG = "cu_seqlens must begin at 0, never fall, and end with the sequence's length"


@triton.jit
def _seen(ends, nends, steps, rows, left, right, seqlen_q, seqlen_k, BY_KEYS: tl.constexpr):
    """Returns the first row of the other side that each row sees, and one past the last."""
    offset = seqlen_k - seqlen_q  # position of the first query
    positions = rows if BY_KEYS else rows + offset
    low = tl.zeros_like(rows)
    high = low + nends
    for _ in range(steps):  # a binary search for the number of ends up to a position
        middle = (low + high) // 2
        is_open = low < high
        after = is_open & (tl.load(ends + middle, mask=is_open, other=0) <= positions)
        low = tl.where(after, middle + 1, low)
        high = tl.where(is_open & (after == 0), middle, high)
    begin = tl.load(ends + low - 1, mask=low > 0, other=0)
    end = tl.load(ends + low, mask=low < nends, other=0)
    end = tl.where(low < nends, end, seqlen_k)
    if BY_KEYS:
        begin = tl.maximum(begin, positions - right) - offset
        end = tl.minimum(end, positions + left + 1) - offset
        most = seqlen_q
    else:
        begin = tl.maximum(begin, positions - left)
        end = tl.minimum(end, positions + right + 1)
        most = seqlen_k
    return tl.minimum(tl.maximum(begin, 0), most).to(tl.int32), tl.minimum(tl.maximum(end, 0), most).to(tl.int32)


@triton.jit
def _spans(
    ends, nends, steps, tiles, left, right, seqlen_q, seqlen_k,
    OWN: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Returns begin, full_begin, full_end and end of owned tiles, as in `Intervals.tiles`.

    Neither bound of a row ever falls, so those of a tile's first and last row are enough.
    """
    nrows = seqlen_k if BY_KEYS else seqlen_q
    first = tl.minimum(tiles * OWN, nrows - 1)
    last = tl.minimum(tiles * OWN + OWN, nrows) - 1
    first_begin, first_end = _seen(ends, nends, steps, first, left, right, seqlen_q, seqlen_k, BY_KEYS)
    last_begin, last_end = _seen(ends, nends, steps, last, left, right, seqlen_q, seqlen_k, BY_KEYS)
    if BY_KEYS:  # no query sees keys past the end, because dq is a sum over all rows of a tile
        first_end = tl.where(tiles * OWN + OWN > nrows, 0, first_end)
    begin = first_begin // BLOCK
    end = tl.maximum((last_end + BLOCK - 1) // BLOCK, begin)
    full_begin = tl.minimum(tl.maximum((last_begin + BLOCK - 1) // BLOCK, begin), end)
    full_end = tl.minimum(tl.maximum(first_end // BLOCK, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def _work(
    ends, nends, steps, batch, tiles, left, right, seqlen_q, seqlen_k,
    OWN: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Returns how many tiles the owned tiles process, in all sequences."""
    work = tl.zeros_like(tiles)
    for sequence in range(batch):
        begin, _, _, end = _spans(
            ends + sequence * nends, nends, steps, tiles, left, right, seqlen_q, seqlen_k, OWN, BLOCK, BY_KEYS
        )
        work += end - begin
    return work


@triton.jit
def _write_bounds(
    ends, bounds, nends, steps, rows, left, right, seqlen_q, seqlen_k, sequence, BY_KEYS: tl.constexpr
):  # fmt: skip
    nrows = seqlen_k if BY_KEYS else seqlen_q
    begin, end = _seen(ends + sequence * nends, nends, steps, rows, left, right, seqlen_q, seqlen_k, BY_KEYS)
    place = bounds + (sequence.to(tl.int64) * nrows + rows) * 2
    tl.store(place, begin, mask=rows < nrows)
    tl.store(place + 1, end, mask=rows < nrows)


@triton.jit
def _write_spans(
    ends, spans, nends, steps, tiles, ntiles, left, right, seqlen_q, seqlen_k, sequence,
    OWN: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    begin, full_begin, full_end, end = _spans(
        ends + sequence * nends, nends, steps, tiles, left, right, seqlen_q, seqlen_k, OWN, BLOCK, BY_KEYS
    )
    place = spans + (sequence * ntiles + tiles) * 4
    tl.store(place, begin, mask=tiles < ntiles)
    tl.store(place + 1, full_begin, mask=tiles < ntiles)
    tl.store(place + 2, full_end, mask=tiles < ntiles)
    tl.store(place + 3, end, mask=tiles < ntiles)


@triton.jit
def _write_order(
    ends, order, nends, steps, batch, tiles, ntiles, left, right, seqlen_q, seqlen_k,
    OWN: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Writes each tile to its place in the order: the number of tiles with more work, or as much and a lower number."""
    work = _work(ends, nends, steps, batch, tiles, left, right, seqlen_q, seqlen_k, OWN, BLOCK, BY_KEYS)
    place = tl.zeros_like(tiles)
    for first in range(0, ntiles, TILES):
        others = first + tl.arange(0, TILES)
        more = _work(ends, nends, steps, batch, others, left, right, seqlen_q, seqlen_k, OWN, BLOCK, BY_KEYS)
        more = tl.where(others < ntiles, more, -1)
        as_much = (more[None, :] == work[:, None]) & (others[None, :] < tiles[:, None])
        place += tl.sum(((more[None, :] > work[:, None]) | as_much).to(tl.int32), 1)
    tl.store(order + place, tiles, mask=tiles < ntiles)


@triton.jit
def _write_turns(
    ends, turns, nends, steps, others, ntiles, nothers, left, right, seqlen_q, seqlen_k, sequence,
    OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The tiles of keys that a tile of queries would process are those that process it. They take turns in their order.
    own_ends = ends + sequence * nends
    begin, _, _, end = _spans(own_ends, nends, steps, others, left, right, seqlen_q, seqlen_k, BLOCK, OWN, False)
    place = turns + sequence * (ntiles + 2 * nothers) + ntiles + others * 2
    tl.store(place, begin, mask=others < nothers)
    tl.store(place + 1, end - begin, mask=others < nothers)


_NUMBERS = ("nends", "steps", "batch", "seqlen_q", "seqlen_k", "left", "right", "ntiles", "nothers")


@triton.jit(do_not_specialize=_NUMBERS)
def _tables_kernel(
    ends, bounds, spans, order, turns, nends, steps, batch, seqlen_q, seqlen_k, left, right, ntiles, nothers,
    OWN: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # The first programs write the bounds of rows, the next ones tables of owned tiles, the last ones turns.
    sequence = tl.program_id(1)
    of_rows, of_tiles = tl.cdiv(seqlen_k if BY_KEYS else seqlen_q, ROWS), tl.cdiv(ntiles, TILES)
    program = tl.program_id(0)
    tiles = (program - of_rows) * TILES + tl.arange(0, TILES)
    if program < of_rows:
        rows = program * ROWS + tl.arange(0, ROWS)
        _write_bounds(ends, bounds, nends, steps, rows, left, right, seqlen_q, seqlen_k, sequence, BY_KEYS)
    elif program < of_rows + of_tiles:
        _write_spans(
            ends, spans, nends, steps, tiles, ntiles, left, right, seqlen_q, seqlen_k, sequence, OWN, BLOCK, BY_KEYS
        )
        if ORDERED:
            tl.store(turns + sequence * (ntiles + 2 * nothers) + tiles, tiles, mask=tiles < ntiles)
            tl.store(order + tiles, tiles, mask=tiles < ntiles)
        elif sequence == 0:
            _write_order(
                ends, order, nends, steps, batch, tiles, ntiles, left, right, seqlen_q, seqlen_k, OWN, BLOCK, BY_KEYS,
                TILES,
            )  # fmt: skip
    elif ORDERED:
        others = tiles - of_tiles * TILES
        _write_turns(
            ends, turns, nends, steps, others, ntiles, nothers, left, right, seqlen_q, seqlen_k, sequence, OWN, BLOCK
        )


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit(do_not_specialize=["nends", "seqlen"])
def _rising_kernel(given, ends, right, nends, seqlen, BLOCK: tl.constexpr):
    # Writes ends that never fall and lie in the sequence, whatever was given, and whether they are as given. Kernels
    # that take turns would wait for ever under tables that contradict each other.
    sequence = tl.program_id(0)
    given += sequence * nends
    ends += sequence * nends
    most = tl.zeros([BLOCK], tl.int64)
    wrong = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, nends, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < nends
        value = tl.load(given + place, mask=inside, other=0).to(tl.int64)
        before = tl.load(given + place - 1, mask=inside & (place > 0), other=0).to(tl.int64)
        wrong |= (inside & ((value < before) | ((place == 0) & (value != 0)))).to(tl.int32)
        wrong |= ((place == nends - 1) & (value != seqlen)).to(tl.int32)
        inner = tl.minimum(tl.maximum(value, 0), seqlen.to(tl.int64))
        rising = tl.maximum(tl.associative_scan(inner, 0, _larger), tl.max(most, 0))
        tl.store(ends + place, rising, mask=inside)
        most = tl.where(inside, rising, most)
    tl.store(right + sequence, (tl.max(wrong, 0) == 0).to(tl.int32))


_tables, _rising = Launches(), Launches()
_keeping = Lock()
_captured: list[tuple[Tensor, ...]] = []  # tables and cumulative lengths that CUDA graphs read


@dataclass(frozen=True, eq=False)
class TableSpec:
    """All that tables depend on besides the documents; `table_spec` makes it, and equal ones are one object.

    Args:
        tiling: the tiles.
        left: keys before its own position that a query sees at most.
        right: keys after its own position that a query sees at most.
        seqlen_q: queries of a sequence, the last positions; at most `seqlen_k`.
        seqlen_k: keys of a sequence.
        device: the GPU.
    """

    tiling: Tiling
    left: int
    right: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device


table_spec = lru_cache(maxsize=1024)(TableSpec)


def document_tables(documents: Documents, wanted: TableSpec) -> tuple[Tensor, ...]:
    """Returns bounds, tiles and order of `Intervals`, and turns if `ordered`; the current stream may read them.

    Raises:
        ArgumentError: the values are on the CPU and do not fit the keys. Or a CUDA graph is captured, and no call has
            made their tables before.
    """
    device = wanted.device
    known = _known(documents, wanted, device)
    if known is None:
        place = wanted.seqlen_k, device
        ends = _known(documents, place, device)
        ends = ends or _kept(documents, place, (_ends(documents, wanted.seqlen_k, device),))
        known = _kept(documents, wanted, _made(ends[0], wanted))
    return known


def _known(documents: Documents, key: Hashable, device: torch.device) -> tuple[Tensor, ...] | None:
    """Returns the tables that the current stream has made for `key`.

    Each stream makes tables of its own, since it would have to wait for those of another. A CUDA graph takes tables
    that any stream has made before its capture.
    """
    tables = documents.tables
    if tables is None:
        tables = documents.tables = {} if documents.on_gpu is not None else _shared_tables(documents)
    if not is_capturing():
        return tables.get((key, _stream(device)))
    entries = tuple(tables.items())  # a copy: other threads may add tables meanwhile
    known = next((known for (other, _), known in entries if other == key), None)
    if known is not None:
        _captured.append(known)
    return known


def _kept(documents: Documents, key: Hashable, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Keeps tables of the current stream, the recent ones, and returns them.

    It keeps no tables that a CUDA graph makes, which are in its pool, and none of lengths that its replays change.
    """
    kept = documents.tables
    assert kept is not None
    if not (is_capturing() or documents.of_capture):
        with _keeping:
            while len(kept) >= MOST:
                del kept[next(iter(kept))]
            kept[key, _stream(tables[0].device)] = tables
    return tables


def _stream(device: torch.device) -> Hashable:
    stream = current_stream(device) if device.type == "cuda" else 0
    return (stream, get_ident()) if stream == PER_THREAD else stream


@lru_cache(maxsize=16)
def _shared_tables(documents: Documents) -> dict[Hashable, tuple[Tensor, ...]]:
    """Returns where documents on the CPU keep their tables: equal ones share them."""
    return {}


def _ends(documents: Documents, seqlen: int, device: torch.device) -> Tensor:
    """Returns the cumulative lengths on `device`: int64 (batch or 1, ndocuments + 1), never falling, up to `seqlen`."""
    given = documents.on_gpu
    if given is None:
        documents.validate(seqlen)
        values = documents.spec[1][0].view(documents.batch, -1)
        if device.type != "cuda":
            return values
        if is_capturing():
            expected = "documents whose tables are on the GPU before the capture of a CUDA graph"
            remedy = "Make the same call before the capture, or give cu_seqlens on the GPU."
            raise ArgumentError("mask", expected=expected, got="new ones", remedy=remedy)
        (ends,) = unfilled([values.shape], device, torch.int64)
        return ends.copy_(values.pin_memory(), non_blocking=True)
    if is_capturing() and not documents.of_capture:
        _captured.append((given,))
    elif given.is_cuda:  # maybe on another stream than that of its memory, which the mask may leave before the launch
        given.record_stream(torch.cuda.current_stream(given.device))
    ends, right = rising_ends(given.to(device).view(documents.batch, -1), seqlen)
    if documents.device_check:
        assert_async(right[0] if len(right) == 1 else right.amin(), _WRONG)
    return ends


def rising_ends(given: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    """Returns `given`, int64 (batch, n), limited to the sequence and never falling, and which rows were right already.

    The second result is int32 (batch,): 1 for rows that begin at 0, never fall, and end with `seqlen`.
    """
    (ends,) = unfilled([given.shape], given.device, torch.int64)
    (right,) = unfilled([(len(given),)], given.device, torch.int32)
    numbers = given.shape[1], seqlen
    _launch(_rising, _rising_kernel, (len(given),), (given, ends, right), numbers, (ENDS,))
    return ends, right


def _made(ends: Tensor, wanted: TableSpec) -> tuple[Tensor, ...]:
    own_block, block, by_keys, ordered, *_ = wanted.tiling
    seqlen_q, seqlen_k = wanted.seqlen_q, wanted.seqlen_k
    left, right = min(wanted.left, seqlen_k), min(wanted.right, seqlen_k)
    batch, nends = ends.shape
    nrows, nother_rows = (seqlen_k, seqlen_q) if by_keys else (seqlen_q, seqlen_k)
    ntiles, nothers = triton.cdiv(nrows, own_block), triton.cdiv(nother_rows, block)
    shapes = [(batch, nrows, 2), (batch, ntiles, 4), (ntiles,)]
    if ordered:
        shapes.append((batch, ntiles + 2 * nothers))
    tables = tuple(unfilled(shapes, ends.device, torch.int32))
    programs = triton.cdiv(nrows, ROWS) + triton.cdiv(ntiles, TILES) + ordered * triton.cdiv(nothers, TILES)
    numbers = nends, nends.bit_length(), batch, seqlen_q, seqlen_k, left, right, ntiles, nothers
    _launch(_tables, _tables_kernel, (programs, batch), (ends, *tables), numbers, (*wanted.tiling[:4], ROWS, TILES), 5)
    return tables


def _launch(
    launches: Launches,
    kernel: object,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[object, ...],
    pointers: int = 3,
) -> None:
    """Launches a kernel that takes `pointers` pointers, None for those that `tensors` lack, numbers and constants."""
    key = numbers, constants, grid, tensors[0].device
    if launches.repeat(key, tensors):
        return
    if launches.bind(key, constants, grid, tensors, (), numbers):
        return
    places = range(pointers, pointers + len(numbers))
    arguments = (*tensors, *[None] * (pointers - len(tensors)), *numbers, *constants)
    launches.first(key, kernel, grid, arguments, FUSED, tensors, (), places, family=constants)
