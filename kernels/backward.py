"""Backward of one hop in Triton, deterministic: a dQ kernel and a dK/dV kernel, nothing atomic.

Shapes: q, dout, dq (batch, seqlen_q, nheads, headdim); k, v, dk, dv (batch, seqlen_k, nheads_kv, headdim);
lse, delta (batch, nheads, seqlen_q). Probabilities are recomputed from lse.

P = exp(softmax_scale q k^T - lse), dS = P * (dout v^T - delta), dq = softmax_scale dS k, dk = softmax_scale dS^T q,
dv = P^T dout. Source: FlashAttention-2 (Dao 2023), algorithm 2, split in two so that sums have one order.
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels.config import dkdv_config, dq_config
from ringflash.kernels.meeting import Meeting
from ringflash.kernels.tiles import (
    SIZES,
    chunk_table,
    count_tiles,
    find_tile,
    keys_seen,
    load_rows,
    masked_tile,
    masked_tiles,
    row_pointers,
    sees,
    store_rows,
    tanh,
    wide,
    with_unit_stride,
)
from ringflash.kernels.visibility import TABLE, row_bounds, rows_met


@triton.jit
def _load_lse(lse, number, inside):
    """lse in base 2; +inf for rows outside or that saw nothing, so that their probabilities come out exactly 0."""
    x = tl.load(lse + number, mask=inside, other=float("-inf"))
    return tl.where(x == float("-inf"), float("inf"), x * 1.4426950408889634)


@triton.jit
def _dq_over_keys(
    acc,
    q_tile,
    dout_tile,
    lse2,
    delta_row,
    k_base,
    v_base,
    stride_ks,
    stride_vs,
    begin,
    full_begin,
    full_end,
    end,
    lo,
    hi,
    position,
    k_start,
    before_tanh,
    scale,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds dS k over the keys [begin, end) of one chunk; MASKED where not every row sees every key."""
    STEP: tl.constexpr = 1 if MASKED else BLOCK_N
    first = 0 if MASKED else full_begin
    stop = masked_tiles(begin, full_begin, full_end, end, BLOCK_N) if MASKED else full_end
    for i in tl.range(first, stop, STEP):
        n = masked_tile(i, begin, full_begin, full_end, BLOCK_N) if MASKED else i
        k_tile = load_rows(
            row_pointers(k_base, n, stride_ks, BLOCK_N, BLOCK_D), end - n, HEADDIM, BLOCK_N, BLOCK_D, MASKED
        )
        v_tile = load_rows(
            row_pointers(v_base, n, stride_vs, BLOCK_N, BLOCK_D), end - n, HEADDIM, BLOCK_N, BLOCK_D, MASKED
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if SOFTCAP:
            s = tanh(s * before_tanh)
        p = tl.exp2(s * scale - lse2[:, None])
        if MASKED:
            visible = sees(n + tl.arange(0, BLOCK_N), position, k_start, end, lo, hi, MASK, BLOCK_M)
        ds = p * (tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION) - delta_row[:, None])
        if SOFTCAP:
            ds *= 1.0 - s * s
        if MASKED:  # not p: rows that see nothing may hold anything, NaN too
            ds = tl.where(visible, ds, 0.0)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=SIZES)
