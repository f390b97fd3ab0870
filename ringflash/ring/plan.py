"""What one rank does in a ring: a pure function of layout, mask and rank.

KV of every rank moves one rank up a hop: at hop h, rank r holds the KV of rank (r - h) mod P, its owner. KV travels no
further than the last rank that sees any of it (its reach). In the backward the gradient of that KV follows one hop
behind and returns home from there.

Hops may be grouped into one, in which every rank has the KV of all ranks at once that it sees any of: see
`ringflash.ring.exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ringflash.layouts.balance import critical_path, reaches
from ringflash.layouts.layout import Chunk, Layout
from ringflash.masks import Mask
from ringflash.masks.pair_counts import PairCounts
from ringflash.ring.exchange import Exchange, Part, exchange_of, received_by

SHOWN = 4  # chunks of a hop that are printed


@dataclass(frozen=True)
class Hop:
    """One step of the ring on one rank.

    Args:
        index: hop number, 0 for the rank's own KV.
        owner: the rank whose KV is here, if `present`.
        present: whether that KV is here at all; False when nobody from here on needs it.
        rows: of that KV; 0 when it is not present.
        pairs: visible (query, key) pairs of this rank's queries and that KV, over the sequences the mask speaks of.
        send_kv: pass this KV on to the next rank while computing.
        receive_kv: the next hop's KV arrives from the previous rank meanwhile.
        send_grad_home: in the backward, this was the KV's last stop: its gradient returns to `owner`.
        grad_comes_home: in the backward, this rank's own KV gradient returns after this hop, from this rank.
        revolution: which one of a double ring, 0 in a ring.
        opens_revolution: whether this KV came from the group of ranks before, and its revolution of this group begins.
        far_to: the rank in the next group that this KV is sent to during the whole revolution, if any.
        far_from: the rank in the group before from which the KV that begins the next revolution arrives meanwhile.
        exchange: where hops are grouped, what is sent and received directly for this one, the only one, which computes
            with all of it; `pairs` are then of all, `owner` and `rows` are the rank itself and its own.
    """

    index: int
    owner: int
    present: bool
    rows: int
    pairs: int
    send_kv: bool
    receive_kv: bool
    send_grad_home: bool
    grad_comes_home: int | None
    revolution: int = 0
    opens_revolution: bool = False
    far_to: int | None = None
    far_from: int | None = None
    exchange: Exchange | None = None

    @property
    def starts(self) -> bool:
        """Whether this KV makes its first stop here, or in this group: a gradient of it starts anew."""
        return self.index == 0 or self.opens_revolution

    @property
    def meets(self) -> bool:
        """Whether any query of this rank sees any of that KV; False means nothing to compute."""
        return self.pairs > 0

    @property
    def passes_on(self) -> bool:
        """Whether that KV is here for the ranks after this one alone."""
        return self.present and not self.meets and self.index > 0

    @property
    def rows_sent(self) -> int:
        """KV rows that leave at this hop, in either pass."""
        direct = 0 if self.exchange is None else self.exchange.rows_sent
        return direct + self.rows * (self.send_kv + (self.far_to is not None))

    @property
    def gradient_rows_sent(self) -> int:
        """Rows of dK and dV that leave after this hop in the backward: on with their KV, or home."""
        direct = 0 if self.exchange is None else self.exchange.rows_received
        return direct + self.rows * (self.send_kv + self.send_grad_home)


@dataclass(frozen=True)
class Plan:
    """The hops of one rank under a layout and a mask.

    Args:
        layout: the cut of the sequence.
        mask: which keys a query sees.
        rank: whose plan this is.
        q_chunks: where this rank's queries stand.
        hops: in order; the same number on every rank.
        pairs: for each rank, visible pairs of its queries with each rank's keys.
        inner: ranks of a group, in which KV goes around before the next group has it; None is a ring of all ranks.
    """

    layout: Layout
    mask: Mask
    rank: int
    q_chunks: tuple[Chunk, ...]
    hops: tuple[Hop, ...]
    pairs: tuple[tuple[int, ...], ...]
    inner: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks in the ring."""
        return self.layout.world_size

    @property
    def grouped(self) -> bool:
        """Whether hops are grouped into one."""
        return self.hops[0].exchange is not None

    @property
    def next_rank(self) -> int:
        """Where this rank sends KV."""
        return self._neighbour(1)

    @property
    def previous_rank(self) -> int:
        """Where this rank's KV comes from."""
        return self._neighbour(-1)

    def _neighbour(self, step: int) -> int:
        size = self.inner or self.world_size
        return self.rank // size * size + (self.rank + step) % size

    def ends_revolution(self, hop: Hop) -> bool:
        """Whether KV of another group is here next, or none."""
        return hop.index + 1 == len(self.hops) or self.hops[hop.index + 1].opens_revolution

    def next_revolution(self, hop: Hop) -> Hop:
        """The hop that begins it."""
        return next(after for after in self.hops[hop.index + 1 :] if after.opens_revolution)

    def owner_chunks(self, hop: Hop) -> tuple[Chunk, ...]:
        """Chunks of the KV at `hop`."""
        return self.layout.chunks[hop.owner] if hop.exchange is None else hop.exchange.chunks

    def meetings(self, hop: Hop) -> tuple[tuple[Chunk, Chunk], ...]:
        """The chunks of queries and of keys that see any of each other at `hop`."""
        if not hop.meets:
            return ()
        area = _area(self.mask, self.layout.seqlen)
        found = []
        for q in self.q_chunks:
            for k in self.owner_chunks(hop):
                if int(area.seen([(q.start, q.stop)], torch.tensor([k.start, k.stop], device="cpu"))):
                    found.append((q, k))
        return tuple(found)

    @property
    def balance(self) -> float:
        """Visible pairs of the rank with the most, over the mean of all: 1 is even. Of no pairs at all, 1."""
        work = [sum(row) for row in self.pairs]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    @property
    def critical_path(self) -> float:
        """Time of one ring in units of the mean rank's work, when messages cost nothing: at least `balance`.

        That is it where hops are grouped: nobody waits for what others compute.
        """
        return self.balance if self.grouped else critical_path(torch.tensor(self.pairs, device="cpu"))

    @property
    def share(self) -> float:
        """This rank's visible pairs over those of all ranks; of no pairs at all, an equal share."""
        total = sum(map(sum, self.pairs))
        return sum(self.pairs[self.rank]) / total if total else 1.0 / self.world_size

    @property
    def rows_sent(self) -> int:
        """KV rows that this rank sends in a forward."""
        return sum(hop.rows_sent for hop in self.hops)

    @property
    def rows_passed_on(self) -> int:
        """KV rows that this rank receives and that none of its queries sees."""
        return sum(hop.rows for hop in self.hops if hop.passes_on)

    @property
    def gradient_rows_sent(self) -> int:
        """Rows of dK and dV that this rank sends in a backward, beside the KV rows, which travel again."""
        return sum(hop.gradient_rows_sent for hop in self.hops)

    def bytes_sent(self, batch: int, nheads_kv: int, headdim: int, itemsize: int) -> int:
        """Bytes that this rank sends in a forward: keys and values of `rows_sent` rows."""
        return 2 * batch * self.rows_sent * nheads_kv * headdim * itemsize

    def bytes_sent_backward(
        self, batch: int, nheads_kv: int, headdim: int, itemsize: int, gradient_itemsize: int = 4
    ) -> int:
        """Bytes that this rank sends in a backward: keys and values again, and their gradients, float32 by default."""
        gradients = 2 * batch * self.gradient_rows_sent * nheads_kv * headdim * gradient_itemsize
        return self.bytes_sent(batch, nheads_kv, headdim, itemsize) + gradients

    def flops(self, batch: int, nheads: int, headdim: int, *, hop: Hop | None = None, backward: bool = False) -> int:
        """FLOPs of the matmuls over visible pairs, of this rank's pass or of one hop of it.

        A forward has two matmuls, of 2 headdim FLOPs a pair and head each, a backward five.
        """
        pairs = sum(self.pairs[self.rank]) if hop is None else hop.pairs
        sequences = batch if self.mask.batch == 1 else 1  # else the pairs are those of all its sequences
        return (5 if backward else 2) * 2 * pairs * sequences * nheads * headdim

    def __str__(self) -> str:
        """A table, a line a hop."""
        layout = self.layout
        lines = [
            f"rank {self.rank} of {self.world_size}, {layout.name}, {self.mask!r}, {layout.seqlen} tokens",
            f"  {sum(self.pairs[self.rank])} visible pairs, {self.share:.1%} of all; the busiest rank has "
            f"{self.balance:.2f} of the mean; sends {self.rows_sent} rows, and {self.gradient_rows_sent} of gradients",
        ]
        for hop in self.hops:
            doing = f"compute {hop.pairs} pairs" if hop.meets else ("pass on" if hop.passes_on else "idle")
            moves = f"send {hop.rows} -> {self.next_rank}  " if hop.send_kv else ""
            moves += f"receive {self.hops[hop.index + 1].rows} <- {self.previous_rank}  " if hop.receive_kv else ""
            moves += f"send far {hop.rows} -> {hop.far_to}  " if hop.far_to is not None else ""
            moves += f"receive far <- {hop.far_from}" if hop.far_from is not None else ""
            owner = f"rank {hop.owner}"
            if hop.exchange is not None:
                owner, direct = self._exchanged(hop.exchange)
                moves += direct
            chunks = self.owner_chunks(hop)
            named = ", ".join(f"[{c.start}, {c.stop})" for c in chunks[:SHOWN])
            named += f", ... {len(chunks)} in all" if len(chunks) > SHOWN else ""
            whose = f"KV of {owner} {named}".rstrip()
            lines.append(f"  hop {hop.index}: {whose}: {doing}  {moves}".rstrip())
        return "\n".join(lines)

    def _exchanged(self, exchange: Exchange) -> tuple[str, str]:
        """Whose KV a grouped hop computes with, and what moves, in words."""
        seen = sorted([*([self.rank] if exchange.sees_own else []), *(part.rank for part in exchange.received)])
        sends = [f"send {part.rows} -> {part.rank}" for part in exchange.sent]
        moves = "  ".join([*sends, *(f"receive {part.rows} <- {part.rank}" for part in exchange.received)])
        return f"{'rank' if len(seen) == 1 else 'ranks'} {', '.join(map(str, seen))}" if seen else "nobody", moves


