"""Masks: their dense form, their bounds, and which chunks meet."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.layout import Chunk
from ringflash.masks import Full, Mask, as_mask, mask_by_name

chunks_q = st.builds(Chunk, start=st.integers(-5, 30), length=st.integers(1, 12))  # before 0: more queries than keys
chunks_k = st.builds(Chunk, start=st.integers(0, 30), length=st.integers(1, 12))


def test_causal_is_the_lower_triangle() -> None:
    rows = torch.arange(5)
    assert torch.equal(rf.Causal().dense(rows, rows), torch.ones(5, 5).tril().bool())


def test_causal_ends_in_the_bottom_right_corner() -> None:
    dense = rf.Causal().dense(torch.arange(3, 5), torch.arange(5))
    assert dense.tolist() == [[True] * 4 + [False], [True] * 5]


def test_full_sees_everything() -> None:
    assert Full().dense(torch.arange(2), torch.arange(3)).all()


@given(chunk_q=chunks_q, chunk_k=chunks_k, mask=st.sampled_from([Full(), rf.Causal()]))
def test_meets_agrees_with_the_dense_mask(chunk_q: Chunk, chunk_k: Chunk, mask: Mask) -> None:
    rows, columns = torch.arange(chunk_q.start, chunk_q.stop), torch.arange(chunk_k.start, chunk_k.stop)
    assert mask.meets([chunk_q], [chunk_k]) == bool(mask.dense(rows, columns).any())


def test_names_lead_back_to_masks() -> None:
    assert mask_by_name(rf.Causal().name) == rf.Causal()
    assert as_mask(None) == Full()


@pytest.mark.parametrize("wrong", [rf.Causal, True, torch.ones(2, 2)])
def test_what_is_no_mask(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="mask: expected None or rf.Causal()"):
        as_mask(wrong)  # type: ignore[arg-type]
