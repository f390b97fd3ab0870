"""Parameters and partial results of one decoding step, shared by the decoding kernels of both backends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.contract import ScoreConfig
from ringflash.masks import Causal, Mask, SlidingWindow, Tree
from ringflash.state import AttentionState

MAX_SEQLEN_Q = 64  # the ancestors of one token of a tree are the bits of one int64
MAX_SPLITS = 128  # the merge kernel holds all partial states of a row at once


@dataclass(frozen=True)
class DecodeTiles:
    """Tile sizes of the Triton decoding kernel.

    Args:
        block_n: keys in a tile, a power of two from 16 to 256.
        num_warps: warps of a program, a power of two up to 16.
        num_stages: tiles in flight.
    """

    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, value, least, most in (("block_n", self.block_n, 16, 256), ("num_warps", self.num_warps, 1, 16)):
            if not least <= value <= most or value & (value - 1):
                expected = f"a power of two from {least} to {most}"
                raise ArgumentError(name, expected=expected, got=value, remedy="The shipped tiles need no choice.")
        if self.num_stages < 1:
            remedy = "It counts the tiles in flight."
            raise ArgumentError("num_stages", expected="at least 1", got=self.num_stages, remedy=remedy)


@dataclass(frozen=True)
class Sight:
    """Keys that query i of a sequence with `length` valid keys sees; its position is p = length - seqlen_q + i.

    Query i sees the valid keys in [p - left, p + right]. If `tree` is not empty, query i sees only some of the last
    seqlen_q keys: bit j of tree[i] shows the j-th of them.
    """

    left: int
    right: int
    tree: tuple[int, ...] = ()

    def is_uniform(self, seqlen_q: int, capacity: int) -> bool:
        """Returns whether all queries of a sequence see the same keys."""
        return seqlen_q == 1 or (self.left >= capacity and self.right >= seqlen_q and not self.tree)


def whole_sight(seqlen_q: int, capacity: int) -> Sight:
    """Returns a sight that shows every valid key."""
    return Sight(capacity, seqlen_q)


@lru_cache(maxsize=1024)
def sight_of(mask: Mask, seqlen_q: int, capacity: int) -> Sight:
    """Returns the sight that a mask gives.

    Raises:
        ArgumentError: if decoding does not support the mask, or a tree does not have `seqlen_q` tokens from 0 on.
    """
    left, right, tree = capacity, seqlen_q, [-1] * seqlen_q
    for part in mask.parts:
        if isinstance(part, Causal):
            right = 0
        elif isinstance(part, SlidingWindow):
            left = left if part.left is None else min(left, part.left)
            right = right if part.right is None else min(right, part.right)
        elif isinstance(part, Tree):
            tree = [word & other for word, other in zip(tree, _words(part, seqlen_q), strict=True)]
        else:
            expected = "None, rf.Causal(), rf.SlidingWindow(...), rf.Tree(...) or an intersection of these"
            remedy = "cache_seqlens says how many keys each sequence has; for other masks use rf.flash_attention."
            raise ArgumentError("mask", expected=expected, got=repr(part), remedy=remedy)
    if seqlen_q == 1:  # the only query is at the last key's position: no key follows, and it sees its own
        return Sight(left, 1)
    return Sight(left, right, () if all(word == -1 for word in tree) else tuple(tree))


def _words(tree: Tree, seqlen_q: int) -> list[int]:
    """Returns each row of the ancestors as a signed 64-bit integer; bit j stands for token j."""
    ancestors = tree.ancestors
    if tree.start != 0 or ancestors.shape[0] != seqlen_q:
        got = f"{ancestors.shape[0]} tokens from position {tree.start} on, and {seqlen_q} queries"
        remedy = "The tree's tokens are the last seqlen_q keys of each sequence, wherever those stand."
        raise ArgumentError("mask", expected="a Tree of seqlen_q tokens with start 0", got=got, remedy=remedy)
    weights = torch.tensor([-(2**63) if j == 63 else 2**j for j in range(seqlen_q)], device="cpu")
    return (ancestors.to("cpu", torch.int64) * weights).sum(1).tolist()


@dataclass(frozen=True, eq=False)
class Step:
    """Parameters of one decoding step.

    Args:
        score_config: parameters of scores and weights; its sinks are applied last, after the parts are merged.
        sight: the keys that each query sees.
        splits: number of parts into which each sequence's keys are cut; None lets the kernels choose.
        tiles: tile sizes of the Triton kernel; None selects the sizes that a sweep chose.
        place: a value that stands for all of the above in keys of launches; None for a step that is made once.
    """

    score_config: ScoreConfig
    sight: Sight
    splits: int | None = None
    tiles: DecodeTiles | None = None
    place: Hashable = None

    def launch_key(self, *parts: Hashable) -> Hashable:
        """Returns a key of launches for this step and further `parts`; None if none of them can be repeated."""
        return None if self.place is None else (self.place, *parts)


@dataclass(frozen=True, eq=False)
class Partials:
    """States of the same queries over disjoint keys; each is one vector of the O, m and l of `AttentionState`.

    Args:
        storage: (count, elements of a state).
        batch: number of sequences.
        seqlen_q: queries of each sequence.
        nheads: heads of each query.
        headdim_v: width of O.
    """

    storage: Tensor
    batch: int
    seqlen_q: int
    nheads: int
    headdim_v: int

    @staticmethod
    def allocate(count: int, q: Tensor, headdim_v: int, dtype: torch.dtype) -> Partials:
        """Returns uninitialised storage for `count` states of the queries q."""
        batch, seqlen_q, nheads, _ = q.shape
        storage = q.new_empty((count, batch * seqlen_q * nheads * (headdim_v + 2)), dtype=dtype)
        return Partials(storage, batch, seqlen_q, nheads, headdim_v)

    @staticmethod
    def of(states: Sequence[AttentionState]) -> Partials:
        """Copies the given states into one storage."""
        batch, seqlen_q, nheads, headdim_v = states[0].o.shape
        rows = [torch.cat([part.reshape(-1) for part in (state.o, state.m, state.l)]) for state in states]
        return Partials(torch.stack(rows), batch, seqlen_q, nheads, headdim_v)

    @property
    def count(self) -> int:
        """Number of states."""
        return self.storage.shape[0]

    @property
    def stacked(self) -> AttentionState:
        """Views of all states in one `AttentionState`, with `count` as an additional first dimension."""
        shape = (self.count, self.batch, self.nheads, self.seqlen_q)
        rows = self.batch * self.nheads * self.seqlen_q
        o, m, l = self.storage.split([rows * self.headdim_v, rows, rows], dim=1)  # noqa: E741
        o_shape = (self.count, self.batch, self.seqlen_q, self.nheads, self.headdim_v)
        return AttentionState(m.view(shape), l.view(shape), o.view(o_shape))

    def states(self) -> list[AttentionState]:
        """Returns the states one by one, as views."""
        stacked = self.stacked
        return [AttentionState(*parts) for parts in zip(stacked.m, stacked.l, stacked.o, strict=True)]


def merge_tree(states: Sequence[AttentionState]) -> AttentionState:
    """Merges neighbouring states, then neighbouring results; the order depends only on the number of states."""
    level = list(states)
    while len(level) > 1:
        pairs = [first.merge(second) for first, second in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]
