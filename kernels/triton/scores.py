"""Scores and weights from q k^T on the device: softcap, ALiBi and dropout, in any orientation of the tile."""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

import triton
import triton.language as tl
from ringflash.dropout import threshold
from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.triton.config import TileConfig
from ringflash.kernels.triton.schedule import Programs
from ringflash.kernels.triton.tiles import Constexprs, loaded_width


class Scores(NamedTuple):
    """Kernel arguments of a `ScoreConfig`."""

    softmax_scale: Any
    before_tanh: Any
    to_base2: Any
    slopes: Any
    slopes_batch: Any
    sinks: Any
    threshold: Any
    kept_scale: Any
    first_head: Any


class Seed(NamedTuple):
    """A dropout seed as two int32 numbers."""

    low: Any
    high: Any


def scores_argument(score_config: ScoreConfig, unread: Tensor) -> tuple[Scores, Seed]:
    """Returns a `ScoreConfig` as kernel arguments; `unread` is any tensor, for pointers that the kernel never reads."""
    slopes, sinks, seed = score_config.alibi_slopes, score_config.sinks, score_config.dropout_seed
    scores = Scores(
        softmax_scale=score_config.softmax_scale,
        before_tanh=score_config.before_tanh,
        to_base2=score_config.to_base2,
        slopes=unread if slopes is None else slopes,
        slopes_batch=0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
        sinks=unread if sinks is None else sinks,
        threshold=threshold(score_config.dropout_p),
        kept_scale=score_config.kept_scale,
        first_head=score_config.first_head or None,  # None for 0: a number here costs some kernels registers
    )
    return scores, Seed(*(_signed(word & 0xFFFFFFFF) for word in (seed, seed >> 32)))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def kind_argument(
    score_config: ScoreConfig,
    programs: Programs,
    accelerated: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: TileConfig,
) -> Constexprs:
    """Returns the compile-time constants of a kernel."""
    values = Constexprs(
        MASK=programs.kind,
        SOFTCAP=score_config.softcap > 0,
        ALIBI=score_config.alibi_slopes is not None,
        SINKS=score_config.sinks is not None,
        DROPOUT=score_config.dropout_p > 0,
        GROUP=q.shape[2] // k.shape[2],
        EVEN=programs.even,
        ACCELERATED=accelerated,
        PRECISION=config.precision,
        HEADDIM=q.shape[3],
        HEADDIM_V=v.shape[3],
        LOADED=loaded_width(q.shape[3], q.itemsize),
        LOADED_V=loaded_width(v.shape[3], v.itemsize),
        BLOCK_D=config.block_d,
        BLOCK_DV=config.block_dv,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        WARPS=config.num_warps,
    )
    return Constexprs(*map(tl.constexpr, values))


@triton.jit
def slope_of(scores, batch, head, ALIBI: tl.constexpr):
    """Returns the head's ALiBi slope in base 2; 0 without ALiBi."""
    slope = 0.0
    if ALIBI:
        slope = tl.load(scores.slopes + batch * scores.slopes_batch + head) * 1.4426950408889634
    return slope


@triton.jit
def tanh(x):
    """Computes tanh to a few ulp from exp2 alone, with a series near 0, where 1 - e would cancel."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def apply_softcap(product, scores, SOFTCAP: tl.constexpr):
    """Returns tanh of the scaled product if there is a softcap, else the unchanged product."""
    if SOFTCAP:
        product = tanh(product * scores.before_tanh)
    return product


@triton.jit
def apply_alibi(product, queries, keys, scores, slope, ALIBI: tl.constexpr):
    """Returns (x, to_base2) so that x * to_base2 is the score in base 2; a later fma does that multiplication."""
    to_base2 = scores.to_base2
    if ALIBI:
        product = product * to_base2 - slope * tl.abs(queries - keys).to(tl.float32)
        to_base2 = 1.0
    return product, to_base2


@triton.jit
def keep_mask(queries, keys, batch, head, scores, seed):
    """Returns which weights of a tile dropout keeps, by the rule of `ringflash.dropout`."""
    queries, keys = tl.broadcast(queries, keys)
    c0 = (keys >> 2).to(tl.uint32)
    if scores.first_head is not None:
        head += scores.first_head
    c2 = tl.zeros_like(c0) + head.to(tl.uint32)
    c3 = tl.zeros_like(c0) + batch.to(tl.uint32)
    low, high = seed.low.to(tl.uint32), seed.high.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, queries.to(tl.uint32), c2, c3, low, high, 10)
    lane = keys & 3
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return (word >> 8).to(tl.int32) >= scores.threshold


@triton.jit
def lse_of(m, log_l, target):
    """Returns lse (natural logarithm) from a row's maximum and the log2 of its sum; float64 if `target` is."""
    if target.dtype.element_ty == tl.float64:
        lse = (m.to(tl.float64) + log_l.to(tl.float64)) * 0.6931471805599453
    else:
        lse = (m + log_l) * 0.6931471805599453
    return lse


@triton.jit
def split_lse(lse):
    """Returns lse in base 2 as float32, and the rounding error of a float64 lse, also float32 (0 for a float32 lse)."""
    exact = lse * 1.4426950408889634
    high = exact.to(tl.float32)
    low = tl.zeros_like(high)
    if lse.dtype == tl.float64:
        finite = tl.where(tl.abs(exact) == float("inf"), 0.0, exact)
        low = (finite - finite.to(tl.float32).to(tl.float64)).to(tl.float32)
    return high, low


@triton.jit
def load_lse(lse, number, inside):
    """Loads `split_lse`, with +inf for rows outside and fully masked rows, so their probabilities are exactly 0."""
    x = tl.load(lse + number, mask=inside, other=float("-inf"))
    high, low = split_lse(x)
    return tl.where(x == float("-inf"), float("inf"), high), low


@triton.jit
def load_columns(x, BLOCK: tl.constexpr, kind, COPIED: tl.constexpr):
    """Loads BLOCK numbers for the columns of a product.

    If there are fewer numbers than threads, each thread would load the number of each of its columns one by one: up to
    32 loads. With COPIED, the numbers are loaded in up to 8 copies, one number a thread, and all copies except one are
    dropped. The numbers then reach the layout of the columns through shared memory.
    """
    rows = tl.arange(0, BLOCK)
    if not COPIED:
        return tl.load(x + rows)
    COPIES: tl.constexpr = min(8, max(1, 32 * kind.WARPS // BLOCK))
    y = tl.load(x + (rows[None, :] + tl.zeros([COPIES, 1], tl.int32))).permute((1, 0))
    if COPIES == 8:
        y, _ = tl.split(y.reshape([BLOCK, 4, 2]))
    if COPIES >= 4:
        y, _ = tl.split(y.reshape([BLOCK, 2, 2]))
    if COPIES >= 2:
        y, _ = tl.split(y)
    return y.reshape([BLOCK])


@triton.jit
def weighed(p, dp, queries, keys, batch, head, scores, seed, DROPOUT: tl.constexpr):
    """Applies dropout to P, as it multiplies v, and to the gradient of P."""
    if DROPOUT:
        stays = keep_mask(queries, keys, batch, head, scores, seed)
        p = tl.where(stays, p * scores.kept_scale, 0.0)
        dp = tl.where(stays, dp * scores.kept_scale, 0.0)
    return p, dp
