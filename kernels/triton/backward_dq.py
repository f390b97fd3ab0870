"""dQ of one hop in Triton, deterministic: a program owns BLOCK_M queries and streams the keys they see.

Shapes: q, dq (batch, seqlen_q, nheads, headdim); k (batch, seqlen_k, nheads_kv, headdim); v and dout with headdim_v;
lse, delta (batch, nheads, seqlen_q). Probabilities are recomputed from lse.

P = exp(scores - lse), dS = P * (dout v^T - delta), dq = softmax_scale dS k. Source: FlashAttention-2 (Dao 2023),
algorithm 2, split into two kernels so that every sum has a fixed order.
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from ringflash.kernels.contract import BackwardArguments
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import dq_config
from ringflash.kernels.triton.isolation import finite_or_zero, has_not_finite
from ringflash.kernels.triton.loads import load_tile, stream_at, streamed
from ringflash.kernels.triton.scores import (
    Seed,
    apply_alibi,
    apply_softcap,
    kind_argument,
    load_lse,
    scores_argument,
    slope_of,
    weighed,
)
from ringflash.kernels.triton.spans import apply_mask, bounds_of, launch_tables, load_tile_info, span_of, tile_at
from ringflash.kernels.triton.tiles import (
    FULL,
    LISTED,
    UNSPECIALIZED,
    call_of,
    head_of,
    load_rows,
    operand,
    row_pointers,
    store_rows,
)


@triton.jit
def _over_keys(
    acc,
    q_tile,
    dout_tile,
    lse2,
    delta_row,
    k,
    v,
    k_descriptor,
    v_descriptor,
    queries,
    bounds,
    schedule,
    visible,
    scores,
    slope,
    seed,
    batch,
    head,
    tile,
    nchunks,
    ISOLATE: tl.constexpr,
    kind,
):
    """Adds dS k over the keys of all chunks to acc; `isolation.py` explains `ISOLATE`."""
    STEP: tl.constexpr = 1 if kind.MASK == LISTED else kind.BLOCK_N
    lo, hi, bit_row = bounds
    lse2, lse2_low = lse2
    head_kv = head // kind.GROUP
    for c in range(nchunks):
        span = span_of(schedule, batch, tile, c, nchunks)
        k_chunk = stream_at(k, batch, head_kv, span.row)
        v_chunk = stream_at(v, batch, head_kv, span.row)
        for i in tl.range(span.begin, span.end, STEP, num_stages=1 if ISOLATE else None):
            n, masked = tile_at(i, span, schedule, kind.MASK)
            columns = n + tl.arange(0, kind.BLOCK_N)
            inside = columns < span.visible_end
            k_tile = load_tile(k_chunk, k_descriptor, n, inside, kind.LOADED, kind.BLOCK_N, kind.BLOCK_D, kind)
            v_tile = load_tile(v_chunk, v_descriptor, n, inside, kind.LOADED_V, kind.BLOCK_N, kind.BLOCK_DV, kind)
            if ISOLATE and masked:
                k_tile = finite_or_zero(k_tile)
            keys = (span.start + columns)[None, :]
            t = apply_softcap(tl.dot(q_tile, tl.trans(k_tile), input_precision=kind.PRECISION), scores, kind.SOFTCAP)
            s, to_base2 = apply_alibi(t, queries, keys, scores, slope, kind.ALIBI)
            p = tl.exp2(s * to_base2 - lse2[:, None] - lse2_low[:, None])
            dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=kind.PRECISION)
            _, dp = weighed(p, dp, queries, keys, batch, head, scores, seed, kind.DROPOUT)
            ds = p * (dp - delta_row[:, None])
            if kind.SOFTCAP:
                ds *= 1.0 - t * t
            if masked:  # not p, because fully masked rows may hold anything, NaN included
                ds = apply_mask(
                    ds, 0.0, inside[None, :], queries, keys, span.start + n, lo[:, None], hi[:, None], bit_row[:, None],
                    visible, kind.BLOCK_N, kind.MASK,
                )  # fmt: skip
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=kind.PRECISION)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _dq_kernel(
    dout,
    q,
    k,
    v,
    k_descriptor,
    v_descriptor,
    lse,
    delta,
    dq,
    schedule,
    visible,
    scores,
    ntiles,
    nchunks,
    seqlen_q,
    nheads,
    seed_low,
    seed_high,
    ACCUMULATE: tl.constexpr,
    kind,
):
    seed = Seed(seed_low, seed_high)
    program = tl.program_id(0)
    tile = program % ntiles
    batch_head = program // ntiles
    batch = (batch_head // nheads).to(tl.int64)
    head = (batch_head % nheads).to(tl.int64)
    row, rows_left, position = load_tile_info(schedule, tile)

    rows = tl.arange(0, kind.BLOCK_M)
    number = (batch * nheads + head) * seqlen_q + row + rows
    lse2 = load_lse(lse, number, rows < rows_left)  # (high, low)
    delta_row = tl.load(delta + number, mask=rows < rows_left, other=0.0)
    q_pointers = row_pointers(head_of(q, batch, head), row, q.row, kind.BLOCK_M, kind.BLOCK_D)
    q_tile = load_rows(q_pointers, rows_left, kind.LOADED, kind.BLOCK_M, kind.BLOCK_D)
    dout_pointers = row_pointers(head_of(dout, batch, head), row, dout.row, kind.BLOCK_M, kind.BLOCK_DV)
    dout_tile = load_rows(dout_pointers, rows_left, kind.LOADED_V, kind.BLOCK_M, kind.BLOCK_DV)

    acc = tl.zeros([kind.BLOCK_M, kind.BLOCK_D], tl.float32)
    slope = slope_of(scores, batch, head, kind.ALIBI)
    queries = position + rows[:, None]
    bounds = bounds_of(visible, batch, row, rows, rows < rows_left, kind.MASK)
    acc = _over_keys(
        acc, q_tile, dout_tile, lse2, delta_row, k, v, k_descriptor, v_descriptor, queries, bounds, schedule, visible,
        scores, slope, seed, batch, head, tile, nchunks, False, kind,
    )  # fmt: skip
    if kind.MASK != FULL and has_not_finite(acc):
        acc = tl.zeros([kind.BLOCK_M, kind.BLOCK_D], tl.float32)
        acc = _over_keys(
            acc, q_tile, dout_tile, lse2, delta_row, k, v, k_descriptor, v_descriptor, queries, bounds, schedule,
            visible, scores, slope, seed, batch, head, tile, nchunks, True, kind,
        )  # fmt: skip

    acc *= scores.softmax_scale
    dq_base = dq + (batch * seqlen_q * nheads + head) * kind.HEADDIM
    dq_pointers = row_pointers(dq_base, row, nheads * kind.HEADDIM, kind.BLOCK_M, kind.BLOCK_D)
    if ACCUMULATE:
        acc += load_rows(dq_pointers, rows_left, kind.HEADDIM, kind.BLOCK_M, kind.BLOCK_D)
    store_rows(dq_pointers, acc, rows_left, kind.HEADDIM, kind.BLOCK_M, kind.BLOCK_D)


_launches = Launches()


def backward_dq(inputs: BackwardArguments, dq: Tensor, *, accumulate: bool) -> None:
    """Computes one hop's dq; see `Backend.backward_dq`. dq is contiguous."""
    dout, q, k, v, lse, delta, problem = inputs
    tensors = (dout, q, k, v, lse, delta, dq, *problem.score_config.tensors)
    key = problem.launch_key(accumulate, lse.dtype, dq.dtype, *layout(dout, q, k, v))
    if _launches.repeat(key, tensors):
        return
    batch, seqlen_q, nheads, _ = q.shape
    config = dq_config(call_of(q, v, problem))
    programs, schedule, visible = launch_tables(problem, config, q.device, by_keys=False)
    accelerated, streams, descriptors = streamed((k, v), config.block_n, config, programs)
    scores, seed = scores_argument(problem.score_config, lse)
    kind = kind_argument(problem.score_config, programs, accelerated, q, k, v, config)
    arguments = (
        operand(dout), operand(q), *streams, *descriptors, lse, delta, dq, schedule, visible, scores,
        programs.ntiles, programs.nchunks, seqlen_q, nheads, *seed, accumulate, kind,
    )  # fmt: skip
    grid = (programs.ntiles * batch * nheads,)
    _launches.first(key, _dq_kernel, grid, arguments, config.launch, tensors, (schedule, visible))
