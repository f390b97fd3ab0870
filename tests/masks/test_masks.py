"""Masks: their dense form, their bounds and their algebra."""

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.masks import Bitmap, Full, Mask, as_mask, described, mask_from_spec, spec_of
from tests.helpers.strategies import bitmap_masks, masks

SEQLEN = 40


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


@pytest.mark.parametrize(
    ("left", "right"), [(3, 2), (0, 0), (None, 0), (5, None), (None, None), (100, 100), (2**63 - 1, 2**63 - 1)]
)
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


def test_documents_of_each_sequence() -> None:
    rows = [[0, 10, 40, 40], [0, 0, 1, 40], [0, 40, 40, 40]]
    mask = rf.Documents(rows)
    assert torch.equal(dense(mask), torch.cat([dense(rf.Documents(row)) for row in rows]))
    assert (mask.batch, rf.Documents(rows[:1]).batch) == (3, 1)
    assert rf.Documents(rows[:1]) == rf.Documents(rows[0])
    assert mask == rf.Documents(torch.tensor(rows, dtype=torch.int32).T.contiguous().T)
    assert mask not in (rf.Documents(rows[::-1]), rf.Documents(rows[:2]), rf.Documents(rows[0]))
    assert repr(mask) == "Documents(3 sequences, the first [0, 10, 40, 40])"
    mask.validate(SEQLEN)


def test_key_padding_and_prefix_speak_of_each_sequence() -> None:
    padding, prefix = dense(rf.KeyPadding([40, 0, 7])), dense(rf.PrefixLM([0, 40, 7]))
    assert torch.equal(padding[2], by_rule(lambda p, j: j < 7)[0])
    assert padding[0].all()
    assert not padding[1].any()
    assert torch.equal(prefix[0], dense(rf.Causal())[0])
    assert torch.equal(prefix[2], by_rule(lambda p, j: j <= max(p, 6))[0])


