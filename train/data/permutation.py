"""Keyed permutations of ranges: the value at each place is computed, so that no array of the range is held."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]
ROUNDS = 6


class Permutation:
    """Permutation of range(size) that is a pure function of its key.

    An alternating Feistel network permutes pairs (left, right) of range(a) x range(b), where a * b is the least product
    of two near equal sides that is at least `size`. A round adds a keyed hash of one half to the other, modulo its
    side. Values outside the range walk on along their cycle until they are inside.

    Args:
        size: length of the range, below 2^62.
        key: numbers of at least 0, for instance seed and epoch.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 5.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        left = max(math.isqrt(max(size - 1, 0)) + 1, 1)
        self._sides = np.uint64(left), np.uint64(max(-(-size // left), 1))
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def __call__(self, places: Vector) -> Vector:
        """Returns the values at `places`, which are numbers in range(size)."""
        values = self._encrypt(places.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self.size)):
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        (side, other), (half, rest) = self._sides, np.divmod(values, self._sides[1])
        for key in self._keys:
            half, rest, side, other = rest, (half + _hash(rest + key) % side) % side, other, side
        # An even number of rounds leaves the halves where they began.
        return half * self._sides[1] + rest


class BlockPermutation:
    """Permutation of range(edges[-1]) that takes one block after another, each in an order of its own.

    Neighbouring places thus stay within a block, except at its end, so that what a block needs is made once.

    Args:
        edges: (blocks + 1,) start of each block, and the end of the last one.
        key: as of `Permutation`.
    """

    def __init__(self, edges: Vector, *key: int) -> None:
        self._blocks = Permutation(len(edges) - 1, *key)(np.arange(len(edges) - 1))
        self._starts, self._key = edges[:-1][self._blocks], key
        self._ends = np.cumsum(np.diff(edges)[self._blocks])

    def __call__(self, places: Vector) -> Vector:
        """Returns the values at `places`."""
        values, at = np.empty_like(places), np.searchsorted(self._ends, places, side="right")
        by_block = np.argsort(at, kind="stable")
        for these in np.split(by_block, np.flatnonzero(np.diff(at[by_block])) + 1):
            if len(these):
                turn = int(at[these[0]])
                size = int(self._ends[turn]) - (begin := int(self._ends[turn - 1]) if turn else 0)
                order = Permutation(size, *self._key, int(self._blocks[turn]))
                values[these] = self._starts[turn] + order(places[these] - begin)
        return values


def shuffle_columns(table: Vector, key: int) -> Vector:
    """Returns each column of a table of different numbers in the order of a keyed hash of the numbers."""
    mixed = _hash(table.astype(np.uint64) + np.random.SeedSequence(key).generate_state(1, np.uint64))
    return np.take_along_axis(table, np.argsort(mixed, axis=0), axis=0)


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mixes 64 bits; source: Steele et al. 2014, "Fast splittable pseudorandom number generators", mix64variant13."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
