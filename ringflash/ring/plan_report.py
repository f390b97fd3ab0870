"""The costs of a plan: balance, FLOPs, rows and bytes, and a table of its hops."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ringflash.layouts.balance import critical_path
from ringflash.masks.pair_counts import area_of

if TYPE_CHECKING:
    from ringflash.layouts.layout import Chunk, Layout
    from ringflash.masks import Mask
    from ringflash.ring.plan import Batch, Hop, Step, Transfer

SHOWN = 4  # chunks printed for a hop


class PlanReport:
    """Figures of a `Plan`, which inherits them and has the fields. Planners and the executor use no figures."""

    layout: Layout
    mask: Mask
    rank: int
    q_chunks: tuple[Chunk, ...]
    pairs: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    grouped: bool
    hops: cached_property[tuple[Hop, ...]]

    def meetings(self, hop: Hop) -> tuple[tuple[Chunk, Chunk], ...]:
        """Returns the pairs (query chunk, key chunk) at `hop` that have a visible (query, key) pair."""
        if not hop.meets:
            return ()
        area = area_of(self.mask, self.layout.seqlen)
        found = []
        for q in self.q_chunks:
            for k in hop.chunks:
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
        return sum(self.pairs[self.rank]) / total if total else 1.0 / self.layout.world_size

    def rows_sent_at(self, hop: Hop) -> int:
        """Returns the KV rows that this rank sends at `hop`, in the forward or in the backward."""
        return _rows_sent(self.steps[hop.index].kv)

    @cached_property
    def rows_sent(self) -> int:
        """Returns the KV rows that this rank sends in a forward; a row counts once for each rank that receives it."""
        return sum(_rows_sent(step.kv) for step in self.steps)

    @property
    def rows_passed_on(self) -> int:
        """Returns the KV rows that this rank receives although none of its queries sees them."""
        return sum(len(hop.rows) for hop in self.hops if hop.passes_on)

    @cached_property
    def gradient_rows_sent(self) -> int:
        """Returns the rows of dK and dV that this rank sends in a backward, in addition to the KV rows."""
        return sum(_rows_sent(step.gradients) for step in self.steps)

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
            f"rank {self.rank} of {self.layout.world_size}, {layout.name}, {self.mask!r}, {layout.seqlen} tokens",
            f"  {sum(self.pairs[self.rank])} visible pairs, {self.share:.1%} of all; the busiest rank has "
            f"{self.balance:.2f} of the mean; sends {self.rows_sent} rows, and {self.gradient_rows_sent} of gradients",
        ]
        for hop in self.hops:
            doing = f"compute {hop.pairs} pairs" if hop.meets else ("pass on" if hop.passes_on else "idle")
            moves = "  ".join(_move(transfer) for batch in self.steps[hop.index].kv for transfer in batch.transfers)
            owners = f"{'rank' if len(hop.owners) == 1 else 'ranks'} {', '.join(map(str, hop.owners))}"
            named = ", ".join(f"[{c.start}, {c.stop})" for c in hop.chunks[:SHOWN])
            named += f", ... {len(hop.chunks)} in all" if len(hop.chunks) > SHOWN else ""
            whose = f"KV of {owners if hop.owners else 'nobody'} {named}".rstrip()
            lines.append(f"  hop {hop.index}: {whose}: {doing}  {moves}".rstrip())
        return "\n".join(lines)


def _rows_sent(batches: Iterable[Batch]) -> int:
    return sum(len(transfer.rows) for batch in batches for transfer in batch.transfers if transfer.sends)


def _move(transfer: Transfer) -> str:
    rows, far = len(transfer.rows), "far " if transfer.is_far else ""
    if transfer.sends:
        return f"send {far}{rows} -> {transfer.peer}"
    return f"receive {far or f'{rows} '}<- {transfer.peer}"
