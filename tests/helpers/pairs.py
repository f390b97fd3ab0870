"""A few cases in place of all combinations: each value of a parameter still meets each value of every other one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def all_pairs(*choices: Sequence[Any], first: Sequence[Sequence[int]] = ()) -> list[tuple[Any, ...]]:
    """Returns combinations of one value of each sequence in which every pair of values of two sequences occurs.

    It starts each combination from a pair that is missing, and takes the values that add most missing pairs; of several
    such values the one used least. The result depends on the lengths of the sequences alone.

    Args:
        choices: the values of each parameter.
        first: combinations to begin with, as indices of values.
    """
    assert len(choices) > 1, "one sequence has no pairs"
    missing: dict[tuple[int, int, int, int], None] = {}  # in order, as a set is not
    for a, b in combinations(range(len(choices)), 2):
        missing.update({(a, x, b, y): None for x in range(len(choices[a])) for y in range(len(choices[b]))})

    def pair(a: int, x: int, b: int, y: int) -> tuple[int, int, int, int]:
        return (a, x, b, y) if a < b else (b, y, a, x)

    rows, given = [], list(first)
    used = [[0] * len(choice) for choice in choices]
    while missing or given:
        if given:
            row = dict(enumerate(given.pop(0)))
        else:
            a, x, b, y = next(iter(missing))
            row = {a: x, b: y}
        for c in range(len(choices)):
            if c not in row:
                gains = [sum(pair(c, z, d, w) in missing for d, w in row.items()) for z in range(len(choices[c]))]
                row[c] = max(range(len(gains)), key=lambda z: (gains[z], -used[c][z]))
        for (a, x), (b, y) in combinations(sorted(row.items()), 2):
            missing.pop((a, x, b, y), None)
        for c, x in row.items():
            used[c][x] += 1
        rows.append(tuple(choice[row[c]] for c, choice in enumerate(choices)))
    return rows
