"""Every pair of widths and every row stride, in the Triton and Hopper kernels, against float64.

Compilers lay out tiles of narrow, unequal and unaligned rows differently from the usual tiles. Cases are drawn with
their number as the seed. The named cases were wrong with some compiler. Without a GPU, Triton's interpreter runs a few
of the cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.helpers.strategies import block_sparse
from tests.kernels.backends import GPU_BACKENDS
from tests.ops.test_decode import FIVE, NINE, Decoding, assert_decoded

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROUNDING = 16.0  # as in triton/test_backend.py
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


@dataclass(frozen=True)
class Rows:
    """Layout of a head's rows in memory: `before` unused numbers precede each row, and `after` follow it."""

    before: int = 0
    after: int = 0

    def of(self, x: Tensor) -> Tensor:
        """Returns a view with the values of `x` inside rows that hold NaN elsewhere."""
        width = x.shape[-1]
        storage = torch.full((*x.shape[:-1], self.before + width + self.after), math.nan, dtype=x.dtype)
        view = storage.to(x.device)[..., self.before : self.before + width]
        return view.copy_(x)


TIGHT = Rows()


@dataclass(frozen=True, eq=False)
class Case:
    """One problem of attention.

    Args:
        name: name of the test.
        headdims: headdim of q and k, and headdim of v.
        rows: memory layouts of q, k, v and dout.
        rest: further arguments for `Problem.random`.
        world: number of virtual ranks; 1 is flash_attention.
        deterministic: the option of attention.
    """

    name: str
    headdims: tuple[int, int]
    dtype: torch.dtype = BF16
    rows: tuple[Rows, Rows, Rows, Rows] = (TIGHT, TIGHT, TIGHT, TIGHT)
    rest: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    deterministic: bool = False

    def run(self, backend: str) -> None:
        """Compares out and each gradient with float64."""
        given = {"seqlen": 200, "batch": 1, "heads": (2, 1), "mask": rf.Causal(), **self.rest}
        problem = Problem.random(headdim=self.headdims, dtype=self.dtype, device=DEVICE, **given)
        q, k, v, dout = (
            rows.of(x) for rows, x in zip(self.rows, (problem.q, problem.k, problem.v, problem.dout), strict=True)
        )
        problem = replace(problem, q=q, k=k, v=v, dout=dout)
        options = {"backend": backend, "deterministic": self.deterministic}
        if self.world == 1:
            got = problem.flash(**options)
        else:
            got = problem.ring(rf.ContextParallel.local(self.world, "contiguous"), **options)
        assert_accurate(got, problem, rounding=ROUNDING)


@dataclass(frozen=True, eq=False)
class DecodeCase:
    """One problem of decoding.

    Args:
        name: name of the test.
        headdims: headdim of q and k, and headdim of v.
        rows: memory layouts of q, k and v.
        rest: further arguments for `Decoding.random`.
        cut: number of keys of each sequence on each virtual rank, for a sharded cache.
        capacity: capacity of each rank's cache, in keys.
        heads_first: whether heads come before rows in memory.
        options: options of the call.
    """

    name: str
    headdims: tuple[int, int]
    dtype: torch.dtype = BF16
    rows: tuple[Rows, Rows, Rows] = (TIGHT, TIGHT, TIGHT)
    rest: dict[str, Any] = field(default_factory=dict)
    cut: Sequence[Sequence[int]] = ()
    capacity: int = 128
    heads_first: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: str) -> None:
        """Compares out and lse with float64."""
        whole = Decoding.random(headdims=self.headdims, dtype=self.dtype, device=DEVICE, **self.rest)
        given, options = whole, {"backend": backend, **self.options}
        if self.cut:
            given = _sharded(whole, self.cut, self.capacity)
            options["context"] = rf.ContextParallel.local(len(self.cut))
        q, k, v = (
            rows.of(_heads_first(x) if self.heads_first else x)
            for rows, x in zip(self.rows, (given.q, given.k, given.v), strict=True)
        )
        if self.heads_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        assert_decoded(replace(given, q=q, k=k, v=v).decode(**options), whole, rounding=ROUNDING)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _sharded(whole: Decoding, cut: Sequence[Sequence[int]], capacity: int) -> Decoding:
    """Returns `whole` with its cache cut over ranks; each rank's keys are contiguous, with NaN up to its capacity."""
    batch, _, *heads = whole.k.shape
    caches = []
    for x in (whole.k, whole.v):
        cache = x.new_full((batch, len(cut) * capacity, heads[0], x.shape[3]), math.nan)
        for b in range(batch):
            parts = x[b].split([*(of_rank[b] for of_rank in cut), x.shape[1] - sum(of_rank[b] for of_rank in cut)])
            for rank, part in enumerate(parts[:-1]):
                cache[b, rank * capacity : rank * capacity + len(part)] = part
        caches.append(cache)
    lengths = torch.tensor(cut, dtype=torch.int32, device=whole.q.device)
    return replace(whole, k=caches[0], v=caches[1], lengths=lengths)


