"""Grids of ranks in two dimensions: heads are split over one dimension, and KV goes around a ring over the other.

Ranks that differ in their heads index alone form a group. A group stores one shard of the ring's layout, and each of
its ranks stores consecutive rows of that shard. Within the group, ranks exchange rows for heads: each rank then has the
whole shard for its heads, with chunks in the order of the ring's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from ringflash.checks import check_whole
from ringflash.errors import ArgumentError
from ringflash.layouts.layout import Chunk, Layout

RING, HEADS = "ring", "heads"  # names of a mesh's dimensions
HOPS = ("ring", "grouped", "auto")


@dataclass(frozen=True)
class Grid:
    """Arrangement of the ranks of a context.

    Args:
        ring: number of ranks that pass KV to each other.
        heads: number of ranks that heads are split over; 1 is a ring alone.
        places: (ring index, heads index) of each rank.
    """

    ring: int
    heads: int
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def of(world_size: int, heads: int = 1) -> Grid:
        """Returns the grid of `world_size` ranks, in groups of `heads` consecutive ranks.

        Raises:
            ArgumentError: `heads` is not a whole number, or does not divide `world_size`.
        """
        remedy = "Every group of ranks splits all heads."
        check_whole("heads", heads, 1, remedy)
        if world_size % heads:
            raise ArgumentError("heads", expected=f"a divisor of {world_size} ranks", got=heads, remedy=remedy)
        return Grid(world_size // heads, heads, tuple(divmod(rank, heads) for rank in range(world_size)))

    @staticmethod
    def of_mesh(mesh: DeviceMesh) -> Grid:
        """Returns the grid of a mesh with the dimensions `RING` and `HEADS`, in any order; ranks are counted upwards.

        Raises:
            ArgumentError: the mesh has other dimensions, or its ranks do not rise along both as the ranks of process
                groups do.
        """
        names = mesh.mesh_dim_names
        if set(names or ()) != {RING, HEADS}:
            remedy = f'Name both, as in init_device_mesh(device, (2, 4), mesh_dim_names=("{RING}", "{HEADS}")), '
            remedy += 'or pass one of them, as in mesh["context_parallel"].'
            expected = f'one dimension, or two named "{RING}" and "{HEADS}"'
            got = f"{mesh.ndim} without names" if names is None else f"dimensions {names}"
            raise ArgumentError("mesh", expected=expected, got=got, remedy=remedy)
        ranks = mesh.mesh if names == (RING, HEADS) else mesh.mesh.T
        if bool((ranks.diff(dim=0) < 0).any() or (ranks.diff(dim=1) < 0).any()):
            remedy = "Lay the ranks out in their order, as init_device_mesh does."
            expected = "ranks that rise along both dimensions"
            raise ArgumentError("mesh", expected=expected, got=mesh.mesh.tolist(), remedy=remedy)
        order = ranks.flatten().argsort().tolist()
        return Grid(ranks.shape[0], ranks.shape[1], tuple(divmod(place, ranks.shape[1]) for place in order))

    def __str__(self) -> str:
        """Returns the grid as text; empty for a ring alone."""
        return "" if self.heads == 1 else f"{RING} {self.ring} x {HEADS} {self.heads}"

    def group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that split heads with `rank`, by heads index."""
        return self._line(0, self.places[rank][0])

    def ring_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks in a ring with `rank`, by ring index."""
        return self._line(1, self.places[rank][1])

    def _line(self, dim: int, index: int) -> tuple[int, ...]:
        chosen = [rank for rank, place in enumerate(self.places) if place[dim] == index]
        return tuple(sorted(chosen, key=lambda rank: self.places[rank]))


def split_rows(layout: Layout, grid: Grid) -> Layout:
    """Returns the layout over all ranks of `grid`, from the `layout` over its groups.

    A group's rows, in storage order, are cut into consecutive parts; their lengths differ by at most one.

    Raises:
        ArgumentError: a group stores fewer rows than it has ranks.
    """
    if grid.heads == 1:
        return layout
    if min(layout.lengths) < grid.heads:
        raise ArgumentError(
            "seqlen",
            expected=f"at least one token a rank ({grid.ring} x {grid.heads} ranks)",
            got=f"{layout.seqlen} tokens",
            remedy="Use fewer ranks for so short a sequence, or flash_attention on one device.",
        )
    parts = [_parts(chunks, grid.heads) for chunks in layout.chunks]
    return Layout(layout.name, layout.seqlen, tuple(parts[ring][heads] for ring, heads in grid.places))


def _parts(chunks: tuple[Chunk, ...], count: int) -> list[tuple[Chunk, ...]]:
    """Cuts the rows of `chunks`, in storage order, into `count` parts of even length, the longer ones first."""
    base, longer = divmod(sum(chunk.length for chunk in chunks), count)
    parts, left = [], list(chunks)
    for index in range(count):
        part, missing = [], base + (index < longer)
        while missing:
            first = left.pop(0)
            taken = min(first.length, missing)
            part.append(Chunk(first.start, taken))
            missing -= taken
            if taken < first.length:
                left.insert(0, Chunk(first.start + taken, first.length - taken))
        parts.append(tuple(part))
    return parts


def check_schedule(hops: str, inner_ring: int | None, ring: int) -> None:
    """Raises ArgumentError unless a ring of `ring` ranks can have these `hops` and this inner ring."""
    if hops not in HOPS:
        raise ArgumentError("hops", expected=f"one of {HOPS}", got=repr(hops), remedy="Choose one of these.")
    if hops == "grouped" and inner_ring is not None:
        remedy = "Leave out inner_ring, or hops: one is for slow links and long sequences, the other for short ones."
        raise ArgumentError("hops", expected="no inner_ring with grouped hops", got=inner_ring, remedy=remedy)
    if inner_ring is not None:
        remedy = "Pass how many neighbours in the ring fast links join, or nothing for one ring."
        check_whole("inner_ring", inner_ring, 1, remedy)
        if ring % inner_ring:
            expected = f"a divisor of the ring's {ring} ranks"
            raise ArgumentError("inner_ring", expected=expected, got=inner_ring, remedy=remedy)
