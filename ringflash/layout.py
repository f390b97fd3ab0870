"""Which chunks of the sequence live on which rank: layouts, and cutting and joining tensors by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.errors import ArgumentError

LAYOUTS = ("contiguous", "zigzag")


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
        return sum(chunk.length for chunk in self.chunks[rank])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens each rank stores, in rank order."""
        return tuple(self.length(rank) for rank in range(self.world_size))


def make_layout(name: str, seqlen: int, world_size: int) -> Layout:
    """Cuts `seqlen` tokens over `world_size` ranks.

    contiguous: rank r stores chunk r of `world_size`. zigzag: rank r stores chunks r and `2 * world_size - 1 - r` of
    `2 * world_size`, which gives every rank the same causal work. Chunk lengths differ by at most one, the longer
    chunks first, so that every rank stores something whenever `seqlen >= world_size`.

    Raises:
        ArgumentError: unknown layout, or fewer tokens than ranks.
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
    if name == "contiguous":
        owned = [(rank,) for rank in range(world_size)]
    else:
        owned = [(rank, 2 * world_size - 1 - rank) for rank in range(world_size)]
    count = sum(len(indices) for indices in owned)
    base, longer = divmod(seqlen, count)

    def chunk(index: int) -> Chunk:
        return Chunk(start=index * base + min(index, longer), length=base + (index < longer))

    return Layout(name, seqlen, tuple(_joined(map(chunk, indices)) for indices in owned))


def _joined(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Without empty chunks, and with neighbours made one: fewer and fuller tiles."""
    result: list[Chunk] = []
    for chunk in chunks:
        if result and result[-1].stop == chunk.start:
            result[-1] = Chunk(result[-1].start, result[-1].length + chunk.length)
        elif chunk.length:
            result.append(chunk)
    return tuple(result)


def positions(chunks: Sequence[Chunk], device: torch.device | str | None = None) -> Tensor:
    """Global positions of the rows that `chunks` store, in storage order: int64 (rows,)."""
    pieces = [torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def take(x: Tensor, chunks: Sequence[Chunk], dim: int) -> Tensor:
    """Rows of the whole sequence `x` that `chunks` name, in storage order: a contiguous copy."""
    return torch.cat([x.narrow(dim, chunk.start, chunk.length) for chunk in chunks], dim=dim).contiguous()


def put_together(rows: Tensor, chunks: Sequence[Chunk], dim: int) -> Tensor:
    """The whole sequence in order, from all its rows in storage order; inverse of `take` over all ranks' chunks."""
    pieces = torch.split(rows, [chunk.length for chunk in chunks], dim=dim)
    order = sorted(range(len(chunks)), key=lambda i: chunks[i].start)
    return torch.cat([pieces[i] for i in order], dim=dim)
