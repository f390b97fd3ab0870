"""Keyed permutations: each number once, another order for another key, and no array of the range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringflash.train.data.permutation import BlockPermutation, Permutation, shuffle_columns


@given(size=st.integers(0, 3000), key=st.lists(st.integers(0, 1 << 40), max_size=3))
def test_each_number_once(size: int, key: list[int]) -> None:
    order = Permutation(size, *key)
    values = order(np.arange(size))
    assert sorted(values.tolist()) == [*range(size)]
    some = np.arange(size)[::-7]
    assert order(some).tolist() == values[some].tolist()


@pytest.mark.parametrize("size", [1 << 30, 10**9, 10**12 + 7, (1 << 62) - 1])
def test_ranges_that_no_array_holds(size: int) -> None:
    places = np.concatenate([np.arange(5000), size - 1 - np.arange(5000)])
    values = Permutation(size, 1, 2)(places)
    assert len(set(values.tolist())) == len(places)
    assert 0 <= values.min() < values.max() < size
    # The mean of 10000 uniform numbers lies within 6 standard deviations of the middle.
    assert abs(values.astype(float).mean() / size - 0.5) < 6 / np.sqrt(12 * len(places))
    assert abs(np.corrcoef(values[:-1].astype(float), values[1:].astype(float))[0, 1]) < 0.06


def test_keys_give_different_orders() -> None:
    orders = [tuple(Permutation(40, seed, epoch)(np.arange(40)).tolist()) for seed in range(9) for epoch in range(1, 9)]
    assert len({*orders}) == len(orders)
    # All 24 orders of four numbers appear about equally often.
    small = [tuple(Permutation(4, key)(np.arange(4)).tolist()) for key in range(2400)]
    counts = np.unique(np.array(small), axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert 50 < counts.min() <= counts.max() < 160


def test_the_order_does_not_change_between_versions() -> None:
    assert Permutation(12, 3, 1)(np.arange(12)).tolist() == [7, 3, 2, 4, 11, 8, 6, 10, 5, 9, 0, 1]


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), key=st.integers(0, 99))
def test_blocks_stay_together(sizes: list[int], key: int) -> None:
    edges = np.cumsum([0, *sizes])
    order = BlockPermutation(edges, key, 5)
    values = order(np.arange(edges[-1]))
    assert sorted(values.tolist()) == [*range(edges[-1])]
    blocks = np.searchsorted(edges, values, side="right")
    assert int((np.diff(blocks) != 0).sum()) == max(sum(size > 0 for size in sizes) - 1, 0)
    backwards = np.arange(edges[-1])[::-1]
    assert order(backwards).tolist() == values[::-1].tolist()


def test_columns_are_shuffled_one_by_one() -> None:
    table = np.arange(64 * 5).reshape(64, 5)
    shuffled = shuffle_columns(table, 0)
    assert (np.sort(shuffled, axis=0) == table).all()
    assert len({tuple((shuffled[:, i] - i).tolist()) for i in range(5)}) == 5
    assert (shuffle_columns(table[:, 2:3], 0) == shuffled[:, 2:3]).all()
