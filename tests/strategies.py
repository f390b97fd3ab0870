"""What hypothesis draws: masks, alone and combined."""

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import ringflash as rf
from ringflash.masks import Full, Mask


def masks(seqlen: int, batch: int = 2) -> SearchStrategy[Mask]:
    """Any mask over `seqlen` positions, up to three of them intersected."""
    limits = st.none() | st.integers(0, seqlen)
    ends = st.lists(st.integers(0, seqlen), max_size=6).map(lambda inner: [0, *sorted(inner)])
    lengths = st.lists(st.integers(0, seqlen), min_size=batch, max_size=batch)
    one = st.one_of(
        st.just(Full()),
        st.just(rf.Causal()),
        st.builds(rf.SlidingWindow, limits, limits),
        st.builds(rf.Documents, ends),
        st.builds(rf.KeyPadding, lengths),
        st.builds(rf.PrefixLM, lengths),
    )
    return st.one_of(one, st.builds(lambda a, b: a & b, one, one), st.builds(lambda a, b, c: a & b & c, one, one, one))
