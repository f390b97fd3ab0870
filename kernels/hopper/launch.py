"""Launch arguments of a Hopper kernel: TMA descriptors of tensors, tile tables, and the order of the tiles.

Descriptors of inputs and outputs have four dimensions (batch, seqlen, nheads, headdim) and tiles of rows of one head.
TMA reads zeros past the end of a sequence and writes nothing there, whatever follows it in memory. The same holds past
headdim if a tile is wider.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringflash.kernels.device_tables import is_capturing, outside_pools
from ringflash.kernels.hopper.mask_tables import Intervals
from ringflash.kernels.launch import PER_THREAD, Memory, current_stream, observe_supply, observers
from ringflash.kernels.triton.config import processors

K = TypeVar("K", bound=tuple[Any, ...])

TOGETHER_BYTES = 16 * 2**20  # bytes that the heads of a wave stream: these stay in L2
NUMBERS = 4  # int32 numbers of a counter, two of them unused: each counter begins at a multiple of 16 bytes
FILLED = 512  # counters of one fill
TOGETHER_TILES = 6  # tiles of keys of a head at a time, at most, when each waits for the one before it


class Tables(NamedTuple):
    """Tensors of `Bounds` and `Work`, as arguments of a kernel; `counter` is `Counter.following`."""

    bounds: Any
    tiles: Any
    order: Any
    counter: Any


class Sizes(NamedTuple):
    """Integers of `Bounds` and `Work`: separate arguments, since Triton would compile for their values in a tuple."""

    bounds_stride: int
    tiles_stride: int
    ntiles: int
    heads: int
    all_heads: int
    heads_per_wave: int


@lru_cache(maxsize=1024, typed=True)
def constants(kind: K) -> K:
    """Returns the fields of `kind` as constexprs; cached, because Triton finds identical objects faster."""
    return type(kind)(*map(gl.constexpr, kind))


def work_arguments(
    known: Intervals,
    batch: int,
    heads: int,
    streamed_bytes: int,
    waves: float,
    device: torch.device,
    *,
    in_order: bool = False,
) -> tuple[Tables, Tensor, Sizes, int]:
    """Returns the tables of a launch, the second number of its counter, its sizes and its number of programs.

    Args:
        known: mask tables of the launch.
        batch: number of sequences.
        heads: heads of a sequence.
        streamed_bytes: bytes that a head streams from the other side.
        waves: as for `choose_heads_per_wave`.
        device: the GPU.
        in_order: whether programs take tiles strictly in the order of their numbers.
    """
    ntiles = known.order.numel()
    programs = min(ntiles * batch * heads, processors(device))
    sizes = Sizes(
        bounds_stride=known.bounds_stride,
        tiles_stride=known.tiles_stride,
        ntiles=ntiles,
        heads=heads,
        all_heads=batch * heads,
        heads_per_wave=choose_heads_per_wave(ntiles, batch * heads, streamed_bytes, programs, waves, in_order=in_order),
    )
    counter = new_counter(0 if in_order else programs, device)
    return Tables(known.bounds, known.tiles, known.order, counter.following), counter.lost, sizes, programs


class Counter(NamedTuple):
    """Two int32 numbers of one launch, in device memory.

    Args:
        following: the number of the next tile that no program has taken.
        lost: a number that is not negative; a kernel makes it negative to report rows that are not finite.
    """

    following: Tensor
    lost: Tensor


def new_counter(taken: int, device: torch.device) -> Counter:
    """Returns numbers for a launch whose programs take the first `taken` tiles without a counter.

    One fill makes the numbers of many launches, because a fill takes the host as long as the launch itself. A CUDA
    graph has a fill of its own: its replays need new numbers each time.
    """
    if device.type != "cuda" or is_capturing() or (place := _next(taken, device)) is None:
        numbers = torch.full((1, NUMBERS), taken, dtype=torch.int32, device=device)[0]
    else:
        filled, index = place
        numbers = filled.numbers[index]
    if observers:
        observe_supply(lambda: supplied_counter(taken, device), numbers)
    return Counter(numbers, numbers[1:])


def supplied_counter(taken: int, device: torch.device) -> Memory | None:
    """Returns the memory of a `new_counter`, outside of captures; None on a stream that has no supply."""
    place = _next(taken, device)
    if place is None:
        return None
    filled, index = place
    return Memory(filled, filled.address + index * NUMBERS * 4)


class _Filled:
    """Counters for launches on one stream, in memory that outlives the pools of CUDA graphs."""

    def __init__(self, taken: int, device: torch.device) -> None:
        """Allocates and fills the counters on the current stream."""
        stream = torch.cuda.current_stream(device)

        def allocate() -> Tensor:
            with torch.cuda.stream(stream):
                return torch.empty((FILLED, NUMBERS), dtype=torch.int32, device=device)

        self.numbers = outside_pools(allocate, device).fill_(taken)
        self.address, self.indices = self.numbers.data_ptr(), iter(range(FILLED))


_filled: dict[tuple[int, int | None, int], _Filled] = {}


def _next(taken: int, device: torch.device) -> tuple[_Filled, int] | None:
    """Returns the place of a counter that no launch has used yet, among those of the current stream."""
    stream = current_stream(device)
    if stream == PER_THREAD:
        return None
    place = stream, device.index, taken
    filled = _filled.get(place)
    index = None if filled is None else next(filled.indices, None)
    if filled is None or index is None:
        filled = _filled[place] = _Filled(taken, device)
        index = next(filled.indices)
    return filled, index


@lru_cache(maxsize=1024)
def choose_heads_per_wave(
    ntiles: int, heads: int, streamed_bytes: int, programs: int, waves: float, *, in_order: bool = False
) -> int:
    """Returns how many heads share a wave, such that the last wave has about as many heads as the others.

    A wave has at least `waves` tiles for each program. A tile that processes `waves` times the average takes as long as
    `waves` average tiles. With fewer tiles in the last wave, its program would still run when all others have ended.
    """
    least = max(TOGETHER_BYTES // max(streamed_bytes, 1), ceil(waves * programs / ntiles))
    if in_order:
        least = max(least, programs // TOGETHER_TILES)
    if least >= heads:
        return heads
    return max(range(least, min(2 * least, heads) + 1), key=lambda size: (heads % size or size) / size)


_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class _View(TensorDescriptor):
    """A descriptor of a tensor that passed `is_viewable`; Triton's own checks take longer than the rest of a launch."""

    def __post_init__(self) -> None:
        """Checks nothing."""


