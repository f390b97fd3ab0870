"""Tiles, stages and registers of the Hopper kernels, by headdim: what 227 KiB and 64k registers hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ROWS = 64  # of a warpgroup's matmul
KEYS = 2 * ROWS  # that a program of the backward owns


def padded_rows(seqlen: int) -> int:
    """Rows of what the backward has of a sequence of queries: of whole tiles, which also aligns each of them."""
    return -(-seqlen // KEYS) * KEYS


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward is tiled.

    Args:
        block_d: headdim rounded up to a tile's.
        block_n: rows of keys in a tile.
        stages: tiles of keys, and of values, in flight.
        consumers: warpgroups, of 64 queries each.
        registers: of a consumer's thread.
        out_in_q: whether the result leaves through the buffers of q, for want of others.
        turns: whether consumers take turns at issuing matmuls.
    """

    block_d: int
    block_n: int
    stages: int
    consumers: int
    registers: int
    out_in_q: bool = False
    turns: bool = False


_FORWARD = {
    64: ForwardConfig(64, 128, 2, 2, 240),
    128: ForwardConfig(128, 128, 2, 2, 240),
    256: ForwardConfig(256, 64, 2, 2, 240, out_in_q=True),
}


# A third warpgroup keeps the tensor cores busier; but the tile is longer, and of short spans more is wasted.
_FORWARD_LONG = _FORWARD | {64: ForwardConfig(64, 128, 2, 3, 160, turns=True)}
LONG_VISITS = 12


def forward_config(headdim: int, *, masked: bool, visits: float) -> ForwardConfig:
    """For any headdim up to 256.

    Args:
        headdim: of queries, keys and values.
        masked: whether any tile of keys that is visited needs a mask.
        visits: tiles of keys that a tile of queries visits, on average, with the tiles for no visits.
    """
    table = _FORWARD_LONG if not masked or visits >= LONG_VISITS else _FORWARD
    return table[next(block for block in _FORWARD if headdim <= block)]


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward is tiled.

    Args:
        block_d: headdim rounded up to a tile's.
        block_m: rows of queries in a tile.
        ds_stages: tiles of dS, for dq: one being written, one being read and one between, at the least; one more where
            half of one is no larger than a part of dk (`gradients.py`).
        descending: whether tiles are visited from the last to the first, of all heads of a group in turn, rather than
            first those that need a mask, where dQ is not added in turns.
        preloaded: whether matmuls of scores begin with lse and delta, rather than these be added to them. That takes
            fewer registers, but the matmuls begin later.
        preloaded_masked: the same where some tiles need a mask.
    """

    block_d: int
    block_m: int
    ds_stages: int
    descending: bool
    preloaded: bool
    preloaded_masked: bool


_BACKWARD = {64: BackwardConfig(64, 128, 3, True, True, False), 128: BackwardConfig(128, 64, 4, False, True, True)}


def backward_config(headdim: int) -> BackwardConfig:
    """For any headdim up to 128."""
    return _BACKWARD[next(block for block in _BACKWARD if headdim <= block)]


# Both by sweeps on an H200, of one hop: causal, one sequence, 8 and 8192 rows in all, 16:16 and 32:8 heads.
LITTLE, LITTLE_ROWS = 600 * 64, 1024  # the first in pairs of tiles, of one query head for each KV head, times headdim
SHORT_NARROW, SHORT, SHORT_SHARED = 768, 1024, 2048  # rows up to which the default mode takes turns


def prefer_triton_backward(batch: int, seqlen_q: int, seqlen_k: int, nheads_kv: int, headdim: int) -> bool:
    """Whether a backward is of so little work, or so much of that padding, that it is Triton's.

    Programs of 128 keys are then too few, and a kernel that makes dQ of its sum takes as long as what it saves.
    """
    config, rows = backward_config(headdim), max(seqlen_q, seqlen_k)
    tiles_q, tiles_k = (padded_rows(seqlen) // KEYS for seqlen in (seqlen_q, seqlen_k))
    work = batch * nheads_kv * tiles_k * (tiles_q + 1) / 2 * config.block_d
    return (work <= LITTLE and rows <= LITTLE_ROWS) or rows <= config.block_m // 2


def adds_in_turns(rows: int, nheads: int, nheads_kv: int, headdim: int) -> bool:
    """Whether dQ is added in order in the default mode too, with so many rows of queries and keys, the more counted.

    That needs no zeros, which take longer than turns do as long as there are few. In further hops of a ring turns would
    only cost.
    """
    unshared = SHORT_NARROW if headdim <= 64 else SHORT
    return rows <= (SHORT_SHARED if nheads > nheads_kv else unshared)


def dq_sum_shape(q: Tensor) -> tuple[int, int, int, int]:
    """Of the sum of gradients of q (batch, seqlen_q, nheads, headdim): (batch, nheads, rows, columns), whole tiles."""
    batch, seqlen, nheads, headdim = q.shape
    return batch, nheads, padded_rows(seqlen), backward_config(headdim).block_d
