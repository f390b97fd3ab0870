"""Layouts, which assign chunks of the sequence to ranks, and the cutting and joining of tensors by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.layouts.balance import Pairs, balanced
from ringflash.layouts.cuts import Cut, joined

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
STRIPE = 256  # rows, a multiple of the tile sizes of every kernel
FEWEST_STRIPES, MOST_STRIPES = 4, 64  # of a rank; limited, as kernels have a table entry for each stripe and tile


@dataclass(frozen=True)
class Chunk:
    """Consecutive global positions `[start, start + length)`, stored together on one rank."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """Returns one past the last global position."""
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """A cut of a sequence over ranks: `chunks[rank]` are the chunks that a rank stores, in storage order.

    Args:
        name: one of `LAYOUTS`.
        seqlen: number of tokens in the whole sequence.
        chunks: the chunks of each rank; none is empty, none adjoins the one before it.
    """

    name: str
    seqlen: int
    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def world_size(self) -> int:
        """Returns the number of ranks that the sequence is cut over."""
        return len(self.chunks)

    def length(self, rank: int) -> int:
        """Returns the number of tokens that `rank` stores."""
        return self._lengths[rank]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the number of tokens that each rank stores, in rank order."""
        return tuple(sum(chunk.length for chunk in chunks) for chunks in self.chunks)

    @property
    def least_length(self) -> int:
        """Returns the least number of tokens that a rank stores; others store as many, or one more."""
        return self.seqlen // self.world_size

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return self.lengths  # cached: every hop reads it; Dynamo, which has no cached_property, traces only `lengths`

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.seqlen, self.chunks))  # cached: it reads all chunks, and every call looks plans up


def make_layout(name: str, seqlen: int, world_size: int, mask: HasArea | None = None) -> Layout:
    """Cuts `seqlen` tokens over `world_size` ranks, with token counts that differ by at most one.

    The chunks of a rank are stored in rising order of their positions.

    contiguous: rank r stores chunk r of `world_size`. Its work is even for masks under which every query sees the same
    number of keys.

    zigzag: rank r stores chunks r and `2 * world_size - 1 - r` of `2 * world_size`, which gives every rank the same
    causal work. Chunk lengths differ by at most one, the longer chunks first, so that every rank stores something
    whenever `seqlen >= world_size`.

    striped: many stripes, dealt to the ranks in rounds, forwards and backwards. Causal work is even here too, and under
    most other masks nearly so. It suits masks that are not known when the sequence is cut. A stripe is the least
    multiple of 256 rows, whole tiles of every kernel, that gives a rank at most 64 stripes. The tokens left over by the
    last round are shared out in shorter stripes. Ranks of less than 1024 rows have four stripes. Source: Brandon et al.
    2023, "Striped Attention".

    balanced: every rank gets the same work under `mask`, to 5% if the mask allows it, and keys travel no further than
    necessary: see `ringflash.layouts.balance`.

    Args:
        name: one of `LAYOUTS`.
        seqlen: number of tokens in the whole sequence.
        world_size: number of ranks.
        mask: the mask of the attention, for "balanced"; other layouts do not depend on it.

    Raises:
        ArgumentError: unknown layout, fewer tokens than ranks, "balanced" without a mask or with one that does not fit.
    """
    if name not in LAYOUTS:
        raise ArgumentError("layout", expected=f"one of {LAYOUTS}", got=repr(name), remedy="Choose one of these.")
    if seqlen < world_size:
        raise ArgumentError(
            "seqlen",
            expected=f"at least one token a rank ({world_size} ranks)",
            got=f"{seqlen} tokens",
            remedy="Use fewer ranks for so short a sequence, or flash_attention on one device.",
        )
    if name != "balanced":
        plain = _plain_layout.__wrapped__ if torch.compiler.is_compiling() else _plain_layout  # Dynamo traces no cache
        return plain(name, seqlen, world_size)
    if mask is None:
        remedy = "Pass the mask of the attention, or choose a layout that is the same under every mask."
        raise ArgumentError("mask", expected='the mask that layout "balanced" follows', got=None, remedy=remedy)
    mask.validate(seqlen)
    return _balanced_layout(seqlen, world_size, mask)


