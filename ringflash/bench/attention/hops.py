"""The hop benchmark: the cost of the online-softmax state in a ring's hop, by the role of the hop.

    ringflash bench hops --json hops.json

A single hop ("only") keeps the online-softmax state in registers. With several hops, the first writes the state, the
middle ones read and write it, and the last reads it and writes out and lse. Here all four roles get the same keys, on
one device and without a transport. `cost`, the time over the time of "only", is therefore the cost of the state. Rounds
run all roles in a changing order. Figures are medians of the device's own times: see `timing`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash.bench.attention.tiles import HOPPER, auto_kernels
from ringflash.bench.common import timing
from ringflash.bench.common.problem import Problem, add_options, check_agreement, failure
from ringflash.bench.common.record import Run
from ringflash.bench.common.report import Column, heads, print_table
from ringflash.commands.options import DTYPES, Described, add_shared, check_at_least, parser_of
from ringflash.errors import ArgumentError
from ringflash.kernels.backend import Backend
from ringflash.kernels.contract import ForwardArguments, ScoreConfig, TileProblem
from ringflash.kernels.select import choose, kernels_of
from ringflash.layouts.layout import Chunk
from ringflash.masks import as_mask

WIDEST_STATE = 128
ROLES = {"only": (True, True), "first": (True, False), "middle": (False, False), "last": (False, True)}  # first, last
FULL = {"seqlens": [4096, 8192, 16384, 32768], "headdims": [64, 128], "nheads": 16, "tokens": 16384, "rounds": 7}
CPU = {"seqlens": [64, 128], "headdims": [32], "nheads": 2, "tokens": 128, "rounds": 2}  # shows that it runs


@dataclass(frozen=True, eq=False)
class Rank:
    """Inputs and results of the hops of one rank.

    Args:
        kernels: the backend that computes the hops.
        problem: q, k and v of the whole sequence.
        state: online-softmax state, passed from hop to hop.
        out: (batch, seqlen, nheads, headdim).
        lse: (batch, nheads, seqlen), float32.
    """

    kernels: Backend
    problem: Problem
    state: rf.AttentionState
    out: Tensor
    lse: Tensor

    @staticmethod
    def of(problem: Problem, kernels: Backend) -> Rank:
        """Returns a rank whose state, out and lse are not initialised."""
        q = problem.q
        dtype = kernels.state_dtype(q.dtype)
        state = rf.AttentionState.allocate(*q.shape, device=q.device, dtype=dtype)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return Rank(kernels, problem, state, torch.empty_like(q), lse)

    def hop(self, role: str, keys: Chunk) -> None:
        """Runs one hop of all queries with the chunk `keys`, in the given role."""
        given, (first, last) = self.problem, ROLES[role]
        mask = as_mask(rf.Causal() if given.causal else None)
        tile_problem = TileProblem((Chunk(0, given.seqlen),), (keys,), mask, ScoreConfig(given.q.shape[3] ** -0.5))
        k, v = (x[:, keys.start : keys.stop] for x in (given.k, given.v))
        state = None if first and last else self.state
        self.kernels.forward(ForwardArguments(given.q, k, v, tile_problem, state, self.out, self.lse, first, last))


def main(argv: Sequence[str]) -> int:
    """Measures every cell. Returns 1 if one failed, else 0."""
    run = Run.begin(_parser(), argv, FULL, CPU)
    _check(run.options, run.device)
    rows: list[dict[str, Any]] = []
    for headdim in run.options.headdims:
        for seqlen, causal in itertools.product(run.options.seqlens, (False, True)):
            rows.append(_measure(seqlen, headdim, causal, run.options, run.device))
            run.write(rows)
        _print([row for row in rows if row["headdim"] == headdim], run.device_name)
    return 1 if any("failed" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench hops", "Measures the forward of a hop by its role.")
    add_options(parser, FULL, "4096 to 32768, doubling")
    add_shared(parser, backend="auto", tokens=Described(str(FULL["tokens"])))
    return parser


def _check(options: argparse.Namespace, device: torch.device) -> None:
    """Raises ArgumentError for sizes too small for all hops, or if hops would mix two families of kernels."""
    check_at_least(options, ["seqlens"], 4)
    check_at_least(options, ["tokens", "rounds"])
    hopper = options.backend in ("auto", "hopper") and auto_kernels(device, DTYPES[options.dtype]) == HOPPER
    if hopper and max(options.headdims) > WIDEST_STATE:
        remedy = "The kernels for sm_90 carry no wider state; add --backend triton."
        raise ArgumentError("--headdims", expected=f"up to {WIDEST_STATE}", got=max(options.headdims), remedy=remedy)


def _measure(
    seqlen: int, headdim: int, causal: bool, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Measures one cell and returns its row."""
    batch = max(1, options.tokens // seqlen)
    sizes = {"seqlen": seqlen, "nheads": options.nheads, "nheads_kv": options.nheads_kv, "headdim": headdim}
    row: dict[str, Any] = {"mask": "causal" if causal else "full", "batch": batch, **sizes}
    row |= {"dtype": options.dtype, "backend": options.backend}
    try:
        problem = Problem.random(**sizes, device=device, dtype=DTYPES[options.dtype], batch=batch, causal=causal)
        expected = _attention(problem, options.backend)
        with kernels_of(problem.q):
            rank = Rank.of(problem, choose(options.backend, problem.q))
            _agree(rank, expected)
            del expected
            row |= _figures(rank, options.rounds)
    except ArgumentError:
        raise  # attention does not take the heads or the backend
    except Exception as error:  # for whatever reason a cell fails, its row reports it
        row["failed"] = failure(error)
    return row


def _attention(problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """Returns out and lse of `flash_attention`.

    Raises:
        ArgumentError: `flash_attention` does not take the heads or the backend.
    """
    mask = rf.Causal() if problem.causal else None
    options = rf.AttentionOptions(return_lse=True, backend=backend)
    out, lse = rf.flash_attention(problem.q, problem.k, problem.v, mask=mask, options=options)
    return out, lse


def _agree(rank: Rank, expected: tuple[Tensor, Tensor]) -> None:
    """Raises ValueError unless one hop over all keys, and three hops over parts of them, both give `expected`."""
    seqlen = rank.problem.seqlen
    quarter, half = seqlen // 4, seqlen // 2
    three = Chunk(0, quarter), Chunk(quarter, half - quarter), Chunk(half, seqlen - half)
    for roles, chunks in ((("only",), (Chunk(0, seqlen),)), (("first", "middle", "last"), three)):
        for role, keys in zip(roles, chunks, strict=True):
            rank.hop(role, keys)
        check_agreement(("out", "lse"), (rank.out, rank.lse), expected, f" of {', '.join(roles)}")


def _figures(rank: Rank, rounds: int) -> dict[str, float]:
    """Measures every role. Returns its launch in us, its median ms, and its cost relative to "only"."""
    calls = {name: partial(rank.hop, name, Chunk(0, rank.problem.seqlen)) for name in ROLES}
    sampler = timing.Sampler(rank.problem.q.is_cuda)
    for call in calls.values():
        call()
    for number in range(rounds):
        for name in timing.turns(list(ROLES), number):
            sampler.sample(name, calls[name])
    medians = sampler.medians()
    figures = {f"{name}_ms": round(medians[name] * 1e3, 4) for name in ROLES}
    figures |= {f"{name}_cost": round(medians[name] / medians["only"], 3) for name in ROLES}
    return sampler.launches() | figures


def _print(rows: Sequence[dict[str, Any]], device: str) -> None:
    first = rows[0]
    title = f"A hop's forward, {heads(first)}, {first['dtype']}, backend {first['backend']}, {device}"
    columns: list[Column] = [("seqlen", "seqlen", "d"), ("batch", "batch", "d"), ("mask", "mask", "")]
    columns.append(("only\nms", "only_ms", ".3f"))
    for role in list(ROLES)[1:]:
        columns += [(f"{role}\nms", f"{role}_ms", ".3f"), (f"{role}\ncost", f"{role}_cost", ".2f")]
    print_table(title, columns, rows, "seqlen {seqlen}, {mask}")