@pytest.mark.parametrize("block_size", [1, 7, 16, 40, 64])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_block_sparse(block_size: int, density: float) -> None:
    nblocks = -(-SEQLEN // block_size)
    blocks = torch.rand(nblocks, nblocks) < density
    expected = by_rule(lambda p, j: bool(blocks[p // block_size, j // block_size]))
    mask = rf.BlockSparse(blocks, block_size)
    mask.validate(SEQLEN)
    assert torch.equal(dense(mask), expected)
    beyond = torch.cat([torch.arange(-3, 0), torch.arange(nblocks * block_size, 400, 7)])
    assert not mask.dense(beyond, torch.arange(SEQLEN)).any()
    assert not mask.dense(torch.arange(SEQLEN), beyond).any()


NINE = [-1, 0, 1, 1, 2, 2, 3, 3, 4]


def test_the_tree_of_nine_tokens() -> None:
    names = "ABCDEFGHI"
    rows = dense(rf.Tree(NINE), 9)[0].tolist()
    seen = {
        name: "".join(n for n, s in zip(names, row, strict=True) if s) for name, row in zip(names, rows, strict=True)
    }
    assert seen["D"] == "ABD"
    assert seen["I"] == "ABCEI"
    assert seen == {"A": "A", "B": "AB", "C": "ABC", "D": "ABD", "E": "ABCE", "F": "ABCF"} | {
        "G": "ABDG", "H": "ABDH", "I": "ABCEI"
    }  # fmt: skip
    assert rf.Tree(NINE).ancestors.tolist() == rows


@pytest.mark.parametrize("start", [0, 1, 13, 31])
@pytest.mark.parametrize("parents", [NINE, [-1], [-1, -1, 0, 1, 1], list(range(-1, 8)), [-1] * 9])
def test_tree(parents: list[int], start: int) -> None:
    def family(token: int) -> set[int]:
        return {token} | (family(parents[token]) if parents[token] >= 0 else set())

    def rule(p: int, j: int) -> bool:
        inside = start <= p < start + len(parents)
        return j < start or (inside and j - start in family(p - start))

    assert torch.equal(dense(rf.Tree(parents, start)), by_rule(rule))


def test_a_long_draft_is_a_chain() -> None:
    assert torch.equal(rf.Tree(range(-1, 2999)).ancestors, torch.ones(3000, 3000).tril().bool())


def test_a_tree_beside_blocks_of_two_sizes() -> None:
    tree = rf.Tree(NINE, start=20)
    a, b = rf.BlockSparse(torch.rand(4, 4) < 0.7, 12), rf.BlockSparse(torch.rand(5, 5) < 0.7, 8)
    both, all_three = (a & b).bitmap(), (a & b & tree).bitmap()
    assert both is not None
    assert all_three is not None
    assert (both.size, both.reach) == (4, 40)
    assert (all_three.size, all_three.reach) == (1, 29)
    assert torch.equal(dense(a & b & tree & rf.Causal()), dense(a) & dense(b) & dense(tree) & dense(rf.Causal()))


def test_what_rows_of_a_bitmap_see_of_keys() -> None:
    bitmap = Bitmap(torch.tensor([4]), torch.tensor([[True, True], [True, False]]), 3)
    some, every = bitmap.over(
        torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3, 4, 9]), torch.tensor([3, 5, 4, 7, 12])
    )
    assert some.tolist() == [[True, True, True, True, False], [True, True, False, False, False], [True] * 4 + [False]]
    assert every.tolist() == [[True, True, True, False, False], [True] + [False] * 4, [True] + [False] * 4]


@given(a=masks(SEQLEN), b=masks(SEQLEN))
def test_and_sees_what_both_see(a: Mask, b: Mask) -> None:
    assert torch.equal(dense(a & b), dense(a) & dense(b))


@given(mask=masks(SEQLEN))
def test_bounds_are_the_intervals_and_the_bitmap_what_they_show(mask: Mask) -> None:
    rows, keys = torch.arange(-5, SEQLEN + 5), torch.arange(SEQLEN)
    lo, hi = mask.bounds(rows, SEQLEN)
    inside = (keys >= lo[..., None]) & (keys < hi[..., None])
    bitmap = mask.bitmap()
    if bitmap is None:
        assert (lo.diff() >= 0).all()
        assert (hi.diff() >= 0).all()
        assert torch.equal(mask.dense(rows, keys), inside)
    else:
        assert torch.equal(mask.dense(rows, keys), inside & bitmap.sees(rows, keys))


@given(mask=masks(SEQLEN), rows=st.permutations(range(-5, SEQLEN + 5)))
def test_bounds_of_a_row_do_not_depend_on_the_order_of_rows(mask: Mask, rows: list[int]) -> None:
    rising = mask.bounds(torch.arange(-5, SEQLEN + 5), SEQLEN)
    for got, expected in zip(mask.bounds(torch.tensor(rows), SEQLEN), rising, strict=True):
        assert torch.equal(got, expected[:, torch.tensor(rows) + 5])


@given(mask=bitmap_masks(SEQLEN))
def test_bounds_of_a_bitmap_are_tight(mask: Mask) -> None:
    rows, keys = torch.arange(-5, SEQLEN + 5), torch.arange(SEQLEN)
    assert mask.bitmap() is not None
    seen = mask.dense(rows, keys)[0]
    for row, lo, hi in zip(seen, *(bound[0].tolist() for bound in mask.bounds(rows, SEQLEN)), strict=True):
        assert keys[row].tolist()[:1] == ([lo] if hi > lo else [])
        assert keys[row].tolist()[-1:] == ([hi - 1] if hi > lo else [])


@given(mask=masks(SEQLEN))
def test_masks_that_fit(mask: Mask) -> None:
    mask.validate(SEQLEN)


@given(mask=masks(SEQLEN))
def test_a_spec_leads_back_to_the_mask(mask: Mask) -> None:
    again = mask_from_spec(*mask.spec)
    assert again == mask
    assert hash(again) == hash(mask)
    assert all(tensor.dtype in (torch.int64, torch.bool) and tensor.device.type == "cpu" for tensor in mask.spec[1])


def test_masks_are_values() -> None:
    ends = torch.tensor([0, 4, 9])
    mask = rf.Documents(ends)
    ends[1] = 5  # the mask does not follow a later change of the caller's tensor
    assert mask == rf.Documents([0, 4, 9])
    assert mask != rf.Documents([0, 5, 9])
    assert mask != rf.KeyPadding([0, 4, 9])
    assert repr(rf.Causal() & rf.Documents(range(20))) == (
        "Causal() & Documents([0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all])"
    )
    blocks = torch.eye(2, dtype=torch.bool)
    sparse = rf.BlockSparse(blocks, 16)
    blocks[0, 1] = True
    assert sparse == rf.BlockSparse([[True, False], [False, True]], 16)
    assert sparse != rf.BlockSparse(blocks, 16)
    assert sparse != rf.BlockSparse(torch.eye(2, dtype=torch.bool), 32)
    assert rf.Tree([-1, 0]) == rf.Tree(torch.tensor([-1, 0], dtype=torch.int32))
    assert rf.Tree([-1, 0]) != rf.Tree([-1, 0], start=1)
    assert rf.Tree([-1, 0]) != rf.Tree([-1, -1])
    assert len({sparse, rf.Tree([-1]), rf.Tree([-1]), rf.BlockSparse(torch.eye(2).bool(), 16)}) == 2
    assert repr(rf.Tree(NINE, start=4) & sparse) == (
        "BlockSparse(2 x 2 blocks of 16, 2 seen) & Tree([-1, 0, 1, 1, 2, 2, 3, 3, ... 9 in all], start=4)"
    )
    assert as_mask(None) == Full()
    assert Full() & rf.Causal() == rf.Causal()


def test_the_order_of_an_intersection_does_not_matter() -> None:
    a, b, c = rf.Causal(), rf.Documents([0, 3, 9]), rf.SlidingWindow(4)
    assert a & b == b & a
    assert len({a & b & c, c & (b & a), b & c & a}) == 1
    assert a & b != a & c
    assert rf.Full() & a == a
    assert a & a == a
    assert b & a & b == a & b
    other = rf.Documents([0, 5, 9])
    assert b & other != b
    for one, two in ((a, b), (c, a), (b, other), (b, a & other)):  # ranks compare texts, and caches look them up
        assert described(one & two) == described(two & one)
        (words, tensors), (other_words, other_tensors) = (one & two).spec, (two & one).spec
        assert words == other_words
        assert all(map(torch.equal, tensors, other_tensors))


@pytest.mark.parametrize("wrong", [rf.Causal, torch.Tensor, np.ndarray, np.float32, True, torch.ones(2, 2)])
def test_what_is_no_mask(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="mask: expected None or a mask such as rf.Causal()"):
        as_mask(wrong)


@pytest.mark.parametrize(
    ("dense", "got"),
    [
        (torch.ones(300, 300, dtype=torch.bool), "a Tensor of torch.bool (300, 300)"),
        (torch.zeros(1, 1, 64, 64), "a Tensor of torch.float32 (1, 1, 64, 64)"),
        (torch.ones(4, 4, device="meta"), "a Tensor of torch.float32 (4, 4)"),
        (np.ones((3, 3), dtype=bool), "a ndarray of bool (3, 3)"),
    ],
)
def test_a_dense_mask_is_described_by_shape_and_dtype(dense: Any, got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        as_mask(dense)
    text = str(caught.value)
    assert got in text
    assert all(f"rf.{name}(" in text for name in ("Causal", "SlidingWindow", "Documents", "KeyPadding", "BlockSparse"))
    assert len(text) < 500


def test_a_long_list_as_a_mask_is_shortened() -> None:
    with pytest.raises(ArgumentError) as caught:
        as_mask([[True] * 300] * 300)  # pyright: ignore[reportArgumentType]
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rf.SlidingWindow(-1, 0), "left: expected a whole number, at least 0, got -1"),
        (lambda: rf.SlidingWindow(1.5), "left: expected a whole number, at least 0, got 1.5"),  # pyright: ignore
        (lambda: rf.SlidingWindow(0, True), "right: expected a whole number, at least 0, got True"),
        (lambda: rf.Documents(None), "cu_seqlens: expected a vector of integers"),  # pyright: ignore
        (lambda: rf.Documents(torch.zeros(2, dtype=torch.int64, device="meta")), "cu_seqlens: .* got a meta tensor"),
        (lambda: rf.Tree([None, 0]), "parents: expected a vector of integers"),  # pyright: ignore
        (lambda: rf.BlockSparse(None, 2), "blocks: expected a square matrix of bools"),  # pyright: ignore
        (lambda: rf.BlockSparse([[True], [True, False]], 2), "blocks: expected a square .* Pass lists of one length"),
        (lambda: rf.BlockSparse([[True]], 2.9), "block_size: expected a whole number, at least 1, got 2.9"),  # pyright: ignore
        (lambda: rf.Tree([-1], start=1.7), "start: expected a whole number, at least 0, got 1.7"),  # pyright: ignore
        (lambda: rf.Documents([1, 4]), r"cu_seqlens: expected 0 first and never falling, got \[1, 4\]"),
        (lambda: rf.Documents([0, 4, 3]), "cu_seqlens: expected 0 first and never falling"),
        (lambda: rf.Documents([]), "cu_seqlens: expected a vector of integers, or one a sequence"),
        (lambda: rf.Documents([[0, 4], [0, 5, 3]]), "cu_seqlens: expected a vector .* Pass lists of one length"),
        (lambda: rf.Documents([[0, 4], [1, 4]]), "cu_seqlens: expected 0 first and never falling"),
        (lambda: rf.Documents(torch.zeros(1, 2, 2).long()), r"cu_seqlens: expected a vector .* got .*\(1, 2, 2\)"),
        (lambda: rf.KeyPadding([[0, 4]]), r"seqlens_k: expected a vector of integers, got .*\(1, 2\)"),  # pyright: ignore
        (lambda: rf.Documents([[0, 4], [0, 4]]) & rf.PrefixLM([1, 2, 3]), r"expected one batch size, got \[2, 3\]"),
        (lambda: rf.KeyPadding(torch.tensor([0.5])), "seqlens_k: expected a vector of integers, got torch.float32"),
        (lambda: rf.PrefixLM([3, -1]), "prefix_lens: expected none below 0, got -1"),
        (lambda: rf.PrefixLM([1, 2]) & rf.KeyPadding([1, 2, 3]), r"mask: expected one batch size, got \[2, 3\]"),
        (lambda: rf.BlockSparse(torch.ones(2, 2), 16), r"blocks: expected a square matrix of bools, got torch.float32"),
        (
            lambda: rf.BlockSparse(torch.ones(2, 3) > 0, 16),
            r"blocks: expected a square matrix of bools, got .*\(2, 3\)",
        ),
        (lambda: rf.BlockSparse(torch.ones(4) > 0, 16), r"blocks: expected a square matrix of bools, got .*\(4,\)"),
        (
            lambda: rf.BlockSparse(torch.ones(0, 0) > 0, 16),
            r"blocks: expected a square matrix of bools, got .*\(0, 0\)",
        ),
        (lambda: rf.BlockSparse([[True]], 0), "block_size: expected a whole number, at least 1, got 0"),
        (lambda: rf.Tree([]), "parents: expected a vector of integers"),
        (lambda: rf.Tree([-1, 0, 3, 1]), "parents: expected each -1 or an earlier token, got parent 3 of token 2"),
        (lambda: rf.Tree([-1, 1]), "parents: expected each -1 or an earlier token, got parent 1 of token 1"),
        (lambda: rf.Tree([-1, -2]), "parents: expected each -1 or an earlier token, got parent -2 of token 1"),
        (lambda: rf.Tree([-1], start=-1), "start: expected a whole number, at least 0, got -1"),
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (rf.Documents([0, 10, 39]), "cu_seqlens: expected lengths that sum to the sequence's 40 keys, got a sum of 39"),
        (rf.Documents([0, 41]), "cu_seqlens: expected lengths that sum to the sequence's 40 keys, got a sum of 41"),
        (rf.Documents([[0, 40], [0, 39]]), "cu_seqlens: expected lengths that sum to .* 40 keys, got a sum of 39"),
        (rf.KeyPadding([3, 41]), "seqlens_k: expected none above the sequence's 40 keys, got 41"),
        (rf.PrefixLM([41, 0]), "prefix_lens: expected none above the sequence's 40 keys, got 41"),
        (rf.BlockSparse(torch.ones(2, 2) > 0, 16), r"blocks: expected \(3, 3\) for 40 tokens .* of 16, got \(2, 2\)"),
        (rf.BlockSparse(torch.ones(4, 4) > 0, 16), r"blocks: expected \(3, 3\) for 40 tokens .* of 16, got \(4, 4\)"),
        (rf.Tree(NINE, start=32), "mask: expected a tree that ends by 40, got one to 41"),
    ],
)
def test_masks_of_another_sequence(mask: Mask, message: str) -> None:
    for given_mask in (mask, rf.Causal() & mask & rf.SlidingWindow(3)):
        with pytest.raises(ArgumentError, match=message):
            given_mask.validate(SEQLEN)