@lru_cache(maxsize=1024)
def make_plan(layout: Layout, mask: Mask, rank: int) -> Plan:
    """The plan of `rank`."""
    world, pairs, reach = layout.world_size, visible_pairs(layout, mask), _reach(layout, mask)
    home_from = (rank + reach[rank]) % world
    hops = []
    for h in range(max(reach) + 1):
        owner, following = (rank - h) % world, (rank - h - 1) % world
        present = h <= reach[owner]
        hops.append(
            Hop(
                index=h,
                owner=owner,
                present=present,
                rows=layout.length(owner) if present else 0,
                pairs=pairs[rank][owner],
                send_kv=h + 1 <= reach[owner],
                receive_kv=h + 1 <= reach[following],
                send_grad_home=0 < h == reach[owner],
                grad_comes_home=home_from if 0 < h == reach[rank] else None,
            )
        )
    return Plan(layout, mask, rank, layout.chunks[rank], tuple(hops), pairs)


@lru_cache(maxsize=1024)
def make_grouped_plan(layout: Layout, mask: Mask, rank: int) -> Plan:
    """The plan of `rank` where hops are grouped; where nobody sees another rank's keys, that of the ring."""
    ring = make_plan(layout, mask, rank)
    if len(ring.hops) == 1:
        return ring
    received = [_received(layout, mask, reader) for reader in range(layout.world_size)]
    only = Hop(
        index=0,
        owner=rank,
        present=True,
        rows=layout.length(rank),
        pairs=sum(ring.pairs[rank]),
        send_kv=False,
        receive_kv=False,
        send_grad_home=False,
        grad_comes_home=None,
        exchange=exchange_of(layout, received, rank, ring.pairs[rank][rank] > 0),
    )
    return replace(ring, hops=(only,))


