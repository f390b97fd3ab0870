"""Tensor arguments, compile-time constants and row loads that the Triton kernels share."""

# Triton's DSL is not Python to a type checker: loops over tensors, constexpr arguments, launch options.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, contiguous_format
from torch.nn.functional import pad

import triton
import triton.language as tl
from ringflash.kernels import mask_tables
from ringflash.kernels.contract import TileProblem
from ringflash.kernels.mask_tables import has_short_spans
from ringflash.kernels.triton.config import Call, padded_headdim
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import
from triton.runtime import driver


class Strided(NamedTuple):
    """Pointer and strides of a tensor (batch, seqlen, nheads, headdim) with a consecutive last dimension."""

    base: Any
    batch: Any
    row: Any
    head: Any


# Values of MASK. Kernels can read only constexprs.
FULL, CAUSAL = tl.constexpr(mask_tables.FULL), tl.constexpr(mask_tables.CAUSAL)
TABLE, LISTED = tl.constexpr(mask_tables.TABLE), tl.constexpr(mask_tables.LISTED)

# These change from call to call. Triton would compile again for multiples of 16, as it does for a tuple's elements.
UNSPECIALIZED = ["ntiles", "seqlen_q", "seed_low", "seed_high"]


class Constexprs(NamedTuple):
    """Compile-time constants of a kernel, all constexpr."""

    MASK: Any
    SOFTCAP: Any
    ALIBI: Any
    SINKS: Any
    DROPOUT: Any
    GROUP: Any
    EVEN: Any
    ACCELERATED: Any
    PRECISION: Any
    HEADDIM: Any
    HEADDIM_V: Any
    LOADED: Any
    LOADED_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    WARPS: Any


def capability() -> int:
    """Returns the compute capability to compile for, such as 90; the interpreter uses the tiles of 90, the largest."""
    return 90 if knobs.runtime.interpret else driver.active.get_current_target().arch


def call_of(q: Tensor, v: Tensor, problem: TileProblem) -> Call:
    """Returns the properties of a call by which tile sizes are chosen."""
    ragged = any(chunk.length % 128 for chunk in (*problem.q_chunks, *problem.k_chunks))
    ragged |= any(padded_headdim(x.shape[3]) != x.shape[3] for x in (q, v))
    seqlen_k = sum(chunk.length for chunk in problem.k_chunks)
    return Call(
        headdim=q.shape[3],
        headdim_v=v.shape[3],
        dtype=q.dtype,
        seqlen_k=seqlen_k,
        capability=capability(),
        ragged=ragged,
        short_spans=has_short_spans(problem.mask),
        listed=problem.mask.bitmap() is not None,
        modes=problem.score_config.has_score_mods,
    )


def strided(x: Tensor) -> Strided:
    """Returns `x` as a kernel argument, copied only if its last dimension is not consecutive in memory."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Strided(x, *(stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride(), strict=False)))


VECTOR = 8  # 16-bit numbers that a thread loads at once: 16 bytes
HINT = 16  # Triton specializes a stride only on whether it is a multiple of this


def loads_vectors(x: Tensor) -> bool:
    """Returns whether Triton loads rows of 16-bit `x` as whole vectors, rather than number by number."""
    strides = (stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1)
    aligned = x.data_ptr() % (VECTOR * x.itemsize) == 0 and x.stride(-1) == 1
    return aligned and x.shape[3] % VECTOR == 0 and all(stride % HINT == 0 for stride in strides)


def operand(x: Tensor) -> Strided:
    """Returns `x` (batch, seqlen, nheads, headdim) as an argument from which a kernel loads tiles for matmuls.

    16-bit numbers that do not lie in rows of whole vectors are copied to such rows, padded with zeros. Loads number by
    number are several times slower, and ptxas 12.8 compiles some of them wrong for sm_90: the matmuls that follow then
    read shared memory through a uniform register that nothing has written.
    """
    if x.itemsize == 2 and not loads_vectors(x):
        headdim = x.shape[3]
        x = pad(x, (0, -headdim % HINT))[..., :headdim] if headdim % HINT else x.clone(memory_format=contiguous_format)
    return strided(x)


def loaded_width(headdim: int, itemsize: int) -> int:
    """Number of columns that a load of an `operand` covers: whole vectors of 16-bit numbers, padded with zeros."""
    return -(-headdim // VECTOR) * VECTOR if itemsize == 2 else headdim


@triton.jit
def wide(x):
    """Returns an integer from Python or the GPU as int64, because row * stride exceeds 2^31 in long sequences."""
    return tl.full([], 0, tl.int64) + x


@triton.jit
def head_of(x, batch, head):
    """Returns the pointer to the first row of one head; `batch` and `head` are int64."""
    return x.base + batch * x.batch + head * x.head


@triton.jit
def row_pointers(base, row, stride_row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns pointers to (BLOCK, BLOCK_D) elements from `row` on; only offsets within the tile fit int32."""
    rows = tl.arange(0, BLOCK)[:, None] * stride_row
    return base + wide(row) * stride_row + rows + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_where(pointers, inside, HEADDIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """Loads a tile of rows, with zeros past HEADDIM and in rows that are not `inside`; if EVEN, all rows are inside."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    if EVEN and HEADDIM == BLOCK_D:
        x = tl.load(pointers)
    elif EVEN:
        x = tl.load(pointers, mask=dims < HEADDIM, other=0.0)
    elif HEADDIM == BLOCK_D:
        x = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(pointers, mask=inside[:, None] & (dims < HEADDIM), other=0.0)
    return x


@triton.jit
def load_rows(pointers, rows_left, HEADDIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads a (BLOCK, BLOCK_D) tile, with zeros past `rows_left` rows and past HEADDIM."""
    return load_where(pointers, tl.arange(0, BLOCK) < rows_left, HEADDIM, BLOCK_D, False)


@triton.jit
def store_rows(pointers, x, rows_left, HEADDIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes a (BLOCK, BLOCK_D) tile, rounded to the target's dtype, without the rows past `rows_left`."""
    rows = tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=(rows < rows_left) & (dims < HEADDIM))
