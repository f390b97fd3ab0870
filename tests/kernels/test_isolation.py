"""Isolation of rows: masked keys, even NaN and Inf, change no bit of a row's result; a NaN in a visible key does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.masks import Mask, as_mask
from tests.helpers.accuracy import Problem
from tests.kernels.backends import DTYPE_OF, GPU_BACKENDS
from tests.ops.test_decode import FIVE, NINE, Decoding, visible

ISOLATING_BACKENDS = ["eager", *GPU_BACKENDS]

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy in the interpreter
GPU = torch.cuda.is_available()
SEQLEN, HEADS = 150, (2, 1)
AT = (40, 110)  # poisoned positions
NAN, INF = math.nan, math.inf


def _with_backends(values: Iterable[Any], interpreted: int) -> list[Any]:
    """Returns each value with each backend; the interpreter takes seconds a case and gets every `interpreted`-th."""
    values = list(values)
    few = values if GPU else values[::interpreted]
    return [
        pytest.param(value, backend, id=f"{value}-{backend}")
        for backend in ISOLATING_BACKENDS
        for value in (values if backend == "eager" else few)
    ]


def _positions(backend: str) -> tuple[int, ...]:
    return AT if GPU or backend == "eager" else AT[:1]


def _set(value: float, columns: slice = slice(None)) -> Callable[[Tensor], object]:
    return lambda row: row[..., columns].fill_(value)


def _mixed(row: Tensor) -> None:
    row[..., ::3], row[..., 1::3] = torch.finfo(row.dtype).max, -INF


@dataclass(frozen=True)
class Poison:
    """A change of one row of q, k, v or dout; each sequence of a batch has its own poison."""

    name: str
    change: Callable[[Tensor], object]


POISONS = (
    Poison("k", _set(NAN)),
    Poison("v", _set(NAN)),
    Poison("k", _set(INF, slice(3, 4))),
    Poison("v", _mixed),
    Poison("q", _set(NAN)),
    Poison("dout", _set(NAN)),
)
BATCH = len(POISONS)

ENDS = [0, 30, 64, 64, 100, SEQLEN]
LENGTHS = [SEQLEN, 100, 64, 30, 1, 0]
BLOCKS = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 0, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1]]).bool()
MASKS: dict[str, Mask] = {
    "causal": rf.Causal(),
    "window": rf.SlidingWindow(17, 5),
    "causal window": rf.Causal() & rf.SlidingWindow(40),
    "documents": rf.Documents(ENDS),
    "causal documents": rf.Causal() & rf.Documents(ENDS),
    "documents of each": rf.Documents([ENDS, [0, 0, 0, 0, 120, SEQLEN]] * (BATCH // 2)),
    "padding": rf.KeyPadding(LENGTHS),
    "causal padding": rf.Causal() & rf.KeyPadding(LENGTHS[::-1]),
    "prefix": rf.PrefixLM([100, 0, 41, 64, 90, 111]),
    "blocks": rf.BlockSparse(BLOCKS, 32),
    "causal blocks": rf.Causal() & rf.BlockSparse(BLOCKS, 32),
    "tree": rf.Causal() & rf.Tree(NINE, start=AT[0] - 3),
}


def _problem(mask: Mask | None, backend: str) -> Problem:
    dtype = DTYPE_OF.get(backend, torch.float32)
    device = "cuda" if GPU else "cpu"
    return Problem.random(
        seqlen=SEQLEN, batch=BATCH, heads=HEADS, headdim=16, mask=mask, dtype=dtype, device=device, seed=1
    )


def _poisoned(problem: Problem, position: int) -> Problem:
    changed = {name: getattr(problem, name).clone() for name in ("q", "k", "v", "dout")}
    for b, poison in enumerate(POISONS):
        poison.change(changed[poison.name][b, position])
    return replace(problem, **changed)


def _run(problem: Problem, backend: str, world: int, deterministic: bool) -> dict[str, Tensor]:
    """Returns lse, out and the gradients, each (batch, rows, heads, width)."""
    inputs = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    options = rf.AttentionOptions(backend=backend, return_lse=True, deterministic=deterministic)
    if world == 1:
        out, lse = rf.flash_attention(*inputs, mask=problem.mask, options=options)
    else:
        context = rf.ContextParallel.local(world)
        q, k, v = (context.shard(x, mask=problem.mask) for x in inputs)
        out, lse = rf.ring_attention(q, k, v, context, mask=problem.mask, options=options)
        out, lse = context.unshard(out, mask=problem.mask), context.unshard(lse, dim=2, mask=problem.mask)
    dq, dk, dv = torch.autograd.grad(out, inputs, problem.dout)
    return {"out": out.detach(), "lse": lse.detach().transpose(1, 2)[..., None], "dq": dq, "dk": dk, "dv": dv}


def _reached(problem: Problem, position: int) -> dict[str, Tensor]:
    """Returns the rows of each result that the mask lets the poison change: bool (batch, rows)."""
    positions = torch.arange(SEQLEN)
    sees = as_mask(problem.mask).dense(positions, positions).expand(BATCH, -1, -1)
    forward, backward = (torch.zeros(BATCH, SEQLEN, dtype=torch.bool) for _ in range(2))
    for b, poison in enumerate(POISONS):
        if poison.name in ("k", "v"):
            forward[b] = sees[b, :, position]
        elif poison.name == "q":
            forward[b, position] = sees[b, position].any()
        else:
            backward[b, position] = sees[b, position].any()
    backward |= forward
    keys = (sees & backward[:, :, None]).any(1)
    return {"out": forward, "lse": forward, "dq": backward, "dk": keys, "dv": keys}


def _check(problem: Problem, backend: str, *, world: int = 1, deterministic: bool = True) -> None:
    clean = _run(problem, backend, world, deterministic)
    for position in _positions(backend):
        got = _run(_poisoned(problem, position), backend, world, deterministic)
        reached = {name: rows.to(problem.q.device) for name, rows in _reached(problem, position).items()}
        for name, x in got.items():
            assert not bool(reached[name].all())
            for b, poison in enumerate(POISONS):
                apart = ~reached[name][b]
                where = f"{name} of sequence {b}, {poison.name} poisoned at {position}"
                if name == "dq" and not deterministic and backend != "eager":  # added in any order
                    torch.testing.assert_close(x[b, apart], clean[name][b, apart], rtol=1e-2, atol=1e-2, msg=where)
                else:
                    assert torch.equal(x[b, apart], clean[name][b, apart]), where
        # The poisons with NaN in a whole row must reach every row that sees it.
        for b, names in ((0, "out lse dq dk dv"), (1, "out dq dk"), (4, "out lse dq dk dv"), (5, "dq dk dv")):
            for name in names.split():
                assert torch.isnan(got[name][b, reached[name][b]]).all(), f"{name} of sequence {b}"


WAYS = list(itertools.product(MASKS, (True, False)))
RING_MASKS = ("documents of each", "causal", "causal documents", "padding", "causal blocks")
RING_WAYS = list(itertools.product(RING_MASKS, (True, False)))


@pytest.mark.parametrize(("way", "backend"), _with_backends(WAYS, interpreted=3))
def test_on_one_device(way: tuple[str, bool], backend: str) -> None:
    mask, deterministic = way
    _check(_problem(MASKS[mask], backend), backend, deterministic=deterministic)


@pytest.mark.parametrize(("way", "backend"), _with_backends(RING_WAYS, interpreted=9))
def test_in_hops_that_carry_a_state(way: tuple[str, bool], backend: str) -> None:
    mask, deterministic = way
    _check(
        _problem(MASKS[mask], backend),
        backend,
        world=3 if GPU or backend == "eager" else 2,
        deterministic=deterministic,
    )


MODES = {
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "dropout": {"dropout": rf.Dropout(0.3, seed=1)},
}


@pytest.mark.parametrize(("mode", "backend"), _with_backends(MODES, interpreted=2))
def test_with_each_mode(mode: str, backend: str) -> None:
    problem = _problem(rf.Causal() & rf.Documents(ENDS), backend)
    modes = {name: x.to(problem.q.device) if isinstance(x, Tensor) else x for name, x in MODES[mode].items()}
    problem = replace(problem, **modes)
    for position in _positions(backend):
        reached = {name: rows.to(problem.q.device) for name, rows in _reached(problem, position).items()}
        results = [each.flash(backend=backend, deterministic=True) for each in (problem, _poisoned(problem, position))]
        for name, clean, got in zip(("out", "dq", "dk", "dv"), *results, strict=False):
            assert torch.equal(got[~reached[name]], clean[~reached[name]]), name
            assert torch.isnan(got[0][reached[name][0]]).all(), name


@pytest.mark.parametrize("backend", ISOLATING_BACKENDS)
def test_a_mask_of_one_sequence_on_several_tiles(backend: str) -> None:
    """Checks tiles in which some rows see all keys, some rows see a part of them, and some rows see none."""
    seqlen, position = (1300, 1100) if GPU or backend == "eager" else (300, 200)
    dtype, device = DTYPE_OF.get(backend, torch.float32), "cuda" if GPU else "cpu"
    mask = rf.Causal() & rf.SlidingWindow(position)
    given = Problem.random(seqlen=seqlen, batch=1, heads=(1, 1), headdim=16, mask=mask, dtype=dtype, device=device)
    changed = replace(given, k=given.k.clone(), v=given.v.clone())
    changed.k[:, position], changed.v[:, position] = NAN, INF
    (clean, dq, *_), (out, changed_dq, *_) = (
        each.flash(backend=backend, deterministic=True) for each in (given, changed)
    )
    assert torch.equal(out[:, :position], clean[:, :position])
    assert torch.equal(changed_dq[:, :position], dq[:, :position])
    assert torch.isnan(out[:, position:]).all()


DECODED: list[tuple[int, Mask | None]] = [
    (1, None),
    (1, rf.SlidingWindow(20, 0)),
    (5, rf.Causal()),
    (5, rf.SlidingWindow(3, 1)),
    (5, rf.Tree(FIVE)),
    (9, rf.Causal() & rf.SlidingWindow(20)),
    (9, rf.Tree(NINE) & rf.SlidingWindow(40, None)),
]


@pytest.mark.parametrize("backend", [backend for backend in ISOLATING_BACKENDS if backend != "hopper"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("seqlen_q", "mask"), DECODED)
def test_decoding(seqlen_q: int, mask: Mask | None, splits: int, backend: str) -> None:
    lengths = (100, 77, 100, 100)
    dtype, device = DTYPE_OF.get(backend, torch.float32), "cuda" if GPU else "cpu"
    given = Decoding.random(seqlen_q=seqlen_q, mask=mask, lengths=lengths, heads=HEADS, dtype=dtype, device=device)
    clean = given.decode(backend=backend, splits=splits)
    for from_end in (1, 2, 4, 25, 60):
        q, k, v = given.q.clone(), given.k.clone(), given.v.clone()
        for b, x in enumerate((k, v, k)):
            x[b, lengths[b] - from_end] = INF if b == 2 else NAN
        q[3, seqlen_q // 2] = NAN
        results = replace(given, q=q, k=k, v=v).decode(backend=backend, splits=splits)
        reached = [visible(mask, seqlen_q, length)[:, length - from_end] for length in lengths]
        reached[3] = torch.arange(seqlen_q) == seqlen_q // 2
        for b, rows in enumerate(reached):
            rows = rows.to(given.q.device)
            for (got, want), by_row in zip(zip(results, clean, strict=True), (0, 1), strict=True):
                got, want = (x[b] if by_row == 0 else x[b].transpose(0, 1) for x in (got, want))
                assert torch.equal(got[~rows], want[~rows])
                if b in (0, 3) or (b == 1 and by_row == 0):
                    assert torch.isnan(got[rows]).all()
