"""What a launch of a Hopper kernel is told beside its tensors: its tiles, and how programs share them out."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from triton.experimental.gluon import language as gl

from ringflash.kernels.hopper.mask_tables import Intervals
from ringflash.kernels.triton.config import processors

K = TypeVar("K", bound=tuple[Any, ...])

TOGETHER_BYTES = 16 * 2**20  # of what the heads stream whose tiles are mixed: it stays in L2
TOGETHER_TILES = 6  # of keys of one head at a time, at the most, where each waits for the one before it


class Tables(NamedTuple):
    """The tensors of `Bounds` and `Work`, as a kernel takes them."""

    bounds: Any
    tiles: Any
    order: Any
    counter: Any


class Sizes(NamedTuple):
    """The numbers of both: arguments of their own, since those of a tuple would be compiled for."""

    bounds_stride: int
    tiles_stride: int
    ntiles: int
    heads: int
    all_heads: int
    heads_per_wave: int


@lru_cache(maxsize=1024, typed=True)
def constants(kind: K) -> K:
    """What a kernel is compiled for, as it takes it: the same objects again, which Triton then finds sooner."""
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
) -> tuple[Tables, Sizes, int]:
    """A launch as a kernel takes it, and on how many programs.

    `streamed_bytes` are a head's, of what is visited; `waves` as for `choose_heads_per_wave`.
    """
    ntiles = known.order.numel()
    programs = min(ntiles * batch * heads, processors(device))
    counter = torch.full((1,), 0 if in_order else programs, dtype=torch.int32, device=device)
    sizes = Sizes(
        bounds_stride=known.bounds_stride,
        tiles_stride=known.tiles_stride,
        ntiles=ntiles,
        heads=heads,
        all_heads=batch * heads,
        heads_per_wave=choose_heads_per_wave(ntiles, batch * heads, streamed_bytes, programs, waves, in_order=in_order),
    )
    return Tables(known.bounds, known.tiles, known.order, counter), sizes, programs


@lru_cache(maxsize=1024)
def choose_heads_per_wave(
    ntiles: int, heads: int, streamed_bytes: int, programs: int, waves: float, *, in_order: bool = False
) -> int:
    """Heads whose tiles are mixed, so many that the last of such groups has about as many as the others.

    At least `waves` tiles for each program: one that visits so many times the average takes as long as that many, and
    with fewer, of the last heads, a program would still be at it when all others are through.
    """
    least = max(TOGETHER_BYTES // max(streamed_bytes, 1), ceil(waves * programs / ntiles))
    if in_order:
        least = max(least, programs // TOGETHER_TILES)
    if least >= heads:
        return heads
    return max(range(least, min(2 * least, heads) + 1), key=lambda size: (heads % size or size) / size)
