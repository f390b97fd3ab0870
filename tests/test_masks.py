"""Masks: their dense form, their bounds, their algebra, and which chunks meet."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.layout import Chunk
from ringflash.masks import Full, Mask, as_mask, mask_from_spec
from tests.strategies import masks

SEQLEN = 40

chunks_q = st.builds(Chunk, start=st.integers(-5, 30), length=st.integers(1, 12))  # before 0: more queries than keys
chunks_k = st.builds(Chunk, start=st.integers(0, 30), length=st.integers(1, 12))


def dense(mask: Mask, seqlen: int = SEQLEN) -> Tensor:
    return mask.dense(torch.arange(seqlen), torch.arange(seqlen))


def by_rule(rule: Any, seqlen: int = SEQLEN) -> Tensor:
    return torch.tensor([[[rule(p, j) for j in range(seqlen)] for p in range(seqlen)]])


def test_causal_is_the_lower_triangle() -> None:
    assert torch.equal(dense(rf.Causal())[0], torch.ones(SEQLEN, SEQLEN).tril().bool())


def test_causal_ends_in_the_bottom_right_corner() -> None:
    seen = rf.Causal().dense(torch.arange(3, 5), torch.arange(5))
    assert seen.tolist() == [[[True] * 4 + [False], [True] * 5]]


def test_full_sees_everything() -> None:
    assert Full().dense(torch.arange(2), torch.arange(3)).all()


@pytest.mark.parametrize(("left", "right"), [(3, 2), (0, 0), (None, 0), (5, None), (None, None), (100, 100)])
def test_sliding_window(left: int | None, right: int | None) -> None:
    def rule(p: int, j: int) -> bool:
        return (left is None or j >= p - left) and (right is None or j <= p + right)

    assert torch.equal(dense(rf.SlidingWindow(left, right)), by_rule(rule))


@pytest.mark.parametrize("ends", [[0, 40], [0, 1, 2, 40], [0, 10, 10, 10, 25], [0], [0, 0, 40, 40]])
def test_documents(ends: list[int]) -> None:
    def document(p: int) -> int | None:
        return next((i for i, end in enumerate(ends[1:]) if ends[i] <= p < end), None)

    expected = by_rule(lambda p, j: document(p) is not None and document(p) == document(j))
    assert torch.equal(dense(rf.Documents(ends)), expected)


def test_key_padding_and_prefix_speak_of_each_sequence() -> None:
    padding, prefix = dense(rf.KeyPadding([40, 0, 7])), dense(rf.PrefixLM([0, 40, 7]))
    assert torch.equal(padding[2], by_rule(lambda p, j: j < 7)[0])
    assert padding[0].all()
    assert not padding[1].any()
    assert torch.equal(prefix[0], dense(rf.Causal())[0])
    assert torch.equal(prefix[2], by_rule(lambda p, j: j <= max(p, 6))[0])


@given(a=masks(SEQLEN), b=masks(SEQLEN))
def test_and_sees_what_both_see(a: Mask, b: Mask) -> None:
    assert torch.equal(dense(a & b), dense(a) & dense(b))


@given(mask=masks(SEQLEN))
def test_bounds_never_fall(mask: Mask) -> None:
    lo, hi = mask.bounds(torch.arange(-5, SEQLEN + 5), SEQLEN)
    assert (lo.diff() >= 0).all()
    assert (hi.diff() >= 0).all()


@given(mask=masks(SEQLEN))
def test_a_spec_leads_back_to_the_mask(mask: Mask) -> None:
    again = mask_from_spec(*mask.spec)
    assert again == mask
    assert hash(again) == hash(mask)
    assert all(tensor.dtype == torch.int64 and tensor.device.type == "cpu" for tensor in mask.spec[1])


@settings(deadline=None)
@given(chunk_q=chunks_q, chunk_k=chunks_k, mask=masks(SEQLEN))
def test_meets_agrees_with_the_dense_mask(chunk_q: Chunk, chunk_k: Chunk, mask: Mask) -> None:
    rows, columns = torch.arange(chunk_q.start, chunk_q.stop), torch.arange(chunk_k.start, chunk_k.stop)
    assert mask.meets([chunk_q], [chunk_k]) == bool(mask.dense(rows, columns).any())


def test_masks_are_values() -> None:
    ends = torch.tensor([0, 4, 9])
    mask = rf.Documents(ends)
    ends[1] = 5  # a later change of the caller's tensor is not a change of the mask
    assert mask == rf.Documents([0, 4, 9])
    assert mask != rf.Documents([0, 5, 9])
    assert mask != rf.KeyPadding([0, 4, 9])
    assert repr(rf.Causal() & rf.Documents(range(20))) == (
        "Causal() & Documents([0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all])"
    )
    assert as_mask(None) == Full()
    assert Full() & rf.Causal() == rf.Causal()


@pytest.mark.parametrize("wrong", [rf.Causal, True, torch.ones(2, 2)])
def test_what_is_no_mask(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="mask: expected None or a mask such as rf.Causal()"):
        as_mask(wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rf.SlidingWindow(-1, 0), "left: expected None or at least 0, got -1"),
        (lambda: rf.Documents([1, 4]), r"cu_seqlens: expected 0 first and never falling, got \[1, 4\]"),
        (lambda: rf.Documents([0, 4, 3]), "cu_seqlens: expected 0 first and never falling"),
        (lambda: rf.Documents([]), "cu_seqlens: expected a vector of integers"),
        (lambda: rf.Documents(torch.tensor([[0, 4]])), r"cu_seqlens: expected a vector of integers, got .*\(1, 2\)"),
        (lambda: rf.KeyPadding(torch.tensor([0.5])), "seqlens_k: expected a vector of integers, got torch.float32"),
        (lambda: rf.PrefixLM([3, -1]), "prefix_lens: expected none below 0, got -1"),
        (lambda: rf.PrefixLM([1, 2]) & rf.KeyPadding([1, 2, 3]), r"mask: expected one batch size, got \[2, 3\]"),
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_mask_of_another_batch() -> None:
    q = torch.zeros(2, 4, 1, 16)
    with pytest.raises(ArgumentError, match="mask: expected one of batch 2, got batch 3"):
        rf.flash_attention(q, q, q, mask=rf.KeyPadding([1, 2, 3]))


def test_a_plan_under_another_default_device() -> None:
    with torch.device("meta"):
        plan = rf.ContextParallel.local(2).plan(rf.Causal() & rf.Documents([0, 3, 9]), 9)
    assert len(plan.hops) == 2
