"""The plan of one rank in a ring: a pure function of layout, mask and rank.

The KV of every rank moves one rank up at each hop: at hop h, rank r holds the KV of rank (r - h) mod P, the owner. KV
stops at the last rank that sees any of it; the hops up to there are its reach. In the backward the gradient follows
its KV one hop behind, and returns to the owner from the last stop.

All hops may be grouped into one, in which a rank holds at once the KV of every rank that it sees: see
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

SHOWN = 4  # chunks printed for a hop


@dataclass(frozen=True)
class Hop:
    """One step of the ring on one rank.

    Args:
        index: hop number, 0 for the rank's own KV.
        owner: the rank that owns the KV of this hop.
        present: whether this rank receives that KV; False when neither this rank nor a later one sees any of it.
        rows: rows of the KV; 0 when it is not present.
        pairs: visible (query, key) pairs of this rank's queries and the KV, summed over the mask's batch.
        send_kv: whether this rank sends the KV on to the next rank while it computes.
        receive_kv: whether the next hop's KV arrives from the previous rank meanwhile.
        send_grad_home: in the backward, whether this is the last stop of the KV: its gradient returns to `owner`.
        grad_comes_home: in the backward, the rank from which this rank's own KV gradient returns after this hop; None
            if it does not return then.
        revolution: number of the full pass around the inner ring (the inner pass) in a double ring; 0 in a ring.
        opens_revolution: whether this KV came from the previous group of ranks and starts its pass around this group.
        far_to: the rank in the next group that receives this KV in the course of the inner pass, or None.
        far_from: the rank in the previous group that sends the KV for the next inner pass meanwhile, or None.
        exchange: the direct messages of a grouped plan, which has this hop alone. `pairs` then covers the KV of all
            ranks; `owner` and `rows` are this rank and its own rows.
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
        """Returns whether this is the KV's first stop of all or in this group, so that a new gradient of it starts."""
        return self.index == 0 or self.opens_revolution

    @property
    def meets(self) -> bool:
        """Returns whether any query of this rank sees any of the KV; False means that there is nothing to compute."""
        return self.pairs > 0

    @property
    def passes_on(self) -> bool:
        """Returns whether this rank holds the KV only to pass it on to later ranks."""
        return self.present and not self.meets and self.index > 0

    @property
    def rows_sent(self) -> int:
        """Returns the KV rows that this rank sends at this hop, in the forward or in the backward."""
        direct = 0 if self.exchange is None else self.exchange.rows_sent
        return direct + self.rows * (self.send_kv + (self.far_to is not None))

    @property
    def gradient_rows_sent(self) -> int:
        """Returns the rows of dK and dV that this rank sends after this hop, to the next rank or to the owner."""
        direct = 0 if self.exchange is None else self.exchange.rows_received
        return direct + self.rows * (self.send_kv + self.send_grad_home)


