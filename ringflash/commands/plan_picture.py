"""Picture of a plan: the tokens of each rank, the hop that computes each pair, and each rank's share of the FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ringflash.commands.picture import picture
from ringflash.layouts.layout import Layout
from ringflash.ring.plan import Plan

CELLS = 256  # cells of the map along each side
WHITE = (1.0, 1.0, 1.0, 1.0)
MOST_LABELS = 16  # hops that the legend names


def draw(path: Path, plans: Sequence[Plan]) -> None:
    """Draws `plans`, one of each rank, to the file `path`."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    first, world = plans[0], len(plans)
    hops = [hop.index for hop in first.hops]
    colours = colormaps["viridis"].resampled(max(len(hops), 2))
    with picture(path, (11, 7 + 0.12 * world)) as figure:
        axes = figure.subplot_mosaic([["held", "held"], ["map", "shares"]], height_ratios=[1 + 0.12 * world, 5])
        held, pairs, shares = axes["held"], axes["map"], axes["shares"]

        for rank, chunks in enumerate(first.layout.chunks):
            spans = [(chunk.start, chunk.length) for chunk in chunks]
            held.broken_barh(spans, (rank - 0.4, 0.8), facecolors=f"C{rank % 10}", edgecolors="white", linewidth=0.3)
        held.set_title("tokens that each rank holds", fontsize=10)
        held.set(xlim=(0, first.layout.seqlen), ylim=(world - 0.4, -0.6), yticks=range(0, world, -(-world // 16)))
        held.set_ylabel("rank")

        pairs.imshow(
            _map(plans, [colours(hop) for hop in hops]),
            extent=(0, first.layout.seqlen, first.layout.seqlen, 0),
            interpolation="nearest",
        )
        pairs.set_title("at which hop queries meet keys; white: never", fontsize=10)
        pairs.set(xlabel="key", ylabel="query")
        pairs.locator_params(nbins=5)

        total = max(sum(map(sum, first.pairs)), 1)
        below = [0.0] * world
        for hop in hops:
            heights = [plan.hops[hop].pairs / total * 100 for plan in plans]
            shares.bar(range(world), heights, bottom=below, color=colours(hop), width=0.8)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        shares.axhline(100 / world, color="gray", ls=":", lw=1)
        shares.set_title(f"share of FLOPs; the busiest rank has {first.balance:.3f} of the mean (dotted)", fontsize=10)
        shares.set(xlabel="rank", ylabel="percent", xticks=range(0, world, -(-world // 16)))

        title = f"{first.layout.name}, {first.mask!r}: {first.layout.seqlen} tokens over {world} ranks"
        figure.suptitle(title, fontsize=11)
        named = hops[:: -(-len(hops) // MOST_LABELS)]
        patches = [Patch(color=colours(hop), label=f"hop {hop}") for hop in named]
        figure.legend(handles=patches, loc="outside lower center", ncols=8, fontsize=9)


def _map(plans: Sequence[Plan], colours: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """Returns the colour of each cell of queries and keys: it shows the hop that computes the middle of the cell."""
    layout, world = plans[0].layout, len(plans)
    cells = min(CELLS, layout.seqlen)
    edges = torch.tensor([index * layout.seqlen // cells for index in range(cells + 1)], device="cpu")
    owners = _owners(layout, ((edges[:-1] + edges[1:]) // 2).tolist())
    area = plans[0].mask.area(layout.seqlen, layout.seqlen)
    rows = []
    for row, (start, stop) in enumerate(zip(edges.tolist(), edges.tolist()[1:], strict=False)):
        seen = (area.seen([(start, stop)], edges) > 0).tolist()
        # A cell on a border may have visible pairs where the ranks of its middle have none. Then the plan may lack
        # this hop, and the cell stays white.
        hops = [(owners[row] - owner) % world for owner in owners]
        drawn = [shown and hop < len(colours) for shown, hop in zip(seen, hops, strict=True)]
        rows.append([colours[hop] if there else WHITE for there, hop in zip(drawn, hops, strict=True)])
    return rows


def _owners(layout: Layout, positions: Sequence[int]) -> list[int]:
    """Returns the rank that holds each of `positions`."""
    pieces = sorted((chunk.start, rank) for rank, chunks in enumerate(layout.chunks) for chunk in chunks)
    starts, ranks = (torch.tensor(x, device="cpu") for x in zip(*pieces, strict=True))
    index = torch.searchsorted(starts, torch.tensor(positions, device="cpu"), right=True) - 1
    return ranks[index].tolist()