@lru_cache(maxsize=1024)
def _received(layout: Layout, mask: Mask, reader: int) -> tuple[Part, ...]:
    """What `reader` gets of others' KV where hops are grouped."""
    return received_by(layout, _area(mask, layout.seqlen), visible_pairs(layout, mask)[reader], reader)


@lru_cache(maxsize=1024)
def receives_at_most(layout: Layout, mask: Mask, rows: int) -> bool:
    """Whether no rank would receive more `rows` of others' KV if hops were grouped."""
    # Under causal masks the rank of the last tokens sees most: where it is too much, no other is looked at.
    readers = sorted(range(layout.world_size), key=lambda rank: -layout.chunks[rank][-1].stop)
    return all(sum(part.rows for part in _received(layout, mask, reader)) <= rows for reader in readers)


@lru_cache(maxsize=1)
def _area(mask: Mask, seqlen: int) -> PairCounts:
    """What the mask shows of a whole sequence; the last one alone, as it holds numbers for every query."""
    return mask.area(seqlen, seqlen)


@lru_cache(maxsize=1024)
def visible_pairs(layout: Layout, mask: Mask) -> tuple[tuple[int, ...], ...]:
    """For each rank, visible pairs of its queries with each rank's keys."""
    cut = [[(chunk.start, chunk.stop) for chunk in chunks] for chunks in layout.chunks]
    return tuple(map(tuple, _area(mask, layout.seqlen).between(cut).tolist()))


@lru_cache(maxsize=1024)
def _reach(layout: Layout, mask: Mask) -> tuple[int, ...]:
    """For each rank how many ranks up its keys travel."""
    return tuple(reaches(torch.tensor(visible_pairs(layout, mask), device="cpu") > 0).tolist())


@lru_cache(maxsize=1024)
def single_device_plan(seqlen_q: int, seqlen_k: int, mask: Mask) -> Plan:
    """A ring of one: all keys are here, and the queries are the last `seqlen_q` positions."""
    q_chunks, k_chunks = (Chunk(seqlen_k - seqlen_q, seqlen_q),), (Chunk(0, seqlen_k),)
    pairs = int(mask.area(seqlen_q, seqlen_k).row_pairs.sum())
    alone = Hop(
        index=0,
        owner=0,
        present=True,
        rows=seqlen_k,
        pairs=pairs,
        send_kv=False,
        receive_kv=False,
        send_grad_home=False,
        grad_comes_home=None,
    )
    return Plan(Layout("contiguous", seqlen_k, (k_chunks,)), mask, 0, q_chunks, (alone,), ((pairs,),))