@dataclass(frozen=True)
class Plan:
    """The hops of one rank under a layout and a mask.

    Args:
        layout: the cut of the sequence.
        mask: which keys a query sees.
        rank: the rank that follows this plan.
        q_chunks: chunks of this rank's queries.
        hops: the hops in order; every rank has the same number.
        pairs: for each rank, visible pairs of its queries with each rank's keys.
        inner: ranks of a group in a double ring: KV goes around one group before it goes around the next. None is a
            single ring of all ranks.
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
        """Returns the number of ranks in the ring."""
        return self.layout.world_size

    @property
    def grouped(self) -> bool:
        """Returns whether all hops are grouped into one."""
        return self.hops[0].exchange is not None

    @property
    def next_rank(self) -> int:
        """Returns the rank that this rank sends KV to."""
        return self._neighbour(1)

    @property
    def previous_rank(self) -> int:
        """Returns the rank that this rank receives KV from."""
        return self._neighbour(-1)

    def _neighbour(self, step: int) -> int:
        size = self.inner or self.world_size
        return self.rank // size * size + (self.rank + step) % size

    def ends_revolution(self, hop: Hop) -> bool:
        """Returns whether an inner pass ends with `hop`: the next hop has KV of another group, or there is none."""
        return hop.index + 1 == len(self.hops) or self.hops[hop.index + 1].opens_revolution

    def next_revolution(self, hop: Hop) -> Hop:
        """Returns the hop that opens the inner pass after that of `hop`."""
        return next(after for after in self.hops[hop.index + 1 :] if after.opens_revolution)

    def owner_chunks(self, hop: Hop) -> tuple[Chunk, ...]:
        """Returns the chunks of the KV at `hop`."""
        return self.layout.chunks[hop.owner] if hop.exchange is None else hop.exchange.chunks

    def meetings(self, hop: Hop) -> tuple[tuple[Chunk, Chunk], ...]:
        """Returns the pairs (query chunk, key chunk) at `hop` that have a visible (query, key) pair."""
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
        """Returns the most visible pairs of a rank over the mean of all ranks: 1 is even, and 1 if there are none."""
        work = [sum(row) for row in self.pairs]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    @property
    def critical_path(self) -> float:
        """Returns the time of one ring pass in units of the mean rank's work, when messages cost nothing.

        The time is at least `balance`. A grouped plan takes just `balance`, because no rank waits for the computation
        of another.
        """
        return self.balance if self.grouped else critical_path(torch.tensor(self.pairs, device="cpu"))

    @property
    def share(self) -> float:
        """Returns this rank's fraction of the visible pairs of all ranks; 1 / world_size if there are none."""
        total = sum(map(sum, self.pairs))
        return sum(self.pairs[self.rank]) / total if total else 1.0 / self.world_size

    @property
    def rows_sent(self) -> int:
        """Returns the KV rows that this rank sends in a forward."""
        return sum(hop.rows_sent for hop in self.hops)

    @property
    def rows_passed_on(self) -> int:
        """Returns the KV rows that this rank receives although none of its queries sees them."""
        return sum(hop.rows for hop in self.hops if hop.passes_on)

    @property
    def gradient_rows_sent(self) -> int:
        """Returns the rows of dK and dV that this rank sends in a backward, in addition to the KV rows."""
        return sum(hop.gradient_rows_sent for hop in self.hops)

    def bytes_sent(self, batch: int, nheads_kv: int, headdim: int, itemsize: int) -> int:
        """Returns the bytes that this rank sends in a forward: keys and values of `rows_sent` rows."""
        return 2 * batch * self.rows_sent * nheads_kv * headdim * itemsize

    def bytes_sent_backward(
        self, batch: int, nheads_kv: int, headdim: int, itemsize: int, gradient_itemsize: int = 4
    ) -> int:
        """Returns the bytes that this rank sends in a backward: the KV again, and its gradients.

        Gradients are float32 by default.
        """
        gradients = 2 * batch * self.gradient_rows_sent * nheads_kv * headdim * gradient_itemsize
        return self.bytes_sent(batch, nheads_kv, headdim, itemsize) + gradients

    def flops(self, batch: int, nheads: int, headdim: int, *, hop: Hop | None = None, backward: bool = False) -> int:
        """Returns the matmul FLOPs over visible pairs, in this rank's pass or in one hop.

        A forward has two matmuls and a backward five; each takes 2 * headdim FLOPs a pair and head.
        """
        pairs = sum(self.pairs[self.rank]) if hop is None else hop.pairs
        sequences = batch if self.mask.batch == 1 else 1  # pairs of a batched mask already cover all its sequences
        return (5 if backward else 2) * 2 * pairs * sequences * nheads * headdim

    def __str__(self) -> str:
        """Returns a table with one line a hop."""
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
        """Returns the owners of the KV of a grouped hop, and the messages, both as text."""
        seen = sorted([*([self.rank] if exchange.sees_own else []), *(part.rank for part in exchange.received)])
        sends = [f"send {part.rows} -> {part.rank}" for part in exchange.sent]
        moves = "  ".join([*sends, *(f"receive {part.rows} <- {part.rank}" for part in exchange.received)])
        return f"{'rank' if len(seen) == 1 else 'ranks'} {', '.join(map(str, seen))}" if seen else "nobody", moves


@lru_cache(maxsize=1024)
def make_plan(layout: Layout, mask: Mask, rank: int) -> Plan:
    """Returns the plan of `rank` in a single ring."""
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
    """Returns the plan of `rank` with all hops grouped, or the ring's plan if no rank sees another's keys."""
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
    """Returns the parts of other ranks' KV that `reader` receives in a grouped plan."""
    return received_by(layout, _area(mask, layout.seqlen), visible_pairs(layout, mask)[reader], reader)


@lru_cache(maxsize=1024)
def receives_at_most(layout: Layout, mask: Mask, rows: int) -> bool:
    """Returns whether no rank would receive more than `rows` rows of other ranks' KV if hops were grouped."""
    # Under a causal mask the rank with the last tokens receives most. It comes first, so that a refusal is found early.
    readers = sorted(range(layout.world_size), key=lambda rank: -layout.chunks[rank][-1].stop)
    return all(sum(part.rows for part in _received(layout, mask, reader)) <= rows for reader in readers)


@lru_cache(maxsize=1)
def _area(mask: Mask, seqlen: int) -> PairCounts:
    """Returns the pair counts of a whole sequence; only the last is cached, as it holds numbers for every query."""
    return mask.area(seqlen, seqlen)


@lru_cache(maxsize=1024)
def visible_pairs(layout: Layout, mask: Mask) -> tuple[tuple[int, ...], ...]:
    """Returns for each rank the visible pairs of its queries with each rank's keys."""
    cut = [[(chunk.start, chunk.stop) for chunk in chunks] for chunks in layout.chunks]
    return tuple(map(tuple, _area(mask, layout.seqlen).between(cut).tolist()))


@lru_cache(maxsize=1024)
def _reach(layout: Layout, mask: Mask) -> tuple[int, ...]:
    """Returns for each rank the number of hops that its keys travel."""
    return tuple(reaches(torch.tensor(visible_pairs(layout, mask), device="cpu") > 0).tolist())


@lru_cache(maxsize=1024)
def single_device_plan(seqlen_q: int, seqlen_k: int, mask: Mask) -> Plan:
    """Returns the plan of a ring of one rank, which has all keys; the queries are the last `seqlen_q` positions."""
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
