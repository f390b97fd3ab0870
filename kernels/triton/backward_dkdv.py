"""dK and dV of one hop in Triton, and dQ too where its sum may have any order.

A program owns BLOCK_N keys of one KV head and streams the queries that see them, of all heads of the group. Without dQ
the kernel uses no atomics. With dQ it is the whole backward in five matmuls; it adds each tile of dQ to float32 memory
in the order in which the tiles are finished.

Shapes: q, dq (batch, seqlen_q, nheads, headdim); k, dk (batch, seqlen_k, nheads_kv, headdim); v, dv and dout with
headdim_v; lse, delta (batch, nheads, seqlen_q). Probabilities are recomputed from lse.

P = exp(scores - lse), dS = P * (dout v^T - delta), dk = softmax_scale dS^T q, dv = P^T dout, dq = softmax_scale dS k.
Source: FlashAttention-2 (Dao 2023), algorithm 2.
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

import triton
import triton.language as tl
from ringflash.kernels.contract import BackwardArguments, DqSum
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import TileConfig, dkdv_config, single_pass_config
from ringflash.kernels.triton.isolation import finite_or_zero, has_not_finite, is_finite
from ringflash.kernels.triton.loads import load_tile, stream_at, streamed
from ringflash.kernels.triton.scores import (
    Seed,
    apply_alibi,
    apply_softcap,
    kind_argument,
    load_columns,
    load_lse,
    scores_argument,
    slope_of,
    split_lse,
    weighed,
)
from ringflash.kernels.triton.spans import (
    apply_mask,
    bounds_of,
    keys_read,
    launch_tables,
    load_tile_info,
    span_of,
    tile_at,
)
from ringflash.kernels.triton.tiles import (
    CAUSAL,
    FULL,
    LISTED,
    TABLE,
    UNSPECIALIZED,
    call_of,
    capability,
    head_of,
    load_rows,
    load_where,
    operand,
    row_pointers,
    store_rows,
    strided,
    wide,
)
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _over_queries(
    dk_acc,
    dv_acc,
    k_tile,
    v_tile,
    q,
    dout,
    q_descriptor,
    dout_descriptor,
    dq_base,
    lse,
    delta,
    stride_dqs,
    span,
    number,
    keys,
    first_key,
    read,
    short,
    schedule,
    visible,
    scores,
    slope,
    seed,
    batch,
    head,
    WITH_DQ: tl.constexpr,
    ISOLATE: tl.constexpr,
    kind,
):
    """Adds dS^T q and P^T dout over the queries of one chunk to dk_acc and dv_acc.

    `isolation.py` explains `ISOLATE`.
    """
    STEP: tl.constexpr = 1 if kind.MASK == LISTED else kind.BLOCK_M
    for step in tl.range(span.begin, span.end, STEP, num_stages=1 if ISOLATE else None):
        i, masked = tile_at(step, span, schedule, kind.MASK)
        rows = i + tl.arange(0, kind.BLOCK_M)
        inside = rows < span.length
        COPIED: tl.constexpr = k_tile.dtype.primitive_bitwidth == 16
        if kind.EVEN:
            lse2, lse2_low = split_lse(load_columns(lse + number + i, kind.BLOCK_M, kind, COPIED))
        else:
            lse2, lse2_low = load_lse(lse, number + rows, inside)
            if kind.MASK == CAUSAL:  # fully masked rows may hold anything, NaN included
                inside &= span.start + rows >= 0
            elif kind.MASK >= TABLE:
                inside &= lse2 != float("inf")
        q_tile = load_tile(q, q_descriptor, i, inside, kind.LOADED, kind.BLOCK_M, kind.BLOCK_D, kind)
        dout_tile = load_tile(dout, dout_descriptor, i, inside, kind.LOADED_V, kind.BLOCK_M, kind.BLOCK_DV, kind)
        if ISOLATE:
            row_of_delta = tl.load(delta + number + rows, mask=inside, other=0.0)
            if masked:
                q_tile, dout_tile = finite_or_zero(q_tile), finite_or_zero(dout_tile)
                lse2 = tl.where(is_finite(row_of_delta), lse2, float("nan"))
                row_of_delta = finite_or_zero(row_of_delta)
        queries = (span.start + rows)[None, :]
        t = apply_softcap(tl.dot(k_tile, tl.trans(q_tile), input_precision=kind.PRECISION), scores, kind.SOFTCAP)
        s, to_base2 = apply_alibi(t, queries, keys, scores, slope, kind.ALIBI)
        p = tl.exp2(s * to_base2 - lse2[None, :] - lse2_low[None, :])
        if not kind.EVEN:
            masked = masked | short
        if (kind.MASK != FULL or not kind.EVEN) and masked:
            lo, hi, bit_row = bounds_of(visible, batch, span.row, rows, inside, kind.MASK)
            p = apply_mask(
                p, 0.0, read[:, None], queries, keys, first_key, lo[None, :], hi[None, :], bit_row[None, :],
                visible, kind.BLOCK_N, kind.MASK,
            )  # fmt: skip
        dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=kind.PRECISION)
        if ISOLATE:
            delta_row = row_of_delta
        elif kind.EVEN:
            delta_row = load_columns(delta + number + i, kind.BLOCK_M, kind, COPIED)
        else:
            delta_row = tl.load(delta + number + rows, mask=inside, other=0.0)
        weight, dp = weighed(p, dp, queries, keys, batch, head, scores, seed, kind.DROPOUT)
        ds = p * (dp - delta_row[None, :])
        if kind.SOFTCAP:
            ds *= 1.0 - t * t
        if kind.MASK != FULL and (WITH_DQ != 0 or ISOLATE) and masked:
            ds = tl.where(p == 0.0, 0.0, ds)  # where the pair is masked, dp may have overflowed
        dv_acc = tl.dot(weight.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=kind.PRECISION)
        ds = ds.to(q_tile.dtype)
        dk_acc = tl.dot(ds, q_tile, dk_acc, input_precision=kind.PRECISION)
        if WITH_DQ != 0:  # transposed k^T dS: a tile of queries may be too short for the rows of a matmul
            part = tl.trans(tl.dot(tl.trans(k_tile), ds, input_precision=kind.PRECISION)) * scores.softmax_scale
        if WITH_DQ == 2:  # rows past the chunk's end add zeros to the rows that follow
            place = [batch.to(tl.int32), span.row + i, head.to(tl.int32), 0]
            dq_base.atomic_add(place, part.reshape(1, kind.BLOCK_M, 1, kind.BLOCK_D))
        if WITH_DQ == 1:
            pointers = row_pointers(dq_base, i, stride_dqs, kind.BLOCK_M, kind.BLOCK_D)
            dims = tl.arange(0, kind.BLOCK_D)[None, :]
            tl.atomic_add(pointers, part, mask=inside[:, None] & (dims < kind.HEADDIM), sem="relaxed")
    return dk_acc, dv_acc


class Keys(NamedTuple):
    """The tile of keys that a program owns: k, v, which rows may be read, and the first position.

    `short` is true if the tile has fewer than BLOCK_N rows.
    """

    k: Any
    v: Any
    read: Any
    position: Any
    short: Any


class Heads(NamedTuple):
    """The KV head of a program, counts for the loops over its query heads and their chunks, and the sum of dq."""

    batch: Any
    head_kv: Any
    nheads: Any
    seqlen_q: Any
    nchunks: Any
    tile: Any
    dq: Any


@triton.jit
def _over_heads(
    owned,
    q,
    dout,
    q_descriptor,
    dout_descriptor,
    heads,
    lse,
    delta,
    schedule,
    visible,
    scores,
    seed,
    WITH_DQ: tl.constexpr,
    ISOLATE: tl.constexpr,
    kind,
):
    """Returns dk / softmax_scale and dv of the owned keys, over all queries of all heads that share them."""
    batch, head_kv, nheads, seqlen_q, nchunks, tile, dq = heads
    k_tile, v_tile, read, position, short = owned
    keys = (position + tl.arange(0, kind.BLOCK_N))[:, None]
    stride_dqs = nheads * kind.HEADDIM  # dq is contiguous
    dk_acc = tl.zeros([kind.BLOCK_N, kind.BLOCK_D], tl.float32)
    dv_acc = tl.zeros([kind.BLOCK_N, kind.BLOCK_DV], tl.float32)
    for member in range(kind.GROUP):
        head = head_kv * kind.GROUP + member
        if WITH_DQ == 1:
            dq_base = dq + (batch * seqlen_q * nheads + head) * kind.HEADDIM
        slope = slope_of(scores, batch, head, kind.ALIBI)
        for c in range(nchunks):
            span = span_of(schedule, batch, tile, c, nchunks)
            number = (batch * nheads + head) * seqlen_q + span.row
            q_chunk = stream_at(q, batch, head, span.row)
            dout_chunk = stream_at(dout, batch, head, span.row)
            dq_chunk = dq
            if WITH_DQ == 1:
                dq_chunk = dq_base + wide(span.row) * stride_dqs
            dk_acc, dv_acc = _over_queries(
                dk_acc, dv_acc, k_tile, v_tile, q_chunk, dout_chunk, q_descriptor, dout_descriptor, dq_chunk, lse,
                delta, stride_dqs, span, number, keys, position, read, short, schedule, visible, scores,
                slope, seed, batch, head, WITH_DQ, ISOLATE, kind,
            )  # fmt: skip
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _dkdv_kernel(
    q,
    dout,
    q_descriptor,
    dout_descriptor,
    k,
    v,
    lse,
    delta,
    dq,
    dk,
    dv,
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
    WITH_DQ: tl.constexpr,
    kind,
):
    seed = Seed(seed_low, seed_high)
    nheads_kv = nheads // kind.GROUP
    program = tl.program_id(0)
    tile = program % ntiles
    batch_head = program // ntiles
    batch = (batch_head // nheads_kv).to(tl.int64)
    head_kv = (batch_head % nheads_kv).to(tl.int64)
    row, rows_left, position = load_tile_info(schedule, tile)

    rows = tl.arange(0, kind.BLOCK_N)
    read = keys_read(visible, batch, position + rows, rows < rows_left, kind.MASK)
    k_pointers = row_pointers(head_of(k, batch, head_kv), row, k.row, kind.BLOCK_N, kind.BLOCK_D)
    k_tile = load_where(k_pointers, read, kind.LOADED, kind.BLOCK_D, False)
    v_pointers = row_pointers(head_of(v, batch, head_kv), row, v.row, kind.BLOCK_N, kind.BLOCK_DV)
    v_tile = load_where(v_pointers, read, kind.LOADED_V, kind.BLOCK_DV, False)
    if WITH_DQ != 0 and kind.MASK != FULL:  # dq is added for good, so its other factor is made finite in advance
        k_tile = finite_or_zero(k_tile)

    heads = Heads(batch, head_kv, nheads, seqlen_q, nchunks, tile, dq)
    keys = Keys(k_tile, v_tile, read, position, rows_left < kind.BLOCK_N)
    dk_acc, dv_acc = _over_heads(
        keys, q, dout, q_descriptor, dout_descriptor, heads, lse, delta, schedule, visible, scores, seed, WITH_DQ,
        False, kind,
    )  # fmt: skip
    if kind.MASK != FULL and (has_not_finite(dk_acc) | has_not_finite(dv_acc)):  # not dq: k is finite
        dk_acc, dv_acc = _over_heads(
            keys, q, dout, q_descriptor, dout_descriptor, heads, lse, delta, schedule, visible, scores, seed, 0, True,
            kind,
        )  # fmt: skip

    dk_acc *= scores.softmax_scale
    dk_pointers = row_pointers(head_of(dk, batch, head_kv), row, dk.row, kind.BLOCK_N, kind.BLOCK_D)
    dv_pointers = row_pointers(head_of(dv, batch, head_kv), row, dv.row, kind.BLOCK_N, kind.BLOCK_DV)
    if ACCUMULATE:
        dk_acc += load_rows(dk_pointers, rows_left, kind.HEADDIM, kind.BLOCK_N, kind.BLOCK_D)
        dv_acc += load_rows(dv_pointers, rows_left, kind.HEADDIM_V, kind.BLOCK_N, kind.BLOCK_DV)
    store_rows(dk_pointers, dk_acc, rows_left, kind.HEADDIM, kind.BLOCK_N, kind.BLOCK_D)
    store_rows(dv_pointers, dv_acc, rows_left, kind.HEADDIM_V, kind.BLOCK_N, kind.BLOCK_DV)


def _dq_argument(given: DqSum | None, config: TileConfig) -> tuple[int, object]:
    """Returns how dq is added, and where: 0 not at all, 1 by element, 2 by tile with the tensor memory accelerator."""
    if given is None:
        return 0, None
    dq = given.rows()
    if knobs.runtime.interpret or capability() < 90 or dq.shape[3] % 4:  # it needs strides in multiples of 16 bytes
        return 1, dq
    return 2, TensorDescriptor(dq, list(dq.shape), list(dq.stride()), [1, config.block_m, 1, config.block_d])


_launches = Launches()


def backward_dkdv(
    inputs: BackwardArguments, dk: Tensor, dv: Tensor, *, accumulate: bool, dq: DqSum | None = None
) -> None:
    """Computes one hop's dk and dv, and dq if given; see `Backend.backward_dkdv`."""
    dout, q, k, v, lse, delta, problem = inputs
    adds_to = () if dq is None else (dq.rows(),)
    tensors = (dout, q, k, v, lse, delta, dk, dv, *adds_to, *problem.score_config.tensors)
    key = problem.launch_key(accumulate, dq is None, lse.dtype, dk.dtype, *layout(dout, q, k, v, dk, dv))
    if _launches.repeat(key, tensors):
        return
    batch, seqlen_q, nheads, _ = q.shape
    choose = dkdv_config if dq is None else single_pass_config
    config = choose(call_of(q, v, problem))
    programs, schedule, visible = launch_tables(problem, config, q.device, by_keys=True)
    accelerated, streams, descriptors = streamed((q, dout), config.block_m, config, programs)
    scores, seed = scores_argument(problem.score_config, lse)
    with_dq, dq_argument = _dq_argument(dq, config)
    kind = kind_argument(problem.score_config, programs, accelerated, q, k, v, config)
    arguments = (
        *streams, *descriptors, operand(k), operand(v), lse, delta, dq_argument, strided(dk), strided(dv),
        schedule, visible, scores,
        programs.ntiles, programs.nchunks, seqlen_q, nheads, *seed, accumulate, with_dq, kind,
    )  # fmt: skip
    grid = (programs.ntiles * batch * k.shape[2],)
    _launches.first(key, _dkdv_kernel, grid, arguments, config.launch, tensors, (schedule, visible))