def _rows_of_v(before: int, after: int) -> tuple[Rows, Rows, Rows, Rows]:
    return TIGHT, TIGHT, Rows(before, after), TIGHT


NAMED = [
    *(Case(f"{d}/{dv}", (d, dv)) for d, dv in ((40, 24), (56, 24), (59, 24), (111, 24))),
    *(Case(f"{d}/24-fp16", (d, 24), FP16) for d in (40, 56, 59, 111)),
    *(Case(f"{d}/24-fp32", (d, 24), FP32) for d in (40, 111)),
    Case("24/16-v-in-rows-of-24", (24, 16), rows=_rows_of_v(0, 8), rest={"heads": (1, 1)}),
    Case("24/16-v-in-rows-of-25", (24, 16), rows=_rows_of_v(0, 9), rest={"heads": (1, 1)}),
    Case("24/16-v-in-rows-of-24-fp16", (24, 16), FP16, rows=_rows_of_v(0, 8), rest={"heads": (1, 1)}),
    Case("40/24-v-in-rows-of-25", (40, 24), rows=_rows_of_v(0, 1)),
    Case("40/24-v-in-rows-of-32", (40, 24), rows=_rows_of_v(0, 8)),
    Case("40/24-v-at-an-odd-address", (40, 24), rows=_rows_of_v(1, 7)),
    Case("24/16-sinks", (24, 16), rest={"sinks": True}),
    Case("128/24-alibi", (128, 24), rest={"alibi": 1}),
    Case("192/24-alibi", (192, 24), rest={"alibi": 1}),
    Case("111/24-documents-alibi", (111, 24), rest={"alibi": 1, "mask": rf.Causal() & rf.Documents([0, 77, 130, 200])}),
    Case("111/24-whole-documents-alibi", (111, 24), rest={"alibi": 1, "mask": rf.Documents([0, 77, 130, 200])}),
    Case("40/24-ring", (40, 24), world=2),
    Case("40/24-deterministic", (40, 24), deterministic=True),
]

CUT = ((1, 1, 0), (33, 0, 1), (128, 128, 1), (0, 1, 6))
SHARDED = {
    "rest": {"seqlen_q": 44, "capacity": 162, "lengths": (162, 130, 8), "softcap": 5.0, "heads": (4, 2)},
    "cut": CUT,
    "options": {"splits": 3, "newest_rank": 1},
}
NAMED_DECODE = [
    DecodeCase("40/16-sharded-heads-first", (40, 16), FP16, heads_first=True, **SHARDED),
    DecodeCase("40/16-sharded-in-odd-rows", (40, 16), FP16, rows=(Rows(0, 1), Rows(0, 3), Rows(1, 0)), **SHARDED),
    DecodeCase("40/16-odd-rows", (40, 16), FP16, rows=(Rows(0, 1), Rows(0, 3), Rows(1, 0)), rest={"heads": (2, 1)}),
    DecodeCase("40/16-sharded-in-wider-rows", (40, 16), FP16, rows=(Rows(0, 8), Rows(0, 8), Rows(8, 16)), **SHARDED),
    DecodeCase("40/16-sharded", (40, 16), FP16, **SHARDED),
    DecodeCase("40/16-sharded-bf16", (40, 16), BF16, heads_first=True, **SHARDED),
]

N_EQUAL, N_UNEQUAL, N_DECODE = 60, 110, 50
# Another seed for three draws in which even exact kernels miss the bar of the ratio. There plain attention's error is
# too small, or the final rounding is too large a part of both errors. On an H200 all backends had dq 0.00223 of
# 0.00222, dv 0.0213 of 0.0191, and out 8.1e-5 of 7.8e-5.
RESEEDED = {7: 1007, 38: 1038, 193: 1193}
STRIDES = (TIGHT, TIGHT, Rows(0, 8), Rows(8, 0), Rows(0, 1), Rows(1, 2), Rows(0, 40), Rows(3, 4))


def _width(draw: Random) -> int:
    return draw.randrange(16, 257, 8) if draw.random() < 0.6 else draw.randrange(16, 257)


