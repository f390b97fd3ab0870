"""Strategies for hypothesis: masks that fit a sequence, and modes, alone and combined.

A strategy is made once, because hypothesis checks each new one, which takes longer than to draw from it.
"""

from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import ringflash as rf
from ringflash.masks import Full, Mask


def block_sparse(seqlen: int, block_size: int, seed: int, density: float) -> rf.BlockSparse:
    """Returns a mask of random blocks: a fifth of the block rows is empty, the others have density `density`."""
    nblocks = -(-seqlen // block_size)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(nblocks, nblocks, generator=generator) < density
    return rf.BlockSparse(drawn & (torch.rand(nblocks, 1, generator=generator) < 0.8), block_size)


def tree(seqlen: int, draws: list[tuple[int, bool]], place: float) -> rf.Tree:
    """Returns a tree with one token per draw; each parent is an earlier token, and `place` sets the position."""
    parents = [-1 if root or not i else draw % i for i, (draw, root) in enumerate(draws)]
    return rf.Tree(parents, start=round(place * (seqlen - len(parents))))


def packed(rows: list[list[int]]) -> rf.Documents:
    """Returns documents with one row of ends per sequence, each row filled up to the longest row's length."""
    most = max(map(len, rows))
    return rf.Documents([row + row[-1:] * (most - len(row)) for row in rows])


@cache
def single_masks(seqlen: int, batch: int = 2) -> SearchStrategy[Mask]:
    """Returns a strategy for every mask over `seqlen` positions that is no intersection."""
    limits = st.none() | st.integers(0, seqlen)
    ends = st.lists(st.integers(0, seqlen), max_size=6).map(lambda inner: [0, *sorted(inner), seqlen])
    lengths = st.lists(st.integers(0, seqlen), min_size=batch, max_size=batch)
    return st.one_of(
        st.just(Full()),
        st.just(rf.Causal()),
        st.builds(rf.SlidingWindow, limits, limits),
        st.builds(rf.Documents, ends),
        st.lists(ends, min_size=batch, max_size=batch).map(packed),
        st.builds(rf.KeyPadding, lengths),
        st.builds(rf.PrefixLM, lengths),
        bitmap_masks(seqlen),
    )


@cache
def bitmap_masks(seqlen: int) -> SearchStrategy[Mask]:
    """Returns a strategy for every mask over `seqlen` positions that is a bitmap."""
    sizes, densities = st.sampled_from([1, 7, 16, 32, 64]), st.sampled_from([0.0, 0.1, 0.5, 1.0])
    tokens = st.lists(
        st.tuples(st.integers(0, 2**16), st.sampled_from([False] * 4 + [True])), min_size=1, max_size=min(seqlen, 12)
    )
    return st.one_of(
        st.builds(block_sparse, st.just(seqlen), sizes, st.integers(0, 2**16), densities),
        st.builds(tree, st.just(seqlen), tokens, st.floats(0, 1)),
    )


@cache
def masks(seqlen: int, batch: int = 2) -> SearchStrategy[Mask]:
    """Returns a strategy for every mask over `seqlen` positions, with intersections of up to three masks."""
    one = single_masks(seqlen, batch)
    return st.one_of(one, st.builds(lambda a, b: a & b, one, one), st.builds(lambda a, b, c: a & b & c, one, one, one))


@cache
def modes() -> SearchStrategy[dict[str, Any]]:
    """Returns a strategy for every combination of modes, as arguments of `Problem.random`."""
    return st.fixed_dictionaries(
        {
            "softmax_scale": st.sampled_from([None, 0.05, 1.0]),
            "softcap": st.sampled_from([0.0, 0.5, 20.0]),
            "dropout": st.none() | st.builds(rf.Dropout, st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**63 - 1)),
            "alibi": st.integers(0, 2),
            "sinks": st.booleans(),
            "headdim": st.sampled_from([16, (48, 32), (16, 24)]),
        }
    )