class HasArea(Protocol):
    """A mask, reduced to the methods that a layout needs; hashable."""

    def validate(self, seqlen: int) -> None:
        """Raises ArgumentError if the mask does not fit `seqlen` keys."""
        ...

    def area(self, seqlen_q: int, seqlen_k: int) -> Pairs:
        """Returns its counts of visible pairs."""
        ...


@lru_cache(maxsize=1024)
def _plain_layout(name: str, seqlen: int, world_size: int) -> Layout:
    return _layout(name, seqlen, _CUTS[name](seqlen, world_size))


@lru_cache(maxsize=1024)
def _balanced_layout(seqlen: int, world_size: int, mask: HasArea) -> Layout:
    plain = [cut(seqlen, world_size) for cut in (_contiguous, _zigzag)]
    return _layout("balanced", seqlen, balanced(mask.area(seqlen, seqlen), world_size, plain))


def _layout(name: str, seqlen: int, cut: Cut) -> Layout:
    return Layout(name, seqlen, tuple(tuple(Chunk(start, stop - start) for start, stop in ranges) for ranges in cut))


def _contiguous(seqlen: int, world_size: int) -> Cut:
    return _owned(_edges(0, seqlen, world_size), [(rank,) for rank in range(world_size)])


def _zigzag(seqlen: int, world_size: int) -> Cut:
    owned = [(rank, 2 * world_size - 1 - rank) for rank in range(world_size)]
    return _owned(_edges(0, seqlen, 2 * world_size), owned)


def _striped(seqlen: int, world_size: int) -> Cut:
    rows = seqlen // world_size
    if rows >= STRIPE * FEWEST_STRIPES:
        stripe = STRIPE * -(-rows // (STRIPE * MOST_STRIPES))
    else:
        stripe = max(rows // FEWEST_STRIPES, 1)
    rounds = rows // stripe
    whole = rounds * world_size * stripe
    edges = [*range(0, whole, stripe), *_edges(whole, seqlen, world_size)]
    both_ways = [(rank, world_size - 1 - rank) for rank in range(world_size)]
    return _owned(edges, [[turn * world_size + way[turn % 2] for turn in range(rounds + 1)] for way in both_ways])


_CUTS = {"contiguous": _contiguous, "zigzag": _zigzag, "striped": _striped}


def _edges(start: int, stop: int, count: int) -> list[int]:
    """Returns the edges of `count` pieces of [start, stop), longer ones first; lengths differ by at most one."""
    base, longer = divmod(stop - start, count)
    return [start + index * base + min(index, longer) for index in range(count + 1)]


def _owned(edges: Sequence[int], owned: Sequence[Sequence[int]]) -> Cut:
    """Returns the cut in which rank r owns the pieces `owned[r]`; piece i lies between edges i and i + 1."""
    return tuple(joined([(edges[index], edges[index + 1]) for index in indices]) for indices in owned)


def positions(chunks: Sequence[Chunk], device: torch.device | str | None = None) -> Tensor:
    """Returns the global positions of the rows of `chunks`, in storage order: int64 (rows,)."""
    pieces = [torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def checked_dim(x: Tensor, dim: int) -> int:
    """Returns `dim` of `x`, counted from the first dimension.

    Raises:
        ArgumentError: `x` is not a tensor, or has no such dimension.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError("x", expected="a tensor", got=type(x).__name__, remedy="Pass a torch tensor.")
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        expected = f"a dimension of a tensor of shape {tuple(x.shape)}"
        remedy = "Pass the dimension of tokens, and a tensor that has one."
        raise ArgumentError("dim", expected=expected, got=repr(dim), remedy=remedy)
    return dim % x.ndim


def take(x: Tensor, chunks: Sequence[Chunk], dim: int) -> Tensor:
    """Returns the rows of `chunks` from the whole sequence `x`, in storage order: a contiguous copy."""
    return torch.cat([x.narrow(dim, chunk.start, chunk.length) for chunk in chunks], dim=dim).contiguous()


def put_together(rows: Tensor, chunks: Sequence[Chunk], dim: int) -> Tensor:
    """Returns the whole sequence in order from all its rows in storage order: the inverse of `take` over all ranks."""
    pieces = torch.split(rows, [chunk.length for chunk in chunks], dim=dim)
    order = sorted(range(len(chunks)), key=lambda i: chunks[i].start)
    return torch.cat([pieces[i] for i in order], dim=dim)
