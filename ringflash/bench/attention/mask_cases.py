"""Cases of the mask benchmark: masks over one sequence, and their numbers of visible pairs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash.bench.ring.seen import lengths

BLOCK = 128  # tokens in a block of the block-sparse mask
KEPT = 0.25  # share of its blocks that are visible


@dataclass(frozen=True)
class Case:
    """The causal mask, or one that hides more.

    Args:
        name: name in the tables.
        pairs: visible pairs of query and key, of one head and all sequences together.
        mask: mask of each sequence.
        sequences: number of sequences into which the tokens are cut.
        window: largest number of keys that a query sees, its own included.
        ends: 0, and the end of each document in a sequence.
        blocks: (seqlen / BLOCK, seqlen / BLOCK), True for visible blocks.
    """

    name: str
    pairs: int
    mask: Any
    sequences: int = 1
    window: int | None = None
    ends: tuple[int, ...] | None = None
    blocks: Tensor | None = None

    def cut(self, x: Tensor) -> Tensor:
        """Returns (1, seqlen, heads, headdim) as (sequences, seqlen / sequences, heads, headdim)."""
        return x.view(self.sequences, -1, *x.shape[2:])


def cases(seqlen: int, window: int, documents: int) -> list[Case]:
    """Returns the causal mask and masks that hide more. The batch follows the documents that it must agree with."""
    causal = rf.Causal()
    length = seqlen // documents
    edge = min(window, seqlen)  # number of rows that see all rows before them
    blocks, block_pairs = _blocks(seqlen)
    in_windows = triangle(edge) + (seqlen - edge) * window
    of_blocks = causal & rf.BlockSparse(blocks, BLOCK)
    even = tuple(range(0, seqlen + 1, length))
    mixed = tuple(accumulate(lengths(seqlen, documents), initial=0))
    return [
        Case("causal", triangle(seqlen), causal),
        Case(f"window of {window}", in_windows, causal & rf.SlidingWindow(window - 1, 0), window=window),
        Case(f"{KEPT:.0%} of blocks of {BLOCK}", block_pairs, of_blocks, blocks=blocks),
        _packed(f"{documents} documents of mixed lengths", mixed),
        _packed(f"{documents} documents", even),
        Case(f"batch of {documents}", documents * triangle(length), causal, sequences=documents),
    ]


def _packed(name: str, ends: tuple[int, ...]) -> Case:
    pairs = sum(triangle(stop - start) for start, stop in pairwise(ends))
    return Case(name, pairs, rf.Causal() & rf.Documents(ends), ends=ends)


def triangle(rows: int) -> int:
    """Returns the number of visible pairs of a causal mask over `rows` rows."""
    return rows * (rows + 1) // 2


def _blocks(seqlen: int) -> tuple[Tensor, int]:
    """Returns random blocks with the diagonal, and their visible pairs under a causal mask."""
    sizes = torch.tensor([min(BLOCK, seqlen - start) for start in range(0, seqlen, BLOCK)], device="cpu")
    drawn = torch.rand(len(sizes), len(sizes), generator=torch.Generator().manual_seed(seqlen), device="cpu")
    blocks = (drawn < KEPT) | torch.eye(len(sizes), dtype=torch.bool, device="cpu")
    below = int((blocks.tril(-1) * sizes[:, None] * sizes).sum())
    return blocks, below + sum(map(triangle, sizes.tolist()))
