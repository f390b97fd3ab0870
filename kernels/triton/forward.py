"""Forward of one hop in Triton: it folds the hop's keys into the running softmax state (m, l, o).

A hop is the attention of a rank's queries to the keys that the rank holds at one step of a ring. The first hop that
computes begins with an empty state (`FIRST`), and the last one writes out and lse instead of the state (`LAST`). A call
without a ring is one hop, first and last at once.

Shapes: q (batch, seqlen_q, nheads, headdim); k (batch, seqlen_k, nheads_kv, headdim); v with headdim_v; out (batch,
seqlen_q, nheads, headdim_v); m, l of the state and lse (batch, nheads, seqlen_q); o of the state as out, float32. A
program owns a tile of BLOCK_M queries of one head. It processes tiles of BLOCK_N keys, chunk by chunk: a chunk is a
range of consecutive positions that a rank stores together.

Arguments that the kernel and `_attend` share:

    k, v                 the tensors as `Streamed`: pointers and strides (`loads.py`)
    k_descriptor, v_descriptor
                         TMA descriptors of k and v; None unless kind.ACCELERATED (loads by TMA)
    schedule, visible    tables of the tiles to process, and of the keys that each query sees (`spans.py`)
    scores, seed         parameters of softcap, ALiBi, sinks and dropout (`scores.py`)
    kind                 compile-time constants (`Constexprs` in `tiles.py`). MASK is FULL, CAUSAL, TABLE or LISTED.
                         LOADED and LOADED_V are the columns that a load covers: the headdim, rounded up to whole
                         vectors of 16 bytes

Rows are counted in the storage of a sequence on this rank, positions in the whole sequence. A tile of keys is given by
its first key `n`, counted from the first row of its chunk.

With x the scores times log2(e): m' = max(m, rowmax x), l' = l 2^(m-m') + rowsum 2^(x-m'),
O' = O 2^(m-m') + 2^(x-m') v. The code holds x as a product s * to_base2, because a multiply-add can then scale s and
subtract m' at once. Source: FlashAttention-2 (Dao 2023), algorithm 1, in base 2.
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from ringflash.kernels.contract import ForwardArguments
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import forward_config
from ringflash.kernels.triton.isolation import finite_or_zero, has_not_finite, nan_where_not_finite
from ringflash.kernels.triton.loads import load_tile, stream_at, streamed
from ringflash.kernels.triton.scores import (
    Seed,
    apply_alibi,
    apply_softcap,
    keep_mask,
    kind_argument,
    lse_of,
    scores_argument,
    slope_of,
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


class Results(NamedTuple):
    """Tensors that a hop writes, all contiguous: out and lse if LAST, else m, l and o of the state.

    Unless FIRST, the hop also reads m, l and o.
    """

    m: Any
    l: Any  # noqa: E741
    o: Any
    out: Any
    lse: Any


@triton.jit
def _attend(
    acc,
    m,
    l,  # noqa: E741
    q_tile,
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
    """Returns (acc, m, l) after the keys of all chunks: the unnormalised output, and each row's maximum and sum.

    acc is (BLOCK_M, BLOCK_DV), m and l are (BLOCK_M,), and m is in base 2. `queries` (BLOCK_M, 1) holds the positions
    of the queries; `bounds` is (lo, hi, bit_row), each (BLOCK_M,). If MASK is TABLE, a query sees the positions
    lo <= key < hi. If it is LISTED, the bit of the key must also be set in row `bit_row` of the bitmap in `visible`.
    FULL and CAUSAL read no bounds. `tile` is the tile's index in the tables, in which the tiles with the most work come
    first. `slope` is the head's ALiBi slope.

    A masked key has weight 0, but 0 times NaN is NaN. With `ISOLATE`, tiles that need a mask therefore take zeros in
    place of NaN and Inf in v. Queries that see such a key must still get NaN. So all scores of the key become NaN, and
    the mask then hides them from the other queries (`isolation.py`).
    """
    STEP: tl.constexpr = 1 if kind.MASK == LISTED else kind.BLOCK_N  # if LISTED, `i` counts entries of the list
    lo, hi, bit_row = bounds
    head_kv = head // kind.GROUP
    for c in range(nchunks):
        span = span_of(schedule, batch, tile, c, nchunks)  # the part of chunk c that this tile of queries processes
        k_chunk = stream_at(k, batch, head_kv, span.row)
        v_chunk = stream_at(v, batch, head_kv, span.row)
        for i in tl.range(span.begin, span.end, STEP, num_stages=1 if ISOLATE else None):  # rare: no pipeline
            n, masked = tile_at(i, span, schedule, kind.MASK)
            columns = n + tl.arange(0, kind.BLOCK_N)
            inside = columns < span.visible_end  # no query of the hop sees later keys of the chunk
            k_tile = load_tile(k_chunk, k_descriptor, n, inside, kind.LOADED, kind.BLOCK_N, kind.BLOCK_D, kind)
            # With a softcap, s is the tanh, and to_base2 is softcap * log2(e). Otherwise s is q k^T, and to_base2 is
            # softmax_scale * log2(e). s * to_base2 is the score in base 2; with ALiBi to_base2 is 1.
            s = apply_softcap(tl.dot(q_tile, tl.trans(k_tile), input_precision=kind.PRECISION), scores, kind.SOFTCAP)
            keys = (span.start + columns)[None, :]
            s, to_base2 = apply_alibi(s, queries, keys, scores, slope, kind.ALIBI)
            if ISOLATE:  # NaN and Inf of v change the scores, so v is loaded before
                v_tile = load_tile(v_chunk, v_descriptor, n, inside, kind.LOADED_V, kind.BLOCK_N, kind.BLOCK_DV, kind)
            if masked:
                if ISOLATE:
                    s += nan_where_not_finite(tl.zeros([kind.BLOCK_N], tl.float32), v_tile)[None, :]
                    v_tile = finite_or_zero(v_tile)
                s = apply_mask(
                    s, float("-inf"), inside[None, :], queries, keys, span.start + n, lo[:, None], hi[:, None],
                    bit_row[:, None], visible, kind.BLOCK_N, kind.MASK,
                )  # fmt: skip
            m_new = tl.maximum(m, tl.max(s, 1) * to_base2)
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # without keys so far, -inf minus -inf is NaN
            p = tl.exp2(s * to_base2 - shift[:, None])
            rescale = tl.exp2(m - shift)
            l = l * rescale + tl.sum(p, 1)  # noqa: E741 - the sum is of all weights, before dropout
            if kind.DROPOUT:
                p = tl.where(keep_mask(queries, keys, batch, head, scores, seed), p * scores.kept_scale, 0.0)
            acc = acc * rescale[:, None]
            if not ISOLATE:
                v_tile = load_tile(v_chunk, v_descriptor, n, inside, kind.LOADED_V, kind.BLOCK_N, kind.BLOCK_DV, kind)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=kind.PRECISION)
            m = m_new
    return acc, m, l


@triton.jit
def _initial_state(results, state_offsets, o_base, row, stride_o, rows_left, FIRST: tl.constexpr, kind):
    """Returns (acc, m, l) before the first key: an empty state if FIRST, else the incoming state.

    `state_offsets` (BLOCK_M,) indexes m and l. `rows_left` counts the rows from `row` to the chunk's end.
    """
    rows = tl.arange(0, kind.BLOCK_M)
    if FIRST:
        m = tl.full([kind.BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([kind.BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([kind.BLOCK_M, kind.BLOCK_DV], tl.float32)
    else:
        m = tl.load(results.m + state_offsets, mask=rows < rows_left, other=float("-inf"))
        l = tl.load(results.l + state_offsets, mask=rows < rows_left, other=0.0)  # noqa: E741
        o_pointers = row_pointers(results.o + o_base, row, stride_o, kind.BLOCK_M, kind.BLOCK_DV)
        acc = load_rows(o_pointers, rows_left, kind.HEADDIM_V, kind.BLOCK_M, kind.BLOCK_DV)
    return acc, m, l


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _forward_kernel(
    q,
    k,
    v,
    k_descriptor,
    v_descriptor,
    results,
    schedule,
    visible,
    scores,
    ntiles,
    nchunks,
    seqlen_q,
    nheads,
    seed_low,
    seed_high,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    kind,
):
    # Programs of one head are consecutive, so that its keys stay in L2. `ntiles` counts the tiles of queries of a head,
    # `nchunks` chunks of keys. q.row and the like are strides of a row.
    seed = Seed(seed_low, seed_high)  # two arguments, because UNSPECIALIZED cannot name the elements of a tuple
    program = tl.program_id(0)
    tile = program % ntiles
    batch_head = program // ntiles
    batch = (batch_head // nheads).to(tl.int64)
    head = (batch_head % nheads).to(tl.int64)
    row, rows_left, position = load_tile_info(schedule, tile)

    rows = tl.arange(0, kind.BLOCK_M)
    state_offsets = (batch * nheads + head) * seqlen_q + row + rows  # also into lse
    o_base = (batch * seqlen_q * nheads + head) * kind.HEADDIM_V
    stride_o = nheads * kind.HEADDIM_V
    acc, m, l = _initial_state(results, state_offsets, o_base, row, stride_o, rows_left, FIRST, kind)  # noqa: E741
    q_pointers = row_pointers(head_of(q, batch, head), row, q.row, kind.BLOCK_M, kind.BLOCK_D)
    q_tile = load_rows(q_pointers, rows_left, kind.LOADED, kind.BLOCK_M, kind.BLOCK_D)
    slope = slope_of(scores, batch, head, kind.ALIBI)
    queries = position + rows[:, None]
    bounds = bounds_of(visible, batch, row, rows, rows < rows_left, kind.MASK)
    acc, m, l = _attend(  # noqa: E741
        acc, m, l, q_tile, k, v, k_descriptor, v_descriptor, queries, bounds, schedule, visible, scores, slope, seed,
        batch, head, tile, nchunks, False, kind,
    )  # fmt: skip
    # 0 * NaN of a masked key may have spoiled acc. The tile is then computed again with ISOLATE: finite inputs pay for
    # this check alone. FULL hides no key.
    if kind.MASK != FULL and has_not_finite(acc):
        acc, m, l = _initial_state(results, state_offsets, o_base, row, stride_o, rows_left, FIRST, kind)  # noqa: E741
        acc, m, l = _attend(  # noqa: E741
            acc, m, l, q_tile, k, v, k_descriptor, v_descriptor, queries, bounds, schedule, visible, scores, slope,
            seed, batch, head, tile, nchunks, True, kind,
        )  # fmt: skip

    if LAST:
        fully_masked = l == 0.0
        # A sink is one more key, without a value. It counts once: at the last hop. Fully masked rows do not see it.
        if kind.SINKS:
            sink = tl.load(scores.sinks + head) * 1.4426950408889634  # log2(e)
            shift = tl.maximum(m, sink)
            shift = tl.where(shift == float("-inf"), 0.0, shift)
            rescale = tl.exp2(m - shift)
            l = l * rescale + tl.exp2(sink - shift)  # noqa: E741
            acc = acc * rescale[:, None]
            m = shift
        divisor = tl.where(fully_masked, 1.0, l)
        acc = acc / divisor[:, None]
        lse = lse_of(m, tl.log2(divisor), results.lse)
        tl.store(results.lse + state_offsets, tl.where(fully_masked, float("-inf"), lse), mask=rows < rows_left)
        target = results.out
    else:
        tl.store(results.m + state_offsets, m, mask=rows < rows_left)
        tl.store(results.l + state_offsets, l, mask=rows < rows_left)
        target = results.o
    pointers = row_pointers(target + o_base, row, stride_o, kind.BLOCK_M, kind.BLOCK_DV)
    store_rows(pointers, acc, rows_left, kind.HEADDIM_V, kind.BLOCK_M, kind.BLOCK_DV)


_launches = Launches()


def forward(given: ForwardArguments) -> None:
    """Launches one hop; see `Backend.forward`."""
    q, k, v, problem, state, out, lse, first, last = given
    carried = () if state is None else (state.m, state.l, state.o)
    tensors = (q, k, v, out, lse, *carried, *problem.score_config.tensors)
    # The key stands for all arguments except addresses. It is None if the launch cannot be repeated, as with dropout.
    key = problem.launch_key(first, last, state is None, lse.dtype, *layout(q, k, v))
    if _launches.repeat(key, tensors):
        return
    batch, seqlen_q, nheads, _ = q.shape
    config = forward_config(call_of(q, v, problem))
    # `programs` is not compiled code: its tables give the tile of each program, and the keys that this tile processes.
    programs, schedule, visible = launch_tables(problem, config, q.device, by_keys=False)
    accelerated, streams, descriptors = streamed((k, v), config.block_n, config, programs)
    # The kernel needs a tensor for each pointer. lse replaces absent slopes and sinks; lse and out replace the state of
    # a hop that is first and last. The kernel does not read them.
    scores, seed = scores_argument(problem.score_config, lse)
    m, l, o = carried or (lse, lse, out)  # noqa: E741
    kind = kind_argument(problem.score_config, programs, accelerated, q, k, v, config)
    # `operand` and `streamed` copy 16-bit tensors that a kernel cannot load as whole vectors. A launch that reads a
    # copy is not repeated, because a later call needs its own copy.
    arguments = (
        operand(q), *streams, *descriptors, Results(m, l, o, out, lse), schedule, visible, scores,
        programs.ntiles, programs.nchunks, seqlen_q, nheads, *seed, first, last, kind,
    )  # fmt: skip
    grid = (programs.ntiles * batch * nheads,)
    _launches.first(key, _forward_kernel, grid, arguments, config.launch, tensors, (schedule, visible))
