"""Which chunks of the sequence live on which rank: layouts, and cutting and joining tensors by them."""

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
STRIPE = 256  # rows: whole tiles of every kernel
FEWEST_STRIPES, MOST_STRIPES = 4, 64  # of a rank; kernels have a table entry for each stripe and tile


@dataclass(frozen=True)
class Chunk:
    """Consecutive global positions `[start, start + length)`, stored together on one rank."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last global position."""
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """A cut of a sequence over ranks: `chunks[rank]` is what that rank stores, in storage order.

    Args:
        name: one of `LAYOUTS`.
        seqlen: tokens in the whole sequence.
        chunks: for each rank its chunks; none is empty, none adjoins the one before it.
    """

    name: str
    seqlen: int
    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks the sequence is cut over."""
        return len(self.chunks)

    def length(self, rank: int) -> int:
        """Tokens that `rank` stores."""
        return self._lengths[rank]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens each rank stores, in rank order."""
        return tuple(sum(chunk.length for chunk in chunks) for chunks in self.chunks)

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return self.lengths  # asked for at every hop; not where Dynamo traces, which knows no cached property

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.seqlen, self.chunks))  # of every chunk: plans are looked up at each call


def make_layout(name: str, seqlen: int, world_size: int, mask: HasArea | None = None) -> Layout:
    """Cuts `seqlen` tokens over `world_size` ranks, every rank's in rising order; a rank has as many as any, to one.

    contiguous: rank r stores chunk r of `world_size`. Even for masks that show every query as much.

    zigzag: rank r stores chunks r and `2 * world_size - 1 - r` of `2 * world_size`, which gives every rank the same
    causal work. Chunk lengths differ by at most one, the longer chunks first, so that every rank stores something
    whenever `seqlen >= world_size`.

    striped: many stripes, dealt to the ranks in turn, forwards and backwards, so that causal work is even here too, and
    much else nearly. For masks that are not known when the sequence is cut. A stripe is a multiple of 256 rows, whole
    tiles of every kernel, and the least that makes 64 a rank at most; what the last round leaves over is shared out in
    shorter ones. Ranks of less than 1024 rows have four stripes. Source: Brandon et al. 2023, "Striped Attention".

    balanced: every rank gets the same work under `mask`, to 5% where the mask allows it, and keys travel no further
    than that needs: see `ringflash.layouts.balance`.

    Args:
        name: one of `LAYOUTS`.
        seqlen: tokens in the whole sequence.
        world_size: ranks.
        mask: what a balanced layout follows; any other is the same whatever the mask.

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
    """A mask, as far as a layout knows it; hashable."""

    def validate(self, seqlen: int) -> None:
        """Raises ArgumentError when it does not fit `seqlen` keys."""
        ...

    def area(self, seqlen_q: int, seqlen_k: int) -> Pairs:
        """Its counts of visible pairs."""
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
    """Edges of `count` pieces of [start, stop), the longer first, whose lengths differ by at most one."""
    base, longer = divmod(stop - start, count)
    return [start + index * base + min(index, longer) for index in range(count + 1)]


def _owned(edges: Sequence[int], owned: Sequence[Sequence[int]]) -> Cut:
    """For each rank the pieces between neighbouring edges that it owns, by number."""
    return tuple(joined([(edges[index], edges[index + 1]) for index in indices]) for indices in owned)


def positions(chunks: Sequence[Chunk], device: torch.device | str | None = None) -> Tensor:
    """Global positions of the rows that `chunks` store, in storage order: int64 (rows,)."""
    pieces = [torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def checked_dim(x: Tensor, dim: int) -> int:
    """`dim` of `x`, counted from its first. Raises ArgumentError where it has no such dimension."""
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        expected = f"a dimension of a tensor of shape {tuple(x.shape)}"
        remedy = "Pass the dimension of tokens, and a tensor that has one."
        raise ArgumentError("dim", expected=expected, got=repr(dim), remedy=remedy)
    return dim % x.ndim


def take(x: Tensor, chunks: Sequence[Chunk], dim: int) -> Tensor:
    """Rows of the whole sequence `x` that `chunks` name, in storage order: a contiguous copy."""
    return torch.cat([x.narrow(dim, chunk.start, chunk.length) for chunk in chunks], dim=dim).contiguous()


def put_together(rows: Tensor, chunks: Sequence[Chunk], dim: int) -> Tensor:
    """The whole sequence in order, from all its rows in storage order; inverse of `take` over all ranks' chunks."""
    pieces = torch.split(rows, [chunk.length for chunk in chunks], dim=dim)
    order = sorted(range(len(chunks)), key=lambda i: chunks[i].start)
    return torch.cat([pieces[i] for i in order], dim=dim)
