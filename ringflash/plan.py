"""What one rank does in a ring: a pure function of layout, mask and rank.

KV of every rank moves one rank up a hop: at hop h, rank r holds the KV of rank (r - h) mod P, its owner. KV travels no
further than the last rank that sees any of it (its reach). In the backward the gradient of that KV follows one hop
behind and returns home from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ringflash.layout import Chunk, Layout
from ringflash.masks import Mask


@dataclass(frozen=True)
class Hop:
    """One step of the ring on one rank.

    Args:
        index: hop number, 0 for the rank's own KV.
        owner: the rank whose KV is here, if `present`.
        present: whether that KV is here at all; False when nobody from here on needs it.
        meets: whether any query of this rank sees any of that KV; False means nothing to compute.
        send_kv: pass this KV on to the next rank while computing.
        receive_kv: the next hop's KV arrives from the previous rank meanwhile.
        send_grad_home: in the backward, this was the KV's last stop: its gradient returns to `owner`.
        grad_comes_home: in the backward, this rank's own KV gradient returns after this hop, from this rank.
        revolution: which one of a double ring, 0 in a ring.
        begins: whether this KV came from the group of ranks before, and its revolution of this group begins.
        far_to: the rank in the next group that this KV is sent to during the whole revolution, if any.
        far_from: the rank in the group before from which the KV that begins the next revolution arrives meanwhile.
    """

    index: int
    owner: int
    present: bool
    meets: bool
    send_kv: bool
    receive_kv: bool
    send_grad_home: bool
    grad_comes_home: int | None
    revolution: int = 0
    begins: bool = False
    far_to: int | None = None
    far_from: int | None = None

    @property
    def starts(self) -> bool:
        """Whether this KV makes its first stop here, or in this group: a gradient of it starts anew."""
        return self.index == 0 or self.begins


@dataclass(frozen=True)
class Plan:
    """The hops of one rank under a layout and a mask.

    Args:
        layout: the cut of the sequence.
        mask: which keys a query sees.
        rank: whose plan this is.
        q_chunks: where this rank's queries stand.
        hops: in order; the same number on every rank.
        inner: ranks of a group, in which KV goes around before the next group has it; None is a ring of all ranks.
    """

    layout: Layout
    mask: Mask
    rank: int
    q_chunks: tuple[Chunk, ...]
    hops: tuple[Hop, ...]
    inner: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks in the ring."""
        return self.layout.world_size

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
        return hop.index + 1 == len(self.hops) or self.hops[hop.index + 1].begins

    def next_revolution(self, hop: Hop) -> Hop:
        """The hop that begins it."""
        return next(after for after in self.hops[hop.index + 1 :] if after.begins)

    def owner_chunks(self, hop: Hop) -> tuple[Chunk, ...]:
        """Chunks of the KV at `hop`."""
        return self.layout.chunks[hop.owner]

    @property
    def rows_sent(self) -> int:
        """KV rows that this rank sends in a forward."""
        sends = [(hop.send_kv, hop.far_to is not None) for hop in self.hops]
        return sum(self.layout.length(hop.owner) * sum(of) for hop, of in zip(self.hops, sends, strict=True))

    def bytes_sent(self, batch: int, nheads_kv: int, headdim: int, itemsize: int) -> int:
        """Bytes that this rank sends in a forward: keys and values of `rows_sent` rows."""
        return 2 * batch * self.rows_sent * nheads_kv * headdim * itemsize

    def __str__(self) -> str:
        """A table, a line a hop."""
        layout = self.layout
        lines = [f"rank {self.rank} of {self.world_size}, {layout.name}, {self.mask!r}, {layout.seqlen} tokens"]
        for hop in self.hops:
            doing = "compute" if hop.meets else ("pass on" if hop.present else "idle")
            moves = f"send -> {self.next_rank}  " if hop.send_kv else ""
            moves += f"receive <- {self.previous_rank}  " if hop.receive_kv else ""
            moves += f"send far -> {hop.far_to}  " if hop.far_to is not None else ""
            moves += f"receive far <- {hop.far_from}" if hop.far_from is not None else ""
            chunks = ", ".join(f"[{c.start}, {c.stop})" for c in self.owner_chunks(hop))
            lines.append(f"  hop {hop.index}: KV of rank {hop.owner} {chunks}: {doing}  {moves}".rstrip())
        return "\n".join(lines)


@lru_cache(maxsize=1024)
def make_plan(layout: Layout, mask: Mask, rank: int) -> Plan:
    """The plan of `rank`."""
    world = layout.world_size

    def meets(rank_q: int, rank_k: int) -> bool:
        return mask.meets(layout.chunks[rank_q], layout.chunks[rank_k])

    reach = [max((h for h in range(world) if meets((owner + h) % world, owner)), default=0) for owner in range(world)]
    home_from = (rank + reach[rank]) % world
    hops = []
    for h in range(max(reach) + 1):
        owner, following = (rank - h) % world, (rank - h - 1) % world
        hops.append(
            Hop(
                index=h,
                owner=owner,
                present=h <= reach[owner],
                meets=h <= reach[owner] and meets(rank, owner),
                send_kv=h + 1 <= reach[owner],
                receive_kv=h + 1 <= reach[following],
                send_grad_home=0 < h == reach[owner],
                grad_comes_home=home_from if 0 < h == reach[rank] else None,
            )
        )
    return Plan(layout, mask, rank, layout.chunks[rank], tuple(hops))


@lru_cache(maxsize=1024)
def single_device_plan(seqlen_q: int, seqlen_k: int, mask: Mask) -> Plan:
    """A ring of one: all keys are here, and the queries are the last `seqlen_q` positions."""
    q_chunks, k_chunks = (Chunk(seqlen_k - seqlen_q, seqlen_q),), (Chunk(0, seqlen_k),)
    alone = Hop(
        index=0,
        owner=0,
        present=True,
        meets=mask.meets(q_chunks, k_chunks),
        send_kv=False,
        receive_kv=False,
        send_grad_home=False,
        grad_comes_home=None,
    )
    return Plan(Layout("contiguous", seqlen_k, (k_chunks,)), mask, 0, q_chunks, (alone,))