def tile_view(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a descriptor of `x` (batch, seqlen, nheads, headdim) with tiles of (rows, columns)."""
    shape, (of_batch, of_row, of_head, _) = [*x.shape], x.stride()
    batch, seqlen, nheads, headdim = shape
    anything = headdim * 16  # the stride of a dimension of size 1 is never used, but Triton checks it
    strides = [
        of_batch if batch > 1 else anything,
        of_row if seqlen > 1 else anything,
        of_head if nheads > 1 else anything,
        1,
    ]
    return _View(x, shape, strides, [1, rows, 1, columns], layout(rows, columns, x.dtype))


def vector_view(x: Tensor, rows: int) -> TensorDescriptor:
    """Returns a descriptor of a contiguous tensor as one vector, with tiles of `rows` numbers."""
    return _View(x, [x.numel()], [1], [rows], vector_layout(x.itemsize * 8))


def rows_view(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a descriptor of a contiguous tensor as a matrix of `columns` columns, with unswizzled tiles of `rows`."""
    shape = [x.numel() // columns, columns]
    return _View(x, shape, [columns, 1], [rows, columns], rows_layout(x.itemsize * 8))


class _Layout(gl.NVMMASharedLayout):
    """A shared-memory layout with a cached repr, which Triton asks for at every launch to look up the kernel."""

    def __init__(self, layout: gl.NVMMASharedLayout) -> None:
        vars(self).update(vars(layout), words=repr(layout))

    def __repr__(self) -> str:
        return vars(self)["words"]


@cache
def vector_layout(bits: int) -> gl.NVMMASharedLayout:
    """Returns the shared-memory layout of a vector of numbers of `bits` bits."""
    return _Layout(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=1))


@cache
def rows_layout(bits: int) -> gl.NVMMASharedLayout:
    """Returns the unswizzled shared-memory layout of a matrix of numbers of `bits` bits, row after row."""
    return _Layout(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=2))


@cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Returns the shared-memory layout of a tile, swizzled for the tensor cores."""
    default = gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], _TYPES[dtype])
    return _Layout(default)  # pyright: ignore[reportArgumentType]
