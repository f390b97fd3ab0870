"""Decoding in Triton: the keys of a sequence are cut into parts that run side by side, and the parts are merged.

Shapes: q (batch, seqlen_q, nheads, headdim); k (batch, capacity, nheads_kv, headdim); v (batch, capacity, nheads_kv,
headdim_v); lengths (batch,). Every pair of a query and one of the query heads that share a KV head is a row. A tile
has BLOCK_M such rows, so KV is read once for all of them. A program owns a tile, a KV head and a part of the keys.

The length of each sequence is read on the device and cut into equal parts. A short sequence in a large cache therefore
spreads over as many programs as a long one. No part is empty just because the cache is larger than the sequence.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import triton
import triton.language as tl
from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.decode_step import Partials, Step
from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED, padded_headdim, processors
from ringflash.kernels.triton.decode_config import ROWS_WITHOUT_WGMMA, DecodeConfig, decode_config, splits_for
from ringflash.kernels.triton.decode_merge import Target, last_touch, merge, target_of
from ringflash.kernels.triton.isolation import finite_or_zero, has_not_finite, nan_where_not_finite
from ringflash.kernels.triton.scores import tanh
from ringflash.kernels.triton.tiles import head_of, load_rows, loads_vectors, row_pointers, strided, wide
from ringflash.state import LN2, contiguous

# Numbers that change from call to call: Triton does not compile the kernel again for their multiples of 16.
_SIZES = ["row_tiles", "splits", "capacity", "seqlen_q", "nheads", "nheads_kv", "left", "right"]


class Part(NamedTuple):
    """The keys [begin, stop) of a program, and the numbers of its rows that the mask and ALiBi use."""

    begin: Any
    stop: Any
    before: Any
    position: Any
    lo: Any
    hi: Any
    word: Any
    slope: Any


@triton.jit
def _over_keys(
    q_tile,
    k,
    v,
    k_base,
    v_base,
    part,
    before_tanh,
    to_base2,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADDIM: tl.constexpr,
    HEADDIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ISOLATE: tl.constexpr,
):
    """Returns the state (acc, m, l) of a tile of rows over the keys of a `Part`; `isolation.py` explains `ISOLATE`."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for n in tl.range(part.begin, part.stop, BLOCK_N, num_stages=1 if ISOLATE else None):
        rows_left = part.stop - n
        k_tile = load_rows(row_pointers(k_base, n, k.row, BLOCK_N, BLOCK_D), rows_left, HEADDIM, BLOCK_N, BLOCK_D)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if SOFTCAP:
            s = tanh(s * before_tanh)
        s *= to_base2
        key = (n + tl.arange(0, BLOCK_N))[None, :]
        visible = key < part.stop
        if ALIBI:
            s -= part.slope[:, None] * tl.abs(part.position[:, None] - key).to(tl.float32)
        if MASK >= 1:
            visible &= (key >= part.lo[:, None]) & (key <= part.hi[:, None])
        if MASK == 2:
            token = key - part.before
            bits = part.word[:, None] >> tl.minimum(tl.maximum(token, 0), 63).to(tl.int64)
            visible &= (token < 0) | ((bits & 1) != 0)
        if ISOLATE:
            v_tile = load_rows(
                row_pointers(v_base, n, v.row, BLOCK_N, BLOCK_DV), rows_left, HEADDIM_V, BLOCK_N, BLOCK_DV
            )
            s += nan_where_not_finite(tl.zeros([BLOCK_N], tl.float32), v_tile)[None, :]
            v_tile = finite_or_zero(v_tile)
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf minus -inf would be NaN
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(m - shift)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        acc = acc * rescale[:, None]
        if not ISOLATE:
            v_tile = load_rows(
                row_pointers(v_base, n, v.row, BLOCK_N, BLOCK_DV), rows_left, HEADDIM_V, BLOCK_N, BLOCK_DV
            )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=_SIZES)
