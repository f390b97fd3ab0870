"""Computed HBM bytes of a pass: compulsory, with the kernels' tiles, and of standard attention.

All figures are of one problem: batch sequences of seqlen tokens, with nheads query heads over nheads_kv KV heads. The
tiled figures count every load and store of the kernels as if no cache helped, except for a mask's tables. They are
upper bounds. The compulsory figures count every input and output once, as if the cache held everything. They are lower
bounds.

Source: Dao et al. 2022, "FlashAttention", theorem 2: with on-chip memory for M elements, tiled attention makes
Theta(N^2 d^2 / M) accesses where standard attention makes Theta(N d + N^2).
"""

from __future__ import annotations

from dataclasses import dataclass

STATISTIC = 4  # bytes of a row's lse or delta, and of an element of a float32 gradient


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem.

    Args:
        batch: number of sequences.
        seqlen: tokens in each sequence.
        nheads: number of query heads.
        nheads_kv: number of KV heads.
        headdim: elements in a row of each head.
        causal: whether half the scores are masked.
        itemsize: bytes of an element of q, k, v and out.
    """

    batch: int
    seqlen: int
    nheads: int
    nheads_kv: int
    headdim: int
    causal: bool
    itemsize: int = 2

    @property
    def row(self) -> int:
        """Bytes of one head's row of q, k, v or out."""
        return self.headdim * self.itemsize

    @property
    def q_rows(self) -> int:
        """Rows of q in all heads and sequences."""
        return self.batch * self.nheads * self.seqlen

    @property
    def kv_rows(self) -> int:
        """Rows of k in all heads and sequences."""
        return self.batch * self.nheads_kv * self.seqlen


@dataclass(frozen=True)
class Tile:
    """A kernel's tile: `block_m` queries by `block_n` keys."""

    block_m: int
    block_n: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of a forward and of a backward."""

    forward: int
    backward: int


def compulsory(shape: Shape) -> Traffic:
    """Returns the bytes of each input and output, counted once.

    A forward reads q, k and v, and writes out and lse. A backward reads q, k, v, out, dout and lse, and writes dq, dk
    and dv.
    """
    once = 2 * shape.row * (shape.q_rows + shape.kv_rows)
    statistics = STATISTIC * shape.q_rows
    return Traffic(once + statistics, once + 2 * shape.row * (shape.q_rows + shape.kv_rows) + statistics)


def standard(shape: Shape) -> Traffic:
    """Returns the bytes of standard attention, which keeps scores S and probabilities P in memory.

    The forward writes and reads S and P. The backward moves seven matrices: it reads P twice, writes and reads dP,
    writes dS and reads dS twice. Masking is not counted, and saves nothing.
    """
    matrix = shape.itemsize * shape.q_rows * shape.seqlen
    once = compulsory(shape)
    return Traffic(4 * matrix + once.forward, 7 * matrix + once.backward)


def forward_kernel(shape: Shape, tile: Tile) -> int:
    """Returns the bytes of the forward kernel.

    Each tile of queries loads q once, and the keys and values that it sees. out and lse are written once.
    """
    return _over_keys(shape, tile) + 2 * shape.row * shape.q_rows + STATISTIC * shape.q_rows


def dq_kernel(shape: Shape, tile: Tile) -> int:
    """Returns the bytes of the dQ kernel.

    Each tile of queries loads q, dout, lse and delta once, and the keys and values that it sees. dq is written once.
    """
    return _over_keys(shape, tile) + 3 * shape.row * shape.q_rows + 2 * STATISTIC * shape.q_rows


def dkdv_kernel(shape: Shape, tile: Tile) -> int:
    """Returns the bytes of the dK/dV kernel.

    Each tile of keys loads q, dout, lse and delta of the queries that see it, in every head of its group.
    """
    met = shape.batch * shape.nheads * _queries_met(shape, tile)
    return (2 * shape.row + 2 * STATISTIC) * met + 4 * shape.row * shape.kv_rows


def delta_kernel(shape: Shape) -> int:
    """Returns the bytes of delta = rowsum(dout * out), which reads both and writes one number a row."""
    return (2 * shape.row + STATISTIC) * shape.q_rows


def negated_statistics(shape: Shape) -> int:
    """Returns the bytes of preparing lse and delta for the Hopper backward: both read, two numbers a row written."""
    return 4 * STATISTIC * shape.q_rows


def added_dq(shape: Shape, tile: Tile, *, in_turns: bool) -> int:
    """Returns the bytes that the single-pass kernel adds to `dkdv_kernel`.

    Each tile of keys reads and writes dq in float32. Zeros are written before; with `in_turns`, the first tile only
    writes instead. One conversion to q's dtype follows.
    """
    met = shape.batch * shape.nheads * _queries_met(shape, tile)
    zeros = -shape.q_rows if in_turns else shape.q_rows
    conversion = (STATISTIC * shape.headdim + shape.row) * shape.q_rows
    return STATISTIC * shape.headdim * (2 * met + zeros) + conversion


def _over_keys(shape: Shape, tile: Tile) -> int:
    """Returns the bytes of the keys and values that the tiles of queries load."""
    ends = range(tile.block_m, shape.seqlen + tile.block_m, tile.block_m)
    keys = sum(min(end, shape.seqlen) if shape.causal else shape.seqlen for end in ends)
    return 2 * shape.row * shape.batch * shape.nheads * keys


def _queries_met(shape: Shape, tile: Tile) -> int:
    """Returns the number of query rows that the tiles of keys of one head load."""
    starts = range(0, shape.seqlen, tile.block_n)
    return sum(shape.seqlen - (start // tile.block_m * tile.block_m if shape.causal else 0) for start in starts)
