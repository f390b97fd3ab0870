"""Double rings: KV goes around a group of ranks over fast links, while the next KV crosses slow links.

A group is `inner` consecutive ranks. KV first makes a full pass around the inner ring of its own group, one rank a hop.
During an inner pass the rank where the pass began also sends the KV to the rank at the same place in the next group.
There the next inner pass begins. A message over a slow link therefore has a whole inner pass to arrive.

In the backward every inner pass starts a new gradient. The gradient returns from the last stop of its inner pass to the
owner; the message crosses slow links in the course of the next inner pass.

KV stops at the last rank that sees any of it, like in a single ring: an inner pass ends after that rank.
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
    """Returns the plan of `rank` in a double ring: groups of `inner` ranks form rings, and the groups form a ring."""
    world, pairs = layout.world_size, visible_pairs(layout, mask)
    groups = world // inner

    def moved(place: int, revolution: int, turn: int) -> int:
        """Returns the rank some groups after `place`, and `turn` places further within its group."""
        return (place // inner + revolution) % groups * inner + (place + turn) % inner

    def last_turn(owner: int, revolution: int) -> int:
        """Returns the last turn at which a rank of the group sees KV of `owner`.

        If no rank sees any, returns 0 for the owner's group, and -1 for other groups, which may still relay the KV.
        """
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
    """KV gradients of an inner pass, which return to their owners during the next inner pass."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._moving: list[tuple[int, Any, Sequence[Message], tuple[Tensor, Tensor] | None]] = []

    def start(self, revolution: int, messages: Sequence[Message], arriving: tuple[Tensor, Tensor] | None) -> None:
        """Starts the messages of gradients that an inner pass has finished, and keeps the buffers.

        Args:
            revolution: number of the inner pass.
            messages: the gradient that this rank sends, and the one that it receives.
            arriving: dk and dv of this rank's own KV, as views of the receive buffer; None if nothing arrives.
        """
        self._moving.append((revolution, self._transport.start(messages), messages, arriving))

    def finish(self, before: int | None) -> list[tuple[Tensor, Tensor]]:
        """Waits for the messages of inner passes before number `before` (None: all); returns the gradients received."""
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