def _decode_kernel(
    q,
    k,
    v,
    lengths,
    tree,
    slopes,
    slopes_batch,
    sinks,
    target,
    row_tiles,
    splits,
    capacity,
    seqlen_q,
    nheads,
    nheads_kv,
    left,
    right,
    before_tanh,
    to_base2,
    ln2,
    FINAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADDIM: tl.constexpr,
    HEADDIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes one tile's state, or with FINAL out and lse, over one part of the keys.

    MASK is 0 if all rows see the same keys, 1 for intervals, 2 for intervals and a tree.
    """
    # Neighbouring programs read the same keys, which are then in L2, or those of the next head, adjacent in memory.
    program = tl.program_id(0)
    row_tile = program % row_tiles
    head_kv = (program // row_tiles % nheads_kv).to(tl.int64)
    batch_split = program // (row_tiles * nheads_kv)
    split = batch_split % splits
    batch = (batch_split // splits).to(tl.int64)
    group = nheads // nheads_kv

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    last_row = tl.minimum(row_tile * BLOCK_M + BLOCK_M, seqlen_q * group) - 1
    inside = row <= last_row
    query = row // group
    head = head_kv * group + row % group

    length = tl.minimum(tl.maximum(tl.load(lengths + batch), 0), capacity).to(tl.int32)
    before = length - seqlen_q  # number of keys before the queries' own keys
    begin = tl.maximum(before + row_tile * BLOCK_M // group - left, 0)
    end = tl.minimum(before + last_row // group + right + 1, length)
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    stop = tl.minimum(begin + tiles * (split + 1) // splits * BLOCK_N, end)
    begin += tiles * split // splits * BLOCK_N

    position = before + query
    lo = position - left
    hi = position + right
    word = position.to(tl.int64)
    if MASK == 2:
        word = tl.load(tree + query, mask=inside, other=0)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + batch * slopes_batch + head, mask=inside, other=0.0) * 1.4426950408889634

    dims = tl.arange(0, BLOCK_D)[None, :]
    q_pointers = q.base + batch * q.batch + tl.expand_dims(query.to(tl.int64) * q.row + head * q.head, 1) + dims
    q_tile = tl.load(q_pointers, mask=inside[:, None] & (dims < HEADDIM), other=0.0)
    k_base = head_of(k, batch, head_kv)
    v_base = head_of(v, batch, head_kv)
    part = Part(begin, stop, before, position, lo, hi, word, slope)
    acc, m, l = _over_keys(  # noqa: E741
        q_tile, k, v, k_base, v_base, part, before_tanh, to_base2, MASK, SOFTCAP, ALIBI, PRECISION,
        HEADDIM, HEADDIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False,
    )  # fmt: skip
    if MASK >= 1 and has_not_finite(acc):
        acc, m, l = _over_keys(  # noqa: E741
            q_tile, k, v, k_base, v_base, part, before_tanh, to_base2, MASK, SOFTCAP, ALIBI, PRECISION,
            HEADDIM, HEADDIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True,
        )  # fmt: skip

    number = (batch * nheads + head) * seqlen_q + query
    o_row = (batch * seqlen_q + query) * nheads + head
    if FINAL:
        weight, divisor, lse = last_touch(m, l, sinks, head, inside, SINKS)
        acc = acc * weight[:, None] / divisor[:, None]
        tl.store(target.m + number, lse * ln2, mask=inside)
    else:
        number += wide(split) * target.stride
        tl.store(target.m + number, m, mask=inside)
        tl.store(target.l + number, l, mask=inside)
    dims_v = tl.arange(0, BLOCK_DV)[None, :]
    o_pointers = target.o + wide(split) * target.stride + o_row[:, None] * HEADDIM_V + dims_v
    tl.store(o_pointers, acc.to(target.o.dtype.element_ty), mask=inside[:, None] & (dims_v < HEADDIM_V))


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Returns out (batch, seqlen_q, nheads, headdim_v), lse (batch, nheads, seqlen_q) over the first `lengths` keys."""
    splits = splits_of(q, k, v, step)
    out, lse = _results(q, v.shape[3], q.dtype)
    if splits > 1:
        parts = Partials.allocate(splits, q, v.shape[3], torch.float32)
        source = target_of(parts)
        _launch(q, k, v, lengths, step, splits, source, final=False)
        merge(parts, source, Target(out, lse, lse, 0), step.score_config, final=True, key=step.launch_key(splits))
        return out, lse
    _launch(q, k, v, lengths, step, 1, Target(out, lse, lse, 0), final=True)
    return out, lse


def partial(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step) -> Partials:
    """Returns one state over the first `lengths` keys, without sinks."""
    parts = _parts(q, k, v, lengths, step, splits_of(q, k, v, step))
    if parts.count == 1:
        return parts
    merged = Partials.allocate(1, q, v.shape[3], torch.float32)
    merge(parts, target_of(parts), target_of(merged), step.score_config, final=False)
    return merged


def combine(partials: Partials, score_config: ScoreConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns out in `dtype` and lse over the keys of all states."""
    shape = (partials.batch, partials.seqlen_q, partials.nheads)
    out, lse = _results(partials.storage.new_empty((*shape, 0)), partials.headdim_v, dtype)
    merge(partials, target_of(partials), Target(out, lse, lse, 0), score_config, final=True)
    return out, lse


def _results(q: Tensor, headdim_v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, nheads, _ = q.shape
    lse = q.new_empty_strided(*contiguous((batch, nheads, seqlen_q)), dtype=torch.float32)
    return q.new_empty_strided(*contiguous((batch, seqlen_q, nheads, headdim_v)), dtype=dtype), lse


def _parts(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step, splits: int) -> Partials:
    parts = Partials.allocate(splits, q, v.shape[3], torch.float32)
    _launch(q, k, v, lengths, step, splits, target_of(parts), final=False)
    return parts


def splits_of(q: Tensor, k: Tensor, v: Tensor, step: Step) -> int:
    """Returns the number of parts into which each sequence's keys are cut."""
    if step.splits is not None:
        return step.splits
    batch, seqlen_q, nheads, _ = q.shape
    capacity, nheads_kv = k.shape[1:3]
    config, rows = _config(q, k, v, step), seqlen_q * (nheads // nheads_kv)
    keys, processor_count = min(capacity, step.sight.left + seqlen_q), processors(q.device)
    return _splits_of(config, batch * nheads_kv, rows, keys, processor_count)


@lru_cache(maxsize=1024)
def _splits_of(config: DecodeConfig, heads: int, rows: int, keys: int, processor_count: int) -> int:
    programs = heads * triton.cdiv(rows, config.block_m(rows))
    return splits_for(programs, keys, processor_count * config.resident(rows))


def _config(q: Tensor, k: Tensor, v: Tensor, step: Step) -> DecodeConfig:
    """Returns the tiles of a step, with few rows if 16-bit operands of matmuls are loaded number by number.

    Tiles of 64 rows would then use WGMMA, which ptxas 12.8 compiles wrong for some widths; see `tiles.operand`. A cache
    is too large to copy to aligned rows at each step.
    """
    config = decode_config(q.shape[3], v.shape[3], q.dtype, step.tiles)
    if q.itemsize == 2 and not all(map(loads_vectors, (q, k, v))):
        config = replace(config, max_rows=min(config.max_rows, ROWS_WITHOUT_WGMMA))
    return config


@device_tables(maxsize=1024)
def _tree_words(words: tuple[int, ...], device: torch.device) -> Tensor:
    return uploaded([np.array(words, np.int64)], device, torch.int64)[0]


_launches = Launches()


def _launch(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: Step, splits: int, target: Target, *, final: bool
) -> None:
    score_config, sight = step.score_config, step.sight
    tensors = (q, k, v, lengths, target.o, target.m, *(() if final else (target.l,)), *score_config.tensors)
    key = step.launch_key(splits, final, lengths.dtype, *layout(q, k, v))
    if _launches.repeat(key, tensors):
        return
    batch, seqlen_q, nheads, headdim = q.shape
    capacity, nheads_kv = k.shape[1:3]
    headdim_v = v.shape[3]
    config = _config(q, k, v, step)
    rows = seqlen_q * (nheads // nheads_kv)
    block_m = config.block_m(rows)
    row_tiles = triton.cdiv(rows, block_m)
    slopes, sinks = score_config.alibi_slopes, score_config.sinks
    tree = _tree_words(sight.tree, q.device) if sight.tree else lengths
    arguments = (
        strided(q), strided(k), strided(v), lengths, tree,
        lengths if slopes is None else slopes, 0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
        lengths if sinks is None else sinks,
        target, row_tiles, splits, capacity, seqlen_q, nheads, nheads_kv, sight.left, sight.right,
        score_config.before_tanh, score_config.to_base2, LN2,
        final, 0 if sight.is_uniform(seqlen_q, capacity) else 2 if sight.tree else 1,
        score_config.softcap > 0, slopes is not None, sinks is not None and final,
        config.precision, headdim, headdim_v,
        padded_headdim(headdim), padded_headdim(headdim_v), block_m, config.tiles.block_n,
    )  # fmt: skip
    options = {"num_warps": config.tiles.num_warps, "num_stages": config.tiles.num_stages, **FUSED}
    grid = (batch * nheads_kv * splits * row_tiles,)
    _launches.first(key, _decode_kernel, grid, arguments, options, tensors, (tree,) if sight.tree else ())
