"""Query heads of a KV head are cut in parts where tiles of keys are few; dk and dv stay the same sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.kernels.contract import BackwardArguments, ScoreConfig, TileProblem
from ringflash.kernels.hopper import calls, dkdv_store
from ringflash.kernels.hopper.config import head_parts
from ringflash.kernels.hopper.dkdv_store import add_head_parts, new_head_parts
from ringflash.kernels.hopper.dq_accumulator import DqAccumulator
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.kernels.backends import GPU_BACKENDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAUSAL = 1.9  # about the skew of a causal mask
needs_hopper = pytest.mark.skipif("hopper" not in GPU_BACKENDS, reason="needs sm_90")


@pytest.mark.parametrize(
    ("group", "ntiles", "skew", "parts"),
    [
        (4, 16 * 8, CAUSAL, 2),  # 2048 tokens, 8 KV heads
        (4, 16 * 8, 1.0, 1),
        (4, 32 * 8, CAUSAL, 1),
        (4, 16 * 2, CAUSAL, 4),
        (4, 300, 16.0, 1),  # many tiles, most of them short
        (8, 16 * 2, CAUSAL, 4),
        (2, 16 * 2, CAUSAL, 2),
        (6, 16 * 2, CAUSAL, 2),
        (3, 16 * 2, CAUSAL, 1),
        (1, 16 * 2, CAUSAL, 1),
    ],
)
def test_few_uneven_tiles_are_cut(group: int, ntiles: int, skew: float, parts: int) -> None:
    assert head_parts(group, ntiles, skew, 132) == parts
    assert head_parts(group, ntiles, skew, 1) == 1  # as in the interpreter


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("shape", [(2, 70, 3, 72), (1, 64, 1, 128), (1, 1, 2, 256)], ids=str)
def test_parts_are_added(shape: tuple[int, ...], parts: int) -> None:
    dk, dv = (torch.full(shape, torch.nan, dtype=torch.float16, device=DEVICE) for _ in range(2))
    targets = new_head_parts(dk, dv, parts)
    if parts == 1:
        assert targets[0] is dk
        assert targets[1] is dv
    values = [x.copy_(torch.randn(x.shape, device=DEVICE)).float() for x in targets]
    add_head_parts(*targets, dk, dv)
    for result, value in zip((dk, dv), values, strict=True):
        total = torch.zeros(shape, device=DEVICE)
        for part in value.unflatten(2, (shape[2], parts)).unbind(3):
            total += part
        assert torch.equal(result, total.half())


def test_launches_know_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that launches of another GPU, dtype or number of parts have other keys."""
    keys: list[Any] = []
    monkeypatch.setattr(dkdv_store._sums, "repeat", lambda key, _: keys.append(key) or True)
    for device, dtype in product(("cpu", "meta"), (torch.float16, torch.float32)):
        for parts in (2, 4):
            dk = torch.empty(1, 64, 1, 64, dtype=dtype, device=device)
            add_head_parts(*new_head_parts(dk, dk, parts), dk, dk)
    assert len(set(keys)) == len(keys) == 8


class Known:
    """Stands for launches of a backward that were made before: each writes 1 to all of dk and dv."""

    grid = (4,)

    def __init__(self, parts: int) -> None:
        self.note, self.shapes = (-1.0, parts), list[tuple[int, ...]]()

    def find(self, _: object) -> Known:
        return self

    def bind(self, key: object, family: object, grid: object, tensors: Sequence[Tensor], *_: object, note: Any) -> bool:
        assert note[1] == self.note[1]
        return self(tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        for x in tensors[4:6]:
            self.shapes.append(tuple(x.shape))
            x.fill_(1.0)
        return True


@pytest.mark.parametrize("make", [calls.repeat_backward, calls.backward], ids=["repeated", "bound"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_known_launch_has_its_parts_added(
    make: Callable[..., Any], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Known(parts)
    monkeypatch.setattr(calls, "_backwards", known)
    monkeypatch.setattr(calls, "head_parts", lambda *_: parts)
    q, dout = (torch.randn(1, 70, 8, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    k, dk, dv = (torch.zeros(1, 70, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(3))
    lse = torch.zeros(1, 8, 70, device=DEVICE)
    problem = TileProblem((Chunk(0, 70),), (Chunk(0, 70),), rf.Causal(), ScoreConfig(0.125))
    inputs = BackwardArguments(dout, q, k, k, lse, lse, problem)
    make(inputs, dk, dv, accumulate=False, dq=DqAccumulator(q, hops=1, ordered=False))
    assert known.shapes == [(1, 70, 2 * parts, 64)] * 2
    assert (dk == parts).all()
    assert (dv == parts).all()


MASKS = [rf.Causal(), rf.Full(), rf.Causal() & rf.Documents([0, 300, 2300]), rf.SlidingWindow(500, 0)]


@needs_hopper
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("headdim", [64, 72, 96, 128, 136, 256])
@pytest.mark.parametrize("heads", [(8, 2), (8, 1), (12, 2)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_accuracy(mask: Mask, headdim: int, heads: tuple[int, int], deterministic: bool) -> None:
    """Checks gradients, of which dq is added in any order in the default mode: the sequence is long enough for that."""
    given = Problem.random(
        seqlen=2300, heads=heads, headdim=headdim, batch=2, dtype=torch.bfloat16, mask=mask, device=DEVICE
    )
    results: list[list[Tensor]] = []
    for _ in range(3):  # by its code, recorded, and as a replay
        results.append(given.flash(backend="hopper", deterministic=deterministic))
        assert_accurate(results[-1], given)
    if deterministic:
        assert all(torch.equal(x, y) for again in results[1:] for x, y in zip(results[0], again, strict=True))
