"""A ring of rings: KV goes around a group of ranks over fast links, while the next is on its way over slow ones.

Groups are `inner` consecutive ranks. KV first visits all ranks of its own group, a hop each; during that revolution it
is also sent to the rank of the same place in the next group, where its second revolution begins, and so on. So what
crosses a slow link has a whole revolution to arrive. In the backward the gradient of each revolution starts anew and
goes home from that revolution's last stop, across slow links in the course of the next revolution.

As in a ring, KV travels no further than it is seen: a revolution ends after the last rank that sees any of it.
Source: Gu et al. 2024, "LoongTrain", "Double-Ring-Attention".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from ringflash.layouts.layout import Layout
from ringflash.masks import Mask
from ringflash.ring.plan import Hop, Plan, visible_pairs
from ringflash.transport.base import Message, Transport


@lru_cache(maxsize=1024)
def make_double_plan(layout: Layout, mask: Mask, rank: int, inner: int) -> Plan:
    """The plan of `rank` where groups of `inner` ranks form rings, and the groups a ring."""
    world, pairs = layout.world_size, visible_pairs(layout, mask)
    groups = world // inner

    def moved(place: int, revolution: int, turn: int) -> int:
        """The rank so many groups and turns from `place`."""
        return (place // inner + revolution) % groups * inner + (place + turn) % inner

    def last_turn(owner: int, revolution: int) -> int:
        """Of the KV of `owner` in that revolution; -1 where nobody sees any, though it may pass through."""
        stops = [moved(owner, revolution, turn) for turn in range(inner)]
        seeing = [turn for turn, stop in enumerate(stops) if pairs[stop][owner]]
        return max(seeing, default=0 if revolution == 0 else -1)

    turns = [[last_turn(owner, revolution) for revolution in range(groups)] for owner in range(world)]
    reach = [max(revolution for revolution in range(groups) if of[revolution] >= 0) for of in turns]
    hops: list[Hop] = []
    for revolution in range(max(reach) + 1):
        for turn in range(max(0, *(of[revolution] for of in turns)) + 1):
            owner, following = moved(rank, -revolution, -turn), moved(rank, -revolution, -turn - 1)
            begins_next = moved(rank, -revolution - 1, 0)
            present = turn <= (max(turns[owner][revolution], 0) if revolution <= reach[owner] else -1)
            home_from = moved(rank, revolution, turn)
            hops.append(
                Hop(
                    index=len(hops),
                    owner=owner,
                    present=present,
                    rows=layout.length(owner) if present else 0,
                    pairs=pairs[rank][owner] if present else 0,
                    send_kv=turn < turns[owner][revolution],
                    receive_kv=turn < turns[following][revolution],
                    send_grad_home=turn == turns[owner][revolution] and owner != rank,
                    grad_comes_home=home_from if turn == turns[rank][revolution] and home_from != rank else None,
                    revolution=revolution,
                    opens_revolution=revolution > 0 and turn == 0,
                    far_to=moved(rank, 1, 0) if turn == 0 and revolution < reach[owner] else None,
                    far_from=moved(rank, -1, 0) if turn == 0 and revolution < reach[begins_next] else None,
                )
            )
    return Plan(layout, mask, rank, layout.chunks[rank], tuple(hops), pairs, inner)


class FarGradients:
    """Gradients of one revolution on their way home during the next."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._moving: list[tuple[int, Any, Sequence[Message], tuple[Tensor, Tensor] | None]] = []

    def start(self, revolution: int, messages: Sequence[Message], arriving: tuple[Tensor, Tensor] | None) -> None:
        """Starts messages of a revolution that is over for their KV, and keeps the buffers; `arriving` is for here."""
        self._moving.append((revolution, self._transport.start(messages), messages, arriving))

    def finish(self, before: int | None) -> list[tuple[Tensor, Tensor]]:
        """Waits for those of the revolutions before that one, None for all, and returns what has come here."""
        arrived, rest = [], []
        for moving in self._moving:
            revolution, handle, _, arriving = moving
            if before is not None and revolution >= before:
                rest.append(moving)
                continue
            self._transport.finish(handle)
            if arriving is not None:
                arrived.append(arriving)
        self._moving = rest
        return arrived
