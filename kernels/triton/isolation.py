"""Isolation in the Triton kernels: what storage holds at masked pairs changes no bit of a row's result.

A masked pair has weight 0, but 0 * NaN and 0 * Inf are NaN. So a matmul over a tile with masked pairs would pass a
NaN of one row on to rows that do not see it. Kernels compute as if all inputs were finite. If the result of a program
is not finite, the program computes its tile again (`ISOLATE`). In tiles that need a mask it then replaces elements that
are not finite by zeros. Rows and keys that do see such an element get NaN another way:

    forward     the score of a key is NaN if any of its values is not finite
    dq          lse or delta of a query is NaN if it sees a key or a value that is not finite
    dk, dv      lse of a query is set to NaN if its delta is not finite

All sums keep their order, so rows that see only finite elements get the same bits as without the others.
"""

# Triton's DSL is not Python to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_finite(x):
    """Returns which elements are neither NaN nor infinite."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def finite_or_zero(x):
    """Returns `x` with zeros in place of NaN and Inf."""
    return tl.where(is_finite(x), x, 0.0)


@triton.jit
def has_not_finite(x):
    """Returns whether any element of a tile (rows, columns) is NaN or infinite."""
    return tl.sum(tl.sum(x * 0.0, 1), 0) != 0.0  # NaN differs from 0


@triton.jit
def nan_where_not_finite(x, tile):
    """Returns `x` with NaN in each element for which the row of `tile` (rows, columns) is not finite."""
    return tl.where(tl.min(is_finite(tile).to(tl.int32), 1) != 0, x, float("nan"))