def _mask(draw: Random, seqlen: int, batch: int) -> Mask | None:
    ends = sorted(draw.randrange(seqlen + 1) for _ in range(3))
    lengths = [draw.randrange(seqlen // 2, seqlen + 1) for _ in range(batch)]
    choices: list[Mask | None] = [
        None,
        rf.Causal(),
        rf.Causal(),
        rf.SlidingWindow(draw.randrange(8, seqlen), draw.randrange(40)),
        rf.Causal() & rf.Documents([0, *ends, seqlen]),
        rf.Documents([0, *ends, seqlen]),
        rf.KeyPadding(lengths),
        rf.PrefixLM(lengths),
        block_sparse(seqlen, draw.choice([16, 32, 64]), seed=draw.randrange(2**16), density=0.5),
        rf.Causal() & rf.Tree(NINE, start=seqlen // 2),
    ]
    return draw.choice(choices)


def _modes(draw: Random) -> dict[str, Any]:
    dropout = rf.Dropout(0.25, seed=draw.randrange(2**62))
    return draw.choice(
        [
            {},
            {},
            {"softcap": 5.0},
            {"alibi": 1},
            {"alibi": 2},
            {"sinks": True},
            {"dropout": dropout},
            {"softcap": 5.0, "alibi": 1, "sinks": True, "dropout": dropout},
        ]
    )


def _drawn(number: int, equal: bool) -> Case:
    """Draws a case. With `equal`, the Hopper kernels accept its widths and dtype, and sinks are its only mode."""
    draw = Random(RESEEDED.get(number, number))
    if equal:
        width = draw.randrange(16, 257, 8)
        headdims, modes, dtype = (
            (width, width),
            {"sinks": True} if draw.random() < 0.2 else {},
            draw.choice([BF16, FP16]),
        )
    else:
        headdims, modes, dtype = (_width(draw), _width(draw)), _modes(draw), draw.choice([BF16, BF16, FP16, FP32])
    seqlen, batch = draw.choice([150, 200, 261]), 2
    mask = _mask(draw, seqlen, batch)
    rows = tuple(draw.choice(STRIDES) for _ in range(4)) if draw.random() < 0.6 else (TIGHT,) * 4
    heads = (8, 2) if "sinks" in modes else draw.choice([(2, 1), (3, 3), (4, 2)])  # dsinks has one number per head
    rest = {"seqlen": seqlen, "batch": batch, "heads": heads, "mask": mask, **modes}
    world, deterministic = draw.choice([1, 1, 1, 1, 2]), draw.random() < 0.3
    name = f"{number}-{headdims[0]}/{headdims[1]}-{SHORT[dtype]}"
    q, k, v, dout = rows
    return Case(name, headdims, dtype, (q, k, v, dout), {**rest, "seed": number}, world, deterministic)


def _drawn_decode(number: int) -> DecodeCase:
    draw = Random(RESEEDED.get(number, number))
    headdims = (_width(draw), _width(draw))
    seqlen_q, mask = draw.choice(
        [
            (1, None),
            (1, rf.Causal()),
            (5, rf.Causal()),
            (5, rf.Tree(FIVE)),
            (9, rf.Tree(NINE) & rf.SlidingWindow(40, None)),
            (16, rf.SlidingWindow(90, 0)),
            (33, None),
        ]
    )
    capacity, dtype = draw.choice([130, 203, 300]), draw.choice([BF16, FP16, FP32])
    lengths, heads = (capacity, draw.randrange(seqlen_q, capacity), seqlen_q), draw.choice([(4, 4), (4, 2), (8, 2)])
    sinks = torch.linspace(-2.0, 3.0, heads[0], device=DEVICE)
    slopes = 0.5 ** torch.arange(1.0, heads[0] + 1, device=DEVICE)
    modes = draw.choice([{}, {"softcap": 5.0}, {"sinks": sinks}, {"alibi_slopes": slopes}])
    q, k, v = (draw.choice(STRIDES) for _ in range(3))
    rest = {"seqlen_q": seqlen_q, "mask": mask, "capacity": capacity, "lengths": lengths, "heads": heads, **modes}
    name = f"{number}-{headdims[0]}/{headdims[1]}-{SHORT[dtype]}"
    heads_first, options = draw.random() < 0.3, {"splits": draw.choice([1, 3])}
    return DecodeCase(name, headdims, dtype, (q, k, v), rest, heads_first=heads_first, options=options)


EQUAL = [_drawn(number, equal=True) for number in range(N_EQUAL)] if GPU else [Case("40/40-fp16", (40, 40), FP16)]
UNEQUAL = [_drawn(N_EQUAL + number, equal=False) for number in range(N_UNEQUAL)] if GPU else []
DECODE = [_drawn_decode(N_EQUAL + N_UNEQUAL + number) for number in range(N_DECODE)] if GPU else []
# Named cases for the interpreter, which takes about a second for each and does not support bfloat16.
INTERPRETED = ("40/24-fp16", "111/24-fp32", "24/16-v-in-rows-of-24-fp16", "40/16-odd-rows")


def _kept(cases: list[Any]) -> list[Any]:
    return [case for case in cases if GPU or case.name in INTERPRETED]


@pytest.mark.parametrize("case", _kept(NAMED) + UNEQUAL, ids=lambda case: case.name)
def test_unequal_widths_and_strides(case: Case) -> None:
    case.run("triton")


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("case", EQUAL, ids=lambda case: case.name)
def test_equal_widths(case: Case, backend: str) -> None:
    case.run(backend)


@pytest.mark.parametrize("case", _kept(NAMED_DECODE) + DECODE, ids=lambda case: case.name)
def test_decoding(case: DecodeCase) -> None:
    case.run("triton")