def test_a_mask_of_another_batch() -> None:
    q = torch.zeros(2, 4, 1, 16)
    with pytest.raises(ArgumentError, match="mask: expected one of batch 2, got batch 3"):
        rf.flash_attention(q, q, q, mask=rf.KeyPadding([1, 2, 3]))
    for mask in (rf.KeyPadding([3]), rf.PrefixLM([3]), rf.Causal() & rf.KeyPadding([3])):
        with pytest.raises(ArgumentError, match="mask: expected one of batch 2, got batch 1. Give it one entry"):
            rf.flash_attention(q, q, q, mask=mask)
        rf.flash_attention(q[:1], q[:1], q[:1], mask=mask)
    with pytest.raises(ArgumentError, match=r"mask: expected one batch size, got \[1, 2\]"):
        _ = rf.KeyPadding([3]) & rf.PrefixLM([1, 2])
    rf.flash_attention(q, q, q, mask=rf.Documents([[0, 2, 4]]))  # one row applies to all sequences


def test_a_plan_under_another_default_device() -> None:
    with torch.device("meta"):
        plan = rf.ContextParallel.local(2).plan(rf.Causal() & rf.Documents([0, 3, 9]), 9)
        for mask in (rf.Causal() & rf.Documents([0, 30, 90]), rf.BlockSparse([[True, False], [False, True]], 45)):
            assert "hop 0" in str(rf.ContextParallel.local(3, "balanced").plan(mask, 90))
    assert len(plan.hops) == 2


