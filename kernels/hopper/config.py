"""Tile sizes, stages and registers of the Hopper kernels, by headdim.

They fit 227 KiB of shared memory and 64k registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ROWS = 64  # rows of a warpgroup's matmul
KEYS = 2 * ROWS  # keys of a tile that a program of the backward owns


def padded_rows(seqlen: int) -> int:
    """Returns `seqlen` of queries rounded up to whole tiles, which the backward needs; it also aligns each sequence."""
    return -(-seqlen // KEYS) * KEYS


@dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes of the forward.

    Args:
        block_d: columns of a tile in shared memory, a power of two.
        widths: columns that are multiplied, in parts; see `columns.py`.
        block_n: rows of keys in a tile.
        stages: stages of the rings of k and v: tiles of each in flight.
        consumers: consumer warpgroups, with 64 queries each.
        registers: registers of each thread of a consumer.
        out_in_q: whether the result is staged in the buffers of q, because shared memory has no room for others.
        turns: whether consumers issue their matmuls in a fixed cyclic order (ping-pong).
        overlaps: whether the softmax of a tile overlaps P v of the tile before in the same consumer. Its registers then
            hold P and the scores of two tiles.
    """

    block_d: int
    widths: tuple[int, ...]
    block_n: int
    stages: int
    consumers: int
    registers: int
    out_in_q: bool = False
    turns: bool = False
    overlaps: bool = True


_FORWARD = {
    64: ForwardConfig(64, (64,), 128, 2, 2, 240),
    96: ForwardConfig(128, (64, 32), 128, 2, 2, 240, turns=True),
    128: ForwardConfig(128, (128,), 128, 2, 2, 240),
    256: ForwardConfig(256, (256,), 64, 2, 2, 240, out_in_q=True),
}


# A third consumer keeps the tensor cores busier, but its longer tile wastes more where rows see short spans.
_FORWARD_LONG = {
    64: ForwardConfig(64, (64,), 128, 2, 3, 160, turns=True),
    96: ForwardConfig(128, (64, 32), 128, 2, 3, 160, overlaps=False),
}
LONG_VISITS = {64: (0, 12), 96: (12, 32)}  # visits from which on that pays, without a mask and with one


def forward_config(headdim: int, *, masked: bool, visits: float, alone: bool = True) -> ForwardConfig:
    """Returns the tile sizes of the forward for any headdim up to 256.

    Args:
        headdim: headdim of queries, keys and values.
        masked: whether any processed tile of keys needs a mask.
        visits: tiles of keys that a tile of queries processes, on average, under the tile sizes for `visits` 0.
        alone: False for a hop with an incoming or outgoing state, whose float32 O takes more shared memory.
    """
    block = next(block for block in _FORWARD if headdim <= block)
    is_long = block in _FORWARD_LONG and visits >= LONG_VISITS[block][masked]
    return _FORWARD_LONG[block] if is_long and (alone or block <= 64) else _FORWARD[block]


@dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes of the backward.

    Args:
        block_d, widths: as in `ForwardConfig`.
        block_m: rows of queries in a tile.
        ds_stages: stages of the ring of dS, at least three: one being written, one being read and one between. A fourth
            is needed where half of a stage is no larger than a part of dk (`dkdv_store.py`).
        descending: whether tiles of queries are processed from the last to the first, each for all heads of a group,
            rather than masked tiles first. If dQ is added in a fixed order, tiles are always processed this way.
        preloaded: whether lse and delta initialise the accumulators of the matmuls, rather than being added to their
            results. This takes fewer registers, but the matmuls begin later.
        preloaded_masked: the same for launches in which some tiles need a mask.
        by_gradient: whether the consumers share out the gradients of the same 64 keys, rather than 128 keys
            (`backward_step.py`). Two stages of dS are then enough.
    """

    block_d: int
    widths: tuple[int, ...]
    block_m: int
    ds_stages: int
    descending: bool
    preloaded: bool
    preloaded_masked: bool
    by_gradient: bool = False

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return ROWS if self.by_gradient else KEYS

    @property
    def dout_stages(self) -> int:
        """Stages of the ring of dout."""
        return 1 if self.by_gradient else 2

    @property
    def pieces(self) -> tuple[int, ...]:
        """Columns of each piece of a tile of dq; a piece has 64 rows.

        They are the columns of a head, 64 at a time, or at headdim 64 those of one half of the rows each.
        """
        columns = sum(self.widths)
        return (64,) * (self.block_m // 64 * columns // 64) + (columns % 64,) * (columns % 64 > 0)

    @property
    def dq_box(self) -> tuple[int, int]:
        """Shape in which TMA adds a piece to the sum of dq, at once or in several boxes."""
        return min(self.pieces) // 4, 256


_BACKWARD = {
    64: BackwardConfig(64, (64,), 128, 3, True, True, False),
    96: BackwardConfig(128, (64, 32), 64, 4, False, True, True),
    128: BackwardConfig(128, (128,), 64, 4, False, True, True),
    256: BackwardConfig(256, (256,), 64, 2, False, True, True, by_gradient=True),
}


def backward_config(headdim: int) -> BackwardConfig:
    """Returns the tile sizes of the backward for any headdim up to 256."""
    return _BACKWARD[next(block for block in _BACKWARD if headdim <= block)]


# Both lines are from sweeps on an H200 over one hop: causal; one sequence, 8 sequences, and 8192 rows in all; 16:16 and
# 32:8 heads.
LITTLE, LITTLE_ROWS = 600 * 64, 1024  # LITTLE: pairs of tiles of all KV heads, one query head each, times headdim
SHORT_NARROW, SHORT, SHORT_SHARED = 768, 1024, 2048  # rows up to which the default mode adds in order


def prefer_triton_backward(batch: int, seqlen_q: int, seqlen_k: int, nheads_kv: int, headdim: int) -> bool:
    """Returns whether a backward has so little work, or so much padding, that the Triton kernels are faster.

    Programs of 128 keys are then too few, and the extra kernel that converts the sum of dQ costs as much as is saved.
    """
    config, rows = backward_config(headdim), max(seqlen_q, seqlen_k)
    tiles_q, tiles_k = (padded_rows(seqlen) // KEYS for seqlen in (seqlen_q, seqlen_k))
    work = batch * nheads_kv * tiles_k * (tiles_q + 1) / 2 * config.block_d
    return (work <= LITTLE and rows <= LITTLE_ROWS) or rows <= config.block_m // 2


def adds_in_turns(rows: int, nheads: int, nheads_kv: int, headdim: int) -> bool:
    """Returns whether dQ is added in order in the default mode too; `rows` is the larger of seqlen_q and seqlen_k.

    Ordered addition needs no zeros in the sum. For short sequences, writing zeros takes longer than keeping the order.
    In a ring of several hops the order would only cost time.
    """
    unshared = SHORT_NARROW if headdim <= 64 else SHORT
    return rows <= (SHORT_SHARED if nheads > nheads_kv else unshared)


# The longest tile's time over the average time of a program, up to which another cut would cost more than it saves.
BALANCED = 1.25
MOST_TILES = 2  # tiles for each program: with more of them the parts of dk and dv would take much memory
MOST_HEAD_PARTS = 4


def head_parts(group: int, ntiles: int, skew: float, programs: int) -> int:
    """Returns in how many parts a backward cuts the query heads that share a KV head: 1, 2 or 4.

    A program owns a tile of keys of one KV head, and streams the queries of all heads that share it. Under a causal
    mask the first tile of keys takes about twice the average time. If the GPU has as many programs as there are tiles,
    the kernel takes as long as that tile. A program then streams only a part of the query heads, so that there are more
    and shorter tiles.

    Args:
        group: query heads that share a KV head.
        ntiles: tiles of keys of all KV heads and sequences.
        skew: the largest number of tiles of queries that a tile of keys processes, over the average.
        programs: programs that the GPU runs at a time.
    """
    parts = 1
    if ntiles <= MOST_TILES * programs:
        longest = skew * programs / max(ntiles, 1)
        while longest > BALANCED * parts and parts < MOST_HEAD_PARTS and group % (2 * parts) == 0:
            parts *= 2
    return parts


def dq_tile(columns: int) -> int:
    """Returns how many numbers a tile of the sum of dq has, if the sum has `columns`."""
    return ROWS * sum(backward_config(columns).pieces)


def dq_sum_shape(q: Tensor) -> tuple[int, int, int, int]:
    """Returns the shape of the sum of dQ for `q` (batch, seqlen_q, nheads, headdim), padded to whole tiles.

    It is (batch, nheads, rows, columns).
    """
    batch, seqlen, nheads, headdim = q.shape
    return batch, nheads, padded_rows(seqlen), sum(backward_config(headdim).widths)
