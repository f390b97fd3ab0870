"""The planner of grouped hops: each rank sends its own KV directly to every rank that sees any of it, in one batch.

A rank stores its own rows first and, behind them, the rows received from other owners in rank order, in one buffer.
Gradients use the same places of that order on their way back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from ringflash.layouts.cuts import joined
from ringflash.layouts.layout import Chunk, Layout
from ringflash.masks import Mask
from ringflash.masks.pair_counts import area_of
from ringflash.ring.plan import Batch, Hop, Kind, Plan, Step, Transfer, visible_pairs
from ringflash.ring.ring_plan import make_plan

Range = tuple[int, int]


@dataclass(frozen=True)
class _Part:
    """Consecutive rows of one rank's KV that another rank sees.

    Args:
        owner: the rank that sends the rows.
        reader: the rank that receives the rows.
        first: index of the first row in the owner's shard.
        rows: number of rows.
        place: index of the first row in the reader's buffer.
    """

    owner: int
    reader: int
    first: int
    rows: int
    place: int


@lru_cache(maxsize=1024)
def make_grouped_plan(layout: Layout, mask: Mask, rank: int) -> Plan:
    """Returns the plan of `rank` with all hops grouped, or the ring's plan if no rank sees another's keys."""
    ring = make_plan(layout, mask, rank)
    if len(ring.hops) == 1:
        return ring
    parts = [_received(layout, mask, reader) for reader in range(layout.world_size)]
    buffers = [own + sum(part.rows for part in of) for own, of in zip(layout.lengths, parts, strict=True)]
    received, sent = parts[rank], [part for of in parts for part in of if part.owner == rank]
    own_rows, pairs = layout.length(rank), ring.pairs[rank]
    held = _held(layout, rank, received, bool(pairs[rank]))
    hop = Hop(
        0,
        tuple(owner for owner, seen in enumerate(pairs) if seen),
        tuple(Chunk(start, stop - start) for start, stop in joined([(chunk.start, chunk.stop) for chunk in held])),
        range(0 if pairs[rank] else own_rows, buffers[rank]),
        sum(pairs),
        kv_slot=0,
        gradient_slot=0,
        held=held,
    )
    out = [Transfer(Kind.KV, part.reader, True, 0, _rows(part.first, part)) for part in sent]
    into = [Transfer(Kind.KV, part.owner, False, 0, _rows(part.place, part), (0, part.first)) for part in received]
    # The gradients of received rows return to their owners. The shares of other ranks arrive in buffers of their own.
    returning = [Transfer(Kind.GRADIENT, part.owner, True, 0, _rows(part.place, part)) for part in received]
    shares = [
        Transfer(Kind.GRADIENT, part.reader, False, slot, _rows(0, part), (0, part.place), part.first, is_last_use=True)
        for slot, part in enumerate(sent, 1)
    ]
    steps = (
        Step(None, kv=(Batch((*out, *into), 0, 1),)),
        Step(hop),
        Step(None, gradients=(Batch((*returning, *shares), 0, 2),)),
    )
    slots = {"kv_slots": 1, "gradient_slots": 1, "slot_rows": max(buffers), "own_slot": 0}
    return replace(ring, steps=steps, grouped=True, **slots)


@lru_cache(maxsize=1024)
def receives_at_most(layout: Layout, mask: Mask, rows: int) -> bool:
    """Returns whether no rank would receive more than `rows` rows of other ranks' KV if hops were grouped."""
    # Under a causal mask the rank with the last tokens receives most. It comes first, so that a refusal is found early.
    readers = sorted(range(layout.world_size), key=lambda rank: -layout.chunks[rank][-1].stop)
    return all(sum(part.rows for part in _received(layout, mask, reader)) <= rows for reader in readers)


def _rows(first: int, part: _Part) -> range:
    return range(first, first + part.rows)


@lru_cache(maxsize=1024)
def _received(layout: Layout, mask: Mask, reader: int) -> tuple[_Part, ...]:
    """Returns the parts of other ranks' KV that `reader` receives in rank order.

    A part reaches from the first to the last row that the reader may see.
    """
    area = area_of(mask, layout.seqlen)
    ranges = area.reach([(chunk.start, chunk.stop) for chunk in layout.chunks[reader]])
    seen = visible_pairs(layout, mask)[reader]
    owners = [owner for owner, pairs in enumerate(seen) if pairs and owner != reader]
    rows = [_rows_within(layout.chunks[owner], ranges) for owner in owners]
    places = accumulate((stop - first for first, stop in rows), initial=layout.length(reader))
    return tuple(
        _Part(owner, reader, first, stop - first, place)
        for owner, (first, stop), place in zip(owners, rows, places, strict=False)
    )


def _rows_within(chunks: Sequence[Chunk], ranges: Sequence[Range]) -> Range:
    """Returns the rows [first, stop) of `chunks` from the first to the last one that lies in a range; ranges rise."""
    starts, stops = zip(*ranges, strict=True)
    edges: list[int] = []
    row = 0
    for chunk in chunks:
        nearest, behind = bisect_right(stops, chunk.start), bisect_left(starts, chunk.stop)
        if nearest < behind:
            edges.append(row + max(starts[nearest] - chunk.start, 0))
            edges.append(row + min(stops[behind - 1] - chunk.start, chunk.length))
        row += chunk.length
    return edges[0], edges[-1]


def _held(layout: Layout, rank: int, received: Sequence[_Part], sees_own: bool) -> tuple[Chunk, ...]:
    """Returns the chunks of the KV that `rank` computes with, in the order of its buffer."""
    held = list(layout.chunks[rank]) if sees_own else []
    for part in received:
        row = 0
        for chunk in layout.chunks[part.owner]:
            first, stop = max(part.first - row, 0), min(part.first + part.rows - row, chunk.length)
            if first < stop:
                held.append(Chunk(chunk.start + first, stop - first))
            row += chunk.length
    return tuple(held)