def test_a_call_uses_the_mask_of_its_caller_again(monkeypatch: pytest.MonkeyPatch) -> None:
    q, mask = torch.randn(1, 30, 2, 16, requires_grad=True), rf.Causal() & rf.Documents([0, 10, 30])
    other = mask & rf.SlidingWindow(4)  # with the same tensor
    rf.flash_attention(q, q, q, mask=mask).sum().backward()
    monkeypatch.setattr(rf.Documents, "__init__", lambda *_: pytest.fail("a mask is made again"))
    monkeypatch.setattr(rf.Documents, "validate", lambda *_: pytest.fail("a mask is checked again"))
    rf.flash_attention(q, q, q, mask=mask).sum().backward()
    for each in (mask, other):
        assert mask_from_spec(*spec_of(each)) is each


def test_equal_tensors_of_another_mask_give_no_mask_of_a_caller() -> None:
    mask = rf.Documents([0, 10, 30])
    words, tensors = spec_of(mask)
    assert mask_from_spec(words, tensors) is mask
    again = mask_from_spec(words, [x.clone() for x in tensors])
    assert again == mask
    assert again is not mask
    del mask
    assert mask_from_spec(words, tensors) == again


def test_masks_pickle_after_a_call() -> None:
    mask = rf.Causal() & rf.Documents([0, 10, 30])
    spec_of(mask)
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_a_mask_from_another_process_has_the_hash_of_this_one() -> None:
    code = "import pickle, sys, ringflash as rf; m = rf.Causal() & rf.Documents([0, 3, 9]); hash(m); "
    code += "sys.stdout.buffer.write(pickle.dumps(m))"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment).stdout
    assert hash(pickle.loads(made)) == hash(rf.Causal() & rf.Documents([0, 3, 9]))
