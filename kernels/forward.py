"""Forward of one hop in Triton: continues the online softmax of a state over the keys that are here.

Shapes: q, out (batch, seqlen_q, nheads, headdim); k, v (batch, seqlen_k, nheads_kv, headdim); m, l of the state and lse
(batch, nheads, seqlen_q); o of the state as q, float32. A program owns BLOCK_M queries of one head.

With s = softmax_scale * log2(e) * q k^T: m' = max(m, rowmax s), l' = l 2^(m-m') + rowsum 2^(s-m'),
O' = O 2^(m-m') + 2^(s-m') v. Source: FlashAttention-2 (Dao 2023), algorithm 1, in base 2.
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels.config import forward_config
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
from ringflash.kernels.visibility import row_bounds
from ringflash.state import LN2, AttentionState


@triton.jit
def _attend(
    acc,
    m,
    l,  # noqa: E741
    q_tile,
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
    """Takes the keys [begin, end) of one chunk into (acc, m, l); MASKED where not every row sees every key."""
    STEP: tl.constexpr = 1 if MASKED else BLOCK_N
    first = 0 if MASKED else full_begin
    stop = masked_tiles(begin, full_begin, full_end, end, BLOCK_N) if MASKED else full_end
    for i in tl.range(first, stop, STEP):
        n = masked_tile(i, begin, full_begin, full_end, BLOCK_N) if MASKED else i
        k_tile = load_rows(
            row_pointers(k_base, n, stride_ks, BLOCK_N, BLOCK_D), end - n, HEADDIM, BLOCK_N, BLOCK_D, MASKED
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if SOFTCAP:
            s = tanh(s * before_tanh)
        if MASKED:
            visible = sees(n + tl.arange(0, BLOCK_N), position, k_start, end, lo, hi, MASK, BLOCK_M)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        origin = m_new
        if MASKED:  # a row that has seen nothing: -inf minus -inf would be NaN
            origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale - origin[:, None])
        rescale = tl.exp2(m - origin)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        acc = acc * rescale[:, None]
        v_tile = load_rows(
            row_pointers(v_base, n, stride_vs, BLOCK_N, BLOCK_D), end - n, HEADDIM, BLOCK_N, BLOCK_D, MASKED
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    q,
    k,
    v,
    m_state,
    l_state,
    o_state,
    out,
    lse,
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
    before_tanh,
    scale,
    ln2,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADDIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    tile = ntiles - 1 - program % ntiles  # under a causal mask later rows have more to do: longest first
    batch_head = program // ntiles
    batch = (batch_head // nheads).to(tl.int64)
    head = (batch_head % nheads).to(tl.int64)
    row, left, position = find_tile(q_chunks, nq_chunks, tile, BLOCK_M)

    rows = tl.arange(0, BLOCK_M)
    number = (batch * nheads + head) * seqlen_q + row + rows  # index into m, l and lse
    o_base = (batch * seqlen_q * nheads + head) * HEADDIM  # of out and the state's o, both contiguous
    if FIRST:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    else:
        m = tl.load(m_state + number, mask=rows < left, other=float("-inf"))
        l = tl.load(l_state + number, mask=rows < left, other=0.0)  # noqa: E741
        o_pointers = row_pointers(o_state + o_base, row, nheads * HEADDIM, BLOCK_M, BLOCK_D)
        acc = load_rows(o_pointers, left, HEADDIM, BLOCK_M, BLOCK_D, True)

    q_pointers = row_pointers(q + batch * stride_qb + head * stride_qh, row, stride_qs, BLOCK_M, BLOCK_D)
    q_tile = load_rows(q_pointers, left, HEADDIM, BLOCK_M, BLOCK_D, True)
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
        acc, m, l = _attend(  # noqa: E741
            acc, m, l, q_tile, k_chunk, v_chunk, stride_ks, stride_vs, begin, full_begin, full_end, end,
            lo, hi, position, k_start, before_tanh, scale,
            False, MASK, SOFTCAP, PRECISION, HEADDIM, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        acc, m, l = _attend(  # noqa: E741
            acc, m, l, q_tile, k_chunk, v_chunk, stride_ks, stride_vs, begin, full_begin, full_end, end,
            lo, hi, position, k_start, before_tanh, scale,
            True, MASK, SOFTCAP, PRECISION, HEADDIM, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        chunk_row += length

    if LAST:
        blind = l == 0.0
        divisor = tl.where(blind, 1.0, l)
        acc = acc / divisor[:, None]
        tl.store(lse + number, tl.where(blind, float("-inf"), (m + tl.log2(divisor)) * ln2), mask=rows < left)
        target = out
    else:
        tl.store(m_state + number, m, mask=rows < left)
        tl.store(l_state + number, l, mask=rows < left)
        target = o_state
    pointers = row_pointers(target + o_base, row, nheads * HEADDIM, BLOCK_M, BLOCK_D)
    store_rows(pointers, acc, left, HEADDIM, BLOCK_M, BLOCK_D)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meeting: Meeting,
    *,
    state: AttentionState | None,
    out: Tensor,
    lse: Tensor,
    first: bool,
    last: bool,
) -> None:
    """One hop; see `TileKernels.forward`. `out`, `lse` and the state are contiguous."""
    batch, seqlen_q, nheads, headdim = q.shape
    config = forward_config(headdim, q.dtype)
    bounds = row_bounds(meeting.mask, meeting.q_chunks, q.device)
    ntiles = count_tiles(meeting.q_chunks, config.block_m)
    q, k, v = map(with_unit_stride, (q, k, v))
    m, l, o = (state.m, state.l, state.o) if state is not None else (lse, lse, out)  # noqa: E741 - not touched then
    _forward_kernel[(ntiles * batch * nheads,)](
        q, k, v, m, l, o, out, lse,
        chunk_table(meeting.q_chunks, q.device), chunk_table(meeting.k_chunks, q.device),
        bounds.lo, bounds.hi, bounds.batch_stride,
        len(meeting.q_chunks), len(meeting.k_chunks),
        ntiles, seqlen_q, nheads, nheads // k.shape[2], meeting.before_tanh, meeting.to_base2, LN2,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        FIRST=first, LAST=last, MASK=bounds.kind, SOFTCAP=meeting.softcap > 0, PRECISION=config.precision,
        HEADDIM=headdim, BLOCK_D=config.block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
