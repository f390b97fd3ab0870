"""Merge of partial states in Triton, with the last steps: sinks, the division, lse.

A state is m, l (batch, nheads, seqlen_q) and O (batch, seqlen_q, nheads, headdim_v), float32, in base 2. A program owns
some columns of one row: m = max m_s, l = sum l_s 2^(m_s - m), O = sum O_s 2^(m_s - m).
"""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.decode_step import Partials
from ringflash.kernels.launch import Launches
from ringflash.kernels.triton.config import FUSED, padded_headdim
from ringflash.state import LN2


class Target(NamedTuple):
    """Targets of results: a state and the elements from one state to the next, or out and, in the place of m, lse."""

    o: Any
    m: Any
    l: Any  # noqa: E741 - the paper's name
    stride: Any


@triton.jit
def last_touch(m, l, sinks, head, inside, SINKS: tl.constexpr):  # noqa: E741
    """Returns the factor and the divisor of O, and lse in base 2, all after the sinks have taken their weight."""
    sink = m
    if SINKS:
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    top = tl.maximum(m, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(m - shift)
    total = l * weight
    if SINKS:
        total += tl.exp2(sink - shift)
    seen = l != 0.0  # a NaN sum counts as seen
    divisor = tl.where(seen, total, 1.0)
    return tl.where(seen, weight, 0.0), divisor, tl.where(seen, shift + tl.log2(divisor), float("-inf"))


@triton.jit(do_not_specialize=["count", "seqlen_q", "nheads"])
def _merge_kernel(
    source,
    target,
    sinks,
    count,
    seqlen_q,
    nheads,
    ln2,
    FINAL: tl.constexpr,
    SINKS: tl.constexpr,
    HEADDIM_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merges the `count` states of one row; sums are trees of a fixed shape, so repeats are bitwise equal."""
    o_row = tl.program_id(0).to(tl.int64)
    head = o_row % nheads
    query = o_row // nheads % seqlen_q
    number = (o_row // (nheads * seqlen_q) * nheads + head) * seqlen_q + query
    part = tl.arange(0, BLOCK_S)
    here = part < count
    offset = part.to(tl.int64) * source.stride
    m = tl.load(source.m + offset + number, mask=here, other=float("-inf"))
    l = tl.load(source.l + offset + number, mask=here, other=0.0)  # noqa: E741
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(l * weight, 0)

    dims = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    o_pointers = source.o + offset[:, None] + o_row * HEADDIM_V + dims[None, :]
    o = tl.load(o_pointers, mask=here[:, None] & (dims[None, :] < HEADDIM_V), other=0.0)
    acc = tl.sum(o * weight[:, None], 0)
    if FINAL:
        last_weight, divisor, top = last_touch(top, total, sinks, head, head >= 0, SINKS)
        acc = acc * last_weight / divisor
        top = top * ln2
    tl.store(target.o + o_row * HEADDIM_V + dims, acc.to(target.o.dtype.element_ty), mask=dims < HEADDIM_V)
    if tl.program_id(1) == 0:
        tl.store(target.m + number, top)
        if not FINAL:
            tl.store(target.l + number, total)


def target_of(partials: Partials) -> Target:
    """Returns the states as kernel arguments."""
    state = partials.stacked
    return Target(state.o, state.m, state.l, partials.storage.stride(0))


_launches = Launches()


def merge(
    partials: Partials,
    source: Target,
    target: Target,
    score_config: ScoreConfig,
    *,
    final: bool,
    key: Hashable = None,
) -> None:
    """Writes the merge of all states to `target`: a state, or out and lse when `final`.

    `source` is `target_of(partials)`. `key` stands for everything but addresses; None if the launch is not repeated.
    """
    sinks = score_config.sinks if final else None
    tensors = (source.o, source.m, source.l, target.o, target.m, *(() if final else (target.l,)))
    tensors += () if sinks is None else (sinks,)
    if _launches.repeat(key, tensors):
        return
    block_dv = min(64, padded_headdim(partials.headdim_v))
    rows = partials.batch * partials.seqlen_q * partials.nheads
    arguments = (
        source, target, source.o if sinks is None else sinks,
        partials.count, partials.seqlen_q, partials.nheads, LN2,
        final, sinks is not None, partials.headdim_v, max(2, triton.next_power_of_2(partials.count)), block_dv,
    )  # fmt: skip
    grid = (rows, triton.cdiv(partials.headdim_v, block_dv))
    _launches.first(key, _merge_kernel, grid, arguments, {"num_warps": 4, **FUSED}, tensors)
