"""Memory check of one long forward and backward against an allowance.

The allowance covers the inputs, the results, one float32 dQ and O(N) statistics.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ringflash.bench.attention.single import ours
from ringflash.bench.common.problem import Problem
from ringflash.errors import ArgumentError

STATISTICS = 4  # float32 numbers a row and query head: lse and delta, and both in the form of the Hopper kernels
BOUNDS = 4  # int32 numbers a row: bounds of the keys that a query sees, and of the queries that see a key
ROUNDING = 2**20  # bytes for tables of tiles and for the allocator's rounding
EXPECTED_TFLOPS = 300  # rate of forward and backward together, only for an estimate of the duration


def allowed_bytes(problem: Problem) -> dict[str, int]:
    """Returns the bytes that forward and backward may have allocated at once, by kind."""
    q, kv = problem.q.numel(), problem.k.numel()
    size = problem.q.element_size()
    rows = problem.q.shape[0] * problem.q.shape[1] * problem.q.shape[2]
    return {
        "inputs q, k, v, dout": (2 * q + 2 * kv) * size,
        "output out": q * size,
        "gradients dq, dk, dv": (q + 2 * kv) * size,
        "one float32 dQ": 4 * q,
        "lse and delta, float32": 4 * STATISTICS * rows,
        "bounds of rows, int32": 4 * BOUNDS * problem.q.shape[1],
    }


def check(seqlen: int, dtype: torch.dtype, *, nheads: int, nheads_kv: int, headdim: int) -> list[dict[str, Any]]:
    """Runs forward and backward once in each mode, prints the peak and the allowance, and returns a row for each mode.

    The key `within` of a row says whether the peak stayed within the allowance.

    Raises:
        ArgumentError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        remedy = "Run it where torch.cuda.is_available() is true."
        raise ArgumentError("--memory", expected="a CUDA device", got="none", remedy=remedy)
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    for deterministic in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        problem = Problem.random(seqlen, nheads, nheads_kv, headdim, device, dtype)
        allowed = allowed_bytes(problem)
        estimate = 3.5 * problem.forward_flops / EXPECTED_TFLOPS / 1e12
        mode = "deterministic" if deterministic else "fast"
        heads = f"{nheads}:{nheads_kv} heads of {headdim}"
        print(f"{mode}: {seqlen} tokens, {heads}, causal; about {estimate:.0f} s at {EXPECTED_TFLOPS} TFLOP/s")
        with ours(problem, deterministic=deterministic) as setup:
            begin = time.perf_counter()
            setup.forward_backward()
            torch.cuda.synchronize()
        taken = time.perf_counter() - begin
        peak, total = torch.cuda.max_memory_allocated() - before, sum(allowed.values())
        for what, size in allowed.items():
            print(f"  {what:<24}{size:>18,} bytes")
        print(f"  {'allowed':<24}{total:>18,} bytes = {total / 2**30:.3f} GiB, and {ROUNDING:,} for rounding")
        print(f"  {'peak':<24}{peak:>18,} bytes = {peak / 2**30:.3f} GiB, in {taken:.1f} s with compilation")
        within = peak <= total + ROUNDING
        print(f"  {'within' if within else 'ABOVE'} what is allowed", flush=True)
        shape = {"seqlen": seqlen, "nheads": nheads, "nheads_kv": nheads_kv, "headdim": headdim, "causal": True}
        figures = {"peak_bytes": peak, "allowed_bytes": total, "allowed": allowed, "within": within}
        rows.append({"name": f"ringflash {mode}", **shape, "dtype": str(dtype).removeprefix("torch."), **figures})
        del problem, setup
    return rows