def _dq_kernel(
    dout,
    q,
    k,
    v,
    lse,
    delta,
    dq,
    q_chunks,
    k_chunks,
    lo_bounds,
    hi_bounds,
    stride_bounds,
    nq_chunks,
    nk_chunks,
    ntiles,
    seqlen_q,
    nheads,
    group,
    softmax_scale,
    before_tanh,
    scale,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    ACCUMULATE: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    tile = ntiles - 1 - program % ntiles
    batch_head = program // ntiles
    batch = (batch_head // nheads).to(tl.int64)
    head = (batch_head % nheads).to(tl.int64)
    row, left, position = find_tile(q_chunks, nq_chunks, tile, BLOCK_M)

    rows = tl.arange(0, BLOCK_M)
    number = (batch * nheads + head) * seqlen_q + row + rows
    lse2 = _load_lse(lse, number, rows < left)
    delta_row = tl.load(delta + number, mask=rows < left, other=0.0)
    q_pointers = row_pointers(q + batch * stride_qb + head * stride_qh, row, stride_qs, BLOCK_M, BLOCK_D)
    q_tile = load_rows(q_pointers, left, HEADDIM, BLOCK_M, BLOCK_D, True)
    dout_pointers = row_pointers(dout + batch * stride_dob + head * stride_doh, row, stride_dos, BLOCK_M, BLOCK_D)
    dout_tile = load_rows(dout_pointers, left, HEADDIM, BLOCK_M, BLOCK_D, True)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    head_kv = head // group
    k_base = k + batch * stride_kb + head_kv * stride_kh
    v_base = v + batch * stride_vb + head_kv * stride_vh
    lo = rows  # with MASK 2, what each row sees; otherwise not read
    hi = rows
    if MASK == 2:
        number_in_batch = batch * stride_bounds + row + rows
        lo = tl.load(lo_bounds + number_in_batch, mask=rows < left, other=0)
        hi = tl.load(hi_bounds + number_in_batch, mask=rows < left, other=0)
    last_row = position + tl.minimum(left, BLOCK_M) - 1
    chunk_row = 0
    for c in range(nk_chunks):
        k_start = tl.load(k_chunks + 2 * c)
        length = tl.load(k_chunks + 2 * c + 1)
        begin, full_begin, full_end, end = keys_seen(
            lo, hi, rows, rows < left, position, last_row, k_start, length, MASK, BLOCK_N
        )
        k_chunk = k_base + wide(chunk_row) * stride_ks
        v_chunk = v_base + wide(chunk_row) * stride_vs
        acc = _dq_over_keys(
            acc, q_tile, dout_tile, lse2, delta_row, k_chunk, v_chunk, stride_ks, stride_vs, begin,
            full_begin, full_end, end, lo, hi, position, k_start, before_tanh, scale,
            False, MASK, SOFTCAP, PRECISION, HEADDIM, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        acc = _dq_over_keys(
            acc, q_tile, dout_tile, lse2, delta_row, k_chunk, v_chunk, stride_ks, stride_vs, begin,
            full_begin, full_end, end, lo, hi, position, k_start, before_tanh, scale,
            True, MASK, SOFTCAP, PRECISION, HEADDIM, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        chunk_row += length

    acc *= softmax_scale
    dq_base = (batch * seqlen_q * nheads + head) * HEADDIM
    dq_pointers = row_pointers(dq + dq_base, row, nheads * HEADDIM, BLOCK_M, BLOCK_D)
    if ACCUMULATE:
        acc += load_rows(dq_pointers, left, HEADDIM, BLOCK_M, BLOCK_D, True)
    store_rows(dq_pointers, acc, left, HEADDIM, BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_over_queries(
    dk_acc,
    dv_acc,
    k_tile,
    v_tile,
    q_base,
    dout_base,
    lse,
    delta,
    number,
    lo_bounds,
    hi_bounds,
    stride_qs,
    stride_dos,
    begin,
    full_begin,
    full_end,
    end,
    length,
    position,
    q_start,
    before_tanh,
    scale,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds dS^T q and P^T dout over queries of one chunk; MASKED where a row does not see every key of the tile."""
    STEP: tl.constexpr = 1 if MASKED else BLOCK_M
    first = 0 if MASKED else full_begin
    stop = masked_tiles(begin, full_begin, full_end, end, BLOCK_M) if MASKED else full_end
    for step in tl.range(first, stop, STEP):
        i = masked_tile(step, begin, full_begin, full_end, BLOCK_M) if MASKED else step
        rows = i + tl.arange(0, BLOCK_M)
        lse2 = _load_lse(lse, number + rows, rows < length)
        delta_row = tl.load(delta + number + rows, mask=rows < length, other=0.0)
        q_tile = load_rows(
            row_pointers(q_base, i, stride_qs, BLOCK_M, BLOCK_D), length - i, HEADDIM, BLOCK_M, BLOCK_D, True
        )
        dout_tile = load_rows(
            row_pointers(dout_base, i, stride_dos, BLOCK_M, BLOCK_D), length - i, HEADDIM, BLOCK_M, BLOCK_D, True
        )
        if MASKED:  # rows that see nothing may hold anything, NaN too
            live = (lse2 != float("inf"))[:, None]
            q_tile = tl.where(live, q_tile, 0.0).to(q_tile.dtype)
            dout_tile = tl.where(live, dout_tile, 0.0).to(dout_tile.dtype)
            delta_row = tl.where(lse2 != float("inf"), delta_row, 0.0)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        if SOFTCAP:
            s = tanh(s * before_tanh)
        p = tl.exp2(s * scale - lse2[None, :])
        ds = p * (tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION) - delta_row[None, :])
        if SOFTCAP:
            ds *= 1.0 - s * s
        if MASKED:
            columns = (position + tl.arange(0, BLOCK_N))[:, None]
            visible = columns <= (q_start + rows)[None, :]
            if MASK == 2:
                lo = tl.load(lo_bounds + rows, mask=rows < length, other=0)
                hi = tl.load(hi_bounds + rows, mask=rows < length, other=0)
                visible = (columns >= lo[None, :]) & (columns < hi[None, :])
            p = tl.where(visible, p, 0.0)
            ds = tl.where(visible, ds, 0.0)
        dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=PRECISION)
        dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit
def _queries_meeting(
    met, position, left, q_start, length, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Which queries of a chunk see a tile of keys: (begin, full_begin, full_end, end), as in `keys_seen`.

    The rows past the chunk's end in its last tile count as full: their lse makes their probabilities 0.
    """
    begin = 0
    full_begin = 0
    full_end = length
    end = length
    if MASK == 1:
        last_key = position + tl.minimum(left, BLOCK_N) - 1
        begin = tl.minimum(tl.maximum(position - q_start, 0), length) // BLOCK_M * BLOCK_M
        full_begin = tl.minimum(tl.maximum(last_key - q_start, 0), length)
        full_begin = tl.cdiv(full_begin, BLOCK_M) * BLOCK_M
    if MASK == 2:
        begin = tl.load(met) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.load(met + 1), BLOCK_M) * BLOCK_M
        full_end = tl.load(met + 2)
        full_end = tl.where(full_end == length, length, full_end // BLOCK_M * BLOCK_M)
        end = tl.load(met + 3)
        full_begin = tl.maximum(tl.minimum(full_begin, tl.cdiv(end, BLOCK_M) * BLOCK_M), begin)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit(do_not_specialize=SIZES)
def _dkdv_kernel(
    dout,
    q,
    k,
    v,
    lse,
    delta,
    dk,
    dv,
    q_chunks,
    k_chunks,
    lo_bounds,
    hi_bounds,
    stride_bounds,
    met,
    stride_met,
    nq_chunks,
    nk_chunks,
    ntiles,
    seqlen_q,
    nheads,
    nheads_kv,
    group,
    softmax_scale,
    before_tanh,
    scale,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_dkb,
    stride_dvb,
    ACCUMULATE: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program % ntiles  # under a causal mask earlier keys have more to do: longest first
    batch_head = program // ntiles
    batch = (batch_head // nheads_kv).to(tl.int64)
    head_kv = (batch_head % nheads_kv).to(tl.int64)
    row, left, position = find_tile(k_chunks, nk_chunks, tile, BLOCK_N)

    k_pointers = row_pointers(k + batch * stride_kb + head_kv * stride_kh, row, stride_ks, BLOCK_N, BLOCK_D)
    k_tile = load_rows(k_pointers, left, HEADDIM, BLOCK_N, BLOCK_D, True)
    v_pointers = row_pointers(v + batch * stride_vb + head_kv * stride_vh, row, stride_vs, BLOCK_N, BLOCK_D)
    v_tile = load_rows(v_pointers, left, HEADDIM, BLOCK_N, BLOCK_D, True)

    met_tile = met + batch * stride_met + tile * nq_chunks * 4
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(group):
        head = head_kv * group + member
        q_base = q + batch * stride_qb + head * stride_qh
        dout_base = dout + batch * stride_dob + head * stride_doh
        chunk_row = 0
        for c in range(nq_chunks):
            q_start = tl.load(q_chunks + 2 * c)
            length = tl.load(q_chunks + 2 * c + 1)
            begin, full_begin, full_end, end = _queries_meeting(
                met_tile + 4 * c, position, left, q_start, length, MASK, BLOCK_M, BLOCK_N
            )
            number = (batch * nheads + head) * seqlen_q + chunk_row
            lo_chunk = lo_bounds + batch * stride_bounds + chunk_row
            hi_chunk = hi_bounds + batch * stride_bounds + chunk_row
            q_chunk = q_base + wide(chunk_row) * stride_qs
            dout_chunk = dout_base + wide(chunk_row) * stride_dos
            if MASK != 0:
                dk_acc, dv_acc = _dkdv_over_queries(
                    dk_acc, dv_acc, k_tile, v_tile, q_chunk, dout_chunk, lse, delta, number, lo_chunk, hi_chunk,
                    stride_qs, stride_dos, begin, full_begin, full_end, end, length, position, q_start,
                    before_tanh, scale,
                    True, MASK, SOFTCAP, PRECISION, HEADDIM, BLOCK_D, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            dk_acc, dv_acc = _dkdv_over_queries(
                dk_acc, dv_acc, k_tile, v_tile, q_chunk, dout_chunk, lse, delta, number, lo_chunk, hi_chunk,
                stride_qs, stride_dos, begin, full_begin, full_end, end, length, position, q_start,
                    before_tanh, scale,
                False, MASK, SOFTCAP, PRECISION, HEADDIM, BLOCK_D, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            chunk_row += length

    dk_acc *= softmax_scale
    stride_row = nheads_kv * HEADDIM
    dk_pointers = row_pointers(dk + batch * stride_dkb + head_kv * HEADDIM, row, stride_row, BLOCK_N, BLOCK_D)
    dv_pointers = row_pointers(dv + batch * stride_dvb + head_kv * HEADDIM, row, stride_row, BLOCK_N, BLOCK_D)
    if ACCUMULATE:
        dk_acc += load_rows(dk_pointers, left, HEADDIM, BLOCK_N, BLOCK_D, True)
        dv_acc += load_rows(dv_pointers, left, HEADDIM, BLOCK_N, BLOCK_D, True)
    store_rows(dk_pointers, dk_acc, left, HEADDIM, BLOCK_N, BLOCK_D)
    store_rows(dv_pointers, dv_acc, left, HEADDIM, BLOCK_N, BLOCK_D)


def backward_dq(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    meeting: Meeting,
    *,
    accumulate: bool,
) -> None:
    """One hop's dq; see `TileKernels.backward_dq`. lse, delta and dq are contiguous."""
    batch, seqlen_q, nheads, headdim = q.shape
    config = dq_config(headdim, q.dtype)
    bounds = row_bounds(meeting.mask, meeting.q_chunks, q.device)
    ntiles = count_tiles(meeting.q_chunks, config.block_m)
    dout, q, k, v = map(with_unit_stride, (dout, q, k, v))
    _dq_kernel[(ntiles * batch * nheads,)](
        dout, q, k, v, lse, delta, dq,
        chunk_table(meeting.q_chunks, q.device), chunk_table(meeting.k_chunks, q.device),
        bounds.lo, bounds.hi, bounds.batch_stride,
        len(meeting.q_chunks), len(meeting.k_chunks),
        ntiles, seqlen_q, nheads, nheads // k.shape[2], meeting.softmax_scale, meeting.before_tanh, meeting.to_base2,
        *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        ACCUMULATE=accumulate, MASK=bounds.kind, SOFTCAP=meeting.softcap > 0, PRECISION=config.precision,
        HEADDIM=headdim, BLOCK_D=config.block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def backward_dkdv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    meeting: Meeting,
    *,
    accumulate: bool,
) -> None:
    """One hop's dk and dv; see `TileKernels.backward_dkdv`. lse, delta, dk and dv are contiguous."""
    batch, seqlen_q, nheads, headdim = q.shape
    nheads_kv = k.shape[2]
    config = dkdv_config(headdim, q.dtype)
    bounds = row_bounds(meeting.mask, meeting.q_chunks, q.device)
    ntiles = count_tiles(meeting.k_chunks, config.block_n)
    met = bounds.lo[None]  # not read
    if bounds.kind == TABLE:
        met = rows_met(meeting.mask, meeting.q_chunks, meeting.k_chunks, config.block_n, q.device)
    dout, q, k, v = map(with_unit_stride, (dout, q, k, v))
    _dkdv_kernel[(ntiles * batch * nheads_kv,)](
        dout, q, k, v, lse, delta, dk, dv,
        chunk_table(meeting.q_chunks, q.device), chunk_table(meeting.k_chunks, q.device),
        bounds.lo, bounds.hi, bounds.batch_stride,
        met, 0 if met.shape[0] == 1 else met.stride(0), len(meeting.q_chunks), len(meeting.k_chunks),
        ntiles, seqlen_q, nheads, nheads_kv, nheads // nheads_kv,
        meeting.softmax_scale, meeting.before_tanh, meeting.to_base2,
        *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], dk.stride(0), dv.stride(0),
        ACCUMULATE=accumulate, MASK=bounds.kind, SOFTCAP=meeting.softcap > 0, PRECISION=config.precision,
        HEADDIM=headdim, BLOCK_D=config.block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
