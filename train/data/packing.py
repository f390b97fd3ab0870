"""Packing of pieces of documents into few samples: best fit decreasing."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]


def fit(lengths: Vector, capacity: int) -> tuple[Vector, Vector]:
    """Packs pieces into samples of `capacity`: the longest first, each into the sample with the least sufficient room.

    Pieces of one length are placed together in all samples with that room. The work therefore grows with the number of
    distinct lengths and rooms rather than of pieces.

    Args:
        lengths: (n,) from 1 to `capacity`.
        capacity: tokens a sample.

    Returns:
        (n,) pieces, ordered by sample, and (samples + 1,) start of each sample in it.

    Source: Ding et al. 2024, "Fewer truncations improve language modeling", section 3.
    """
    sample_of = np.empty(len(lengths), np.int64)
    rooms: dict[int, Vector] = {}  # room -> samples with this room
    known: list[int] = []  # the rooms in ascending order
    count = 0

    def put(room: int, samples: Vector) -> None:
        if len(samples) == 0 or room == 0:
            return
        if room in rooms:
            samples = np.concatenate([rooms[room], samples])
        else:
            insort(known, room)
        rooms[room] = samples

    by_length = np.argsort(-lengths, kind="stable")
    for pieces in np.split(by_length, np.flatnonzero(np.diff(lengths[by_length])) + 1):
        while len(pieces):
            length = int(lengths[pieces[0]])
            place = bisect_left(known, length)
            if place < len(known):
                room = known.pop(place)
                samples = rooms.pop(room)
                taken = min(len(samples), len(pieces))
                sample_of[pieces[:taken]] = samples[:taken]
                put(room - length, samples[:taken])
                put(room, samples[taken:])
                pieces = pieces[taken:]
            else:
                each = capacity // length
                full, rest = divmod(len(pieces), each)
                samples = np.arange(count, count + full + (rest > 0))
                sample_of[pieces] = samples[np.arange(len(pieces)) // each]
                put(capacity - each * length, samples[:full])
                put(capacity - rest * length, samples[full:])
                count += len(samples)
                break
    order = np.argsort(sample_of, kind="stable")
    return order, np.searchsorted(sample_of[order], np.arange(count + 1))
