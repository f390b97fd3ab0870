"""Row vectors of the Hopper backward: lse and delta, scaled, negated and padded to whole tiles.

Shapes: lse, delta (batch, nheads, seqlen_q).
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels.contract import PendingDelta
from ringflash.kernels.hopper.config import backward_config, dq_tile, padded_rows
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED
from ringflash.kernels.triton.tiles import Strided, head_of, load_rows, row_pointers, strided, wide
from ringflash.state import contiguous

PREPARED = 64  # rows of a program that computes delta too


@triton.jit(do_not_specialize=["seqlen", "padded"])
def _vectors_kernel(lse, delta, minus_lse, minus_delta, lost, factor, seqlen, padded, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < seqlen
    of_lse = tl.load(lse + head * seqlen + rows, mask=inside, other=0.0)
    of_delta = tl.load(delta + head * seqlen + rows, mask=inside, other=0.0)
    tl.store(minus_lse + head * padded + rows, tl.where(inside, of_lse * factor, -3e38), mask=rows < padded)
    tl.store(minus_delta + head * padded + rows, -of_delta, mask=rows < padded)
    if tl.sum(of_lse * 0.0 + of_delta * 0.0, 0) != 0.0:  # NaN
        tl.store(lost, -1)


@triton.jit(do_not_specialize=["ntiles", "seqlen", "nheads"])
def _prepare_kernel(
    out,
    dout,
    dlse,
    lse,
    minus_lse,
    minus_delta,
    lost,
    total,
    counters,
    factor,
    ntiles,
    seqlen,
    nheads,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program owns BLOCK rows of a head: their delta, as `delta._delta_kernel` computes it, and their part of `total`.
    program = tl.program_id(0)
    row = program % ntiles * BLOCK
    batch_head = program // ntiles
    batch = (batch_head // nheads).to(tl.int64)
    head = (batch_head % nheads).to(tl.int64)
    rows = tl.arange(0, BLOCK)
    inside = row + rows < seqlen
    out_pointers = row_pointers(head_of(out, batch, head), row, out.row, BLOCK, BLOCK_D)
    dout_pointers = row_pointers(head_of(dout, batch, head), row, dout.row, BLOCK, BLOCK_D)
    out_tile = load_rows(out_pointers, seqlen - row, HEADDIM, BLOCK, BLOCK_D).to(tl.float32)
    dout_tile = load_rows(dout_pointers, seqlen - row, HEADDIM, BLOCK, BLOCK_D).to(tl.float32)
    of_delta = tl.sum(out_tile * dout_tile, 1)
    if dlse is not None:
        of_delta -= tl.load(head_of(dlse, batch, head) + wide(row + rows) * dlse.row, mask=inside, other=0.0)
    of_lse = tl.load(lse + batch_head.to(tl.int64) * seqlen + row + rows, mask=inside, other=0.0)
    place = program.to(tl.int64) * BLOCK + rows
    tl.store(minus_lse + place, tl.where(inside, of_lse * factor, -3e38))
    tl.store(minus_delta + place, -of_delta)
    if tl.sum(of_lse * 0.0 + of_delta * 0.0, 0) != 0.0:  # NaN
        tl.store(lost, -1)
    first = program.to(tl.int64) * BLOCK * COLUMNS
    if counters is not None:
        tl.store(counters + first // TILE, 0)
    else:
        PART: tl.constexpr = BLOCK * (COLUMNS & -COLUMNS)  # a power of two, as shapes in Triton are
        for part in tl.static_range(BLOCK * COLUMNS // PART):
            tl.store(total + first + part * PART + tl.arange(0, PART), tl.zeros([PART], tl.float32))


_launches, _preparations = Launches(), Launches()


def vectors(
    lse: Tensor, delta: Tensor, factor: float, lost: Tensor, cache: dict[str, Any] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lse * factor and -delta, each (batch, nheads, padded rows), and `lost`.

    `lost` is one int32 that is not negative; it becomes -1 if any lse or delta is not finite. Rows past the end have
    probability 0 from a finite lse. Hops of a pass with the same factor share the results through `cache`.
    """
    name = f"vectors of {factor}"
    if cache is not None and name in cache:
        of, known = cache[name]
        if of[0] is lse and of[1] is delta:
            return known
    batch, nheads, seqlen = lse.shape
    padded = padded_rows(seqlen)
    minus_lse, minus_delta = (lse.new_empty_strided(*contiguous((batch, nheads, padded))) for _ in range(2))
    tensors, key = (lse, delta, minus_lse, minus_delta, lost), (factor, *layout(lse, delta))
    if not _launches.repeat(key, tensors):
        grid = (batch * nheads, triton.cdiv(padded, 1024))
        _launches.first(key, _vectors_kernel, grid, (*tensors, factor, seqlen, padded, 1024), FUSED, tensors)
    if cache is not None:
        cache[name] = (lse, delta), (minus_lse, minus_delta, lost)
    return minus_lse, minus_delta, lost


def prepared_vectors(
    dout: Tensor,
    lse: Tensor,
    delta: PendingDelta,
    factor: float,
    lost: Tensor,
    total: Tensor,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `vectors` of a delta that the same launch computes, and clears `counters`, or `total` without counters.

    `total` and `counters` are those of a `DqAccumulator`.
    """
    out, dlse = delta
    (batch, nheads, seqlen), headdim, (padded, columns) = lse.shape, out.shape[3], total.shape[2:]
    minus_lse, minus_delta = (lse.new_empty_strided(*contiguous((batch, nheads, padded))) for _ in range(2))
    given = () if dlse is None else (dlse,)
    cleared = total if counters is None else counters
    tensors = (out, dout, lse, minus_lse, minus_delta, lost, cleared, *given)
    key = factor, counters is None, columns, *layout(out, dout, lse, *given)
    if not _preparations.repeat(key, tensors):
        dlse_rows = None if dlse is None else Strided(dlse, dlse.stride(0), dlse.stride(2), dlse.stride(1))
        ntiles = padded // PREPARED
        arguments = (
            strided(out), strided(dout), dlse_rows, lse, minus_lse, minus_delta, lost,
            total if counters is None else None, counters, factor, ntiles, seqlen, nheads,
            headdim, backward_config(headdim).block_d, columns, dq_tile(columns), PREPARED,
        )  # fmt: skip
        _preparations.first(key, _prepare_kernel, (ntiles * batch * nheads,), arguments, FUSED, tensors)
    return minus_lse, minus_delta, lost
