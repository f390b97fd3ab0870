"""What one decoding step computes, and the partial results of it: what the decoding kernels of both backends share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.contract import ScoreConfig
from ringflash.masks import Causal, Mask, SlidingWindow, Tree
from ringflash.state import AttentionState

MAX_SEQLEN_Q = 64  # a tree's ancestors are the bits of one word
MAX_SPLITS = 128  # the merge kernel holds all states of a row at once


@dataclass(frozen=True)
class DecodeTiles:
    """How the Triton decoding kernel is tiled.

    Args:
        block_n: keys in a tile, a power of two from 16 on.
        num_warps: warps of a program.
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
    """What query i of a sequence of `length` keys sees: it stands at p = length - seqlen_q + i.

    The keys [p - left, p + right] that are among the `length` valid ones; and of the last seqlen_q keys, where `tree`
    has words, only those whose bit is set in word i.
    """

    left: int
    right: int
    tree: tuple[int, ...] = ()

    def is_uniform(self, seqlen_q: int, capacity: int) -> bool:
        """Whether all queries of a sequence see the same keys."""
        return seqlen_q == 1 or (self.left >= capacity and self.right >= seqlen_q and not self.tree)


def whole_sight(seqlen_q: int, capacity: int) -> Sight:
    """Every valid key."""
    return Sight(capacity, seqlen_q)


@lru_cache(maxsize=1024)
def sight_of(mask: Mask, seqlen_q: int, capacity: int) -> Sight:
    """The sight that a mask gives.

    Raises:
        ArgumentError: a mask that decoding does not know, or a tree of other than `seqlen_q` tokens.
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
    if seqlen_q == 1:  # the only query is the last key: nothing stands after it, and it sees itself
        return Sight(left, 1)
    return Sight(left, right, () if all(word == -1 for word in tree) else tuple(tree))


def _words(tree: Tree, seqlen_q: int) -> list[int]:
    """Row i of the ancestors as a signed 64-bit word, bit j for token j."""
    ancestors = tree.ancestors
    if tree.start != 0 or ancestors.shape[0] != seqlen_q:
        got = f"{ancestors.shape[0]} tokens from position {tree.start} on, and {seqlen_q} queries"
        remedy = "The tree's tokens are the last seqlen_q keys of each sequence, wherever those stand."
        raise ArgumentError("mask", expected="a Tree of seqlen_q tokens with start 0", got=got, remedy=remedy)
    weights = torch.tensor([-(2**63) if j == 63 else 2**j for j in range(seqlen_q)], device="cpu")
    return (ancestors.to("cpu", torch.int64) * weights).sum(1).tolist()


@dataclass(frozen=True, eq=False)
class Step:
    """How the queries of one step meet the cache.

    Args:
        score_config: what becomes of q k^T; sinks join where the parts are combined.
        sight: which keys each query sees.
        splits: parts into which each sequence's keys are cut; None leaves it to the kernels.
        tiles: of the Triton kernel; None is what a sweep chose.
    """

    score_config: ScoreConfig
    sight: Sight
    splits: int | None = None
    tiles: DecodeTiles | None = None


@dataclass(frozen=True, eq=False)
class Partials:
    """States of the same queries over disjoint keys, each one vector: O, then m, then l, as `AttentionState` has them.

    Args:
        storage: (count, numbers of a state).
        batch: sequences.
        seqlen_q: queries of each.
        nheads: heads of each query.
        headdim_v: of O.
    """

    storage: Tensor
    batch: int
    seqlen_q: int
    nheads: int
    headdim_v: int

    @staticmethod
    def allocate(count: int, q: Tensor, headdim_v: int, dtype: torch.dtype) -> Partials:
        """Storage for `count` states of the queries q, not initialised."""
        batch, seqlen_q, nheads, _ = q.shape
        storage = q.new_empty((count, batch * seqlen_q * nheads * (headdim_v + 2)), dtype=dtype)
        return Partials(storage, batch, seqlen_q, nheads, headdim_v)

    @staticmethod
    def of(states: Sequence[AttentionState]) -> Partials:
        """The given states, copied into one storage."""
        batch, seqlen_q, nheads, headdim_v = states[0].o.shape
        rows = [torch.cat([part.reshape(-1) for part in (state.o, state.m, state.l)]) for state in states]
        return Partials(torch.stack(rows), batch, seqlen_q, nheads, headdim_v)

    @property
    def count(self) -> int:
        """How many states there are."""
        return self.storage.shape[0]

    @property
    def stacked(self) -> AttentionState:
        """All states as one whose tensors have a dimension more, the first."""
        shape = (self.count, self.batch, self.nheads, self.seqlen_q)
        rows = self.batch * self.nheads * self.seqlen_q
        o, m, l = self.storage.split([rows * self.headdim_v, rows, rows], dim=1)  # noqa: E741
        o_shape = (self.count, self.batch, self.seqlen_q, self.nheads, self.headdim_v)
        return AttentionState(m.view(shape), l.view(shape), o.view(o_shape))

    def states(self) -> list[AttentionState]:
        """Each state, as views."""
        stacked = self.stacked
        return [AttentionState(*parts) for parts in zip(stacked.m, stacked.l, stacked.o, strict=True)]


def merge_tree(states: Sequence[AttentionState]) -> AttentionState:
    """The merge of all states, neighbours first, then neighbouring pairs: the same order for the same number."""
    level = list(states)
    while len(level) > 1:
        pairs = [first.merge(second) for first, second in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]
