"""Combinations in which every pair of values occurs."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.helpers.pairs import all_pairs

CHOICES = [("abc", range(3)), ("ab", range(3), "xyz", (True, False)), (range(10), "abcd", range(3), range(3), "xy")]


@pytest.mark.parametrize("choices", CHOICES)
def test_every_pair_occurs_in_few_combinations(choices: tuple[list[str], ...]) -> None:
    rows = all_pairs(*choices)
    assert rows == all_pairs(*choices)
    for a, b in combinations(range(len(choices)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(choices[a], choices[b]))
    largest, second = sorted(map(len, choices), reverse=True)[:2]
    assert len(set(rows)) == len(rows) <= 1.25 * largest * second


def test_the_first_combinations_are_those_given() -> None:
    rows = all_pairs("ab", "cd", "ef", first=[(1, 1, 1), (0, 1, 0)])
    assert rows[:2] == [("b", "d", "f"), ("a", "d", "e")]
