"""Isolation of rows in the Hopper kernels on a GPU, with several tiles a program; the other tests have one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.masks import Mask, as_mask
from tests.helpers.accuracy import Problem
from tests.kernels.backends import GPU_BACKENDS

pytestmark = pytest.mark.skipif("hopper" not in GPU_BACKENDS, reason="needs sm_90")

SEQLEN, HEADS, BATCH = 8500, (8, 2), 2  # long enough for three consumers at headdims 64 and 96
ENDS = [0, 1000, 1090, 3000, 3001, 4700, SEQLEN]
MASKS: dict[str, Mask] = {
    "causal": rf.Causal(),
    "window": rf.Causal() & rf.SlidingWindow(700),
    "documents": rf.Causal() & rf.Documents(ENDS),
    "whole documents": rf.Documents(ENDS),
    "padding": rf.KeyPadding([SEQLEN - 77, 5000]),
}
POSITIONS = [1050, 3000, 4690]


def _results(problem: Problem, world: int) -> dict[str, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    options = rf.AttentionOptions(backend="hopper", deterministic=True)
    if world == 1:
        out, _ = rf.flash_attention(*inputs, mask=problem.mask, return_lse=True, options=options)
    else:
        context = rf.ContextParallel.local(world)
        q, k, v = (context.shard(x, mask=problem.mask) for x in inputs)
        rows, _ = rf.ring_attention(q, k, v, context, mask=problem.mask, return_lse=True, options=options)
        out = context.unshard(rows, mask=problem.mask)
    if problem.q.shape[3] > 128:
        return {"out": out.detach()}
    dq, dk, dv = torch.autograd.grad(out, inputs, problem.dout)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _poisoned(problem: Problem, name: str, positions: list[int]) -> Problem:
    x = getattr(problem, name).clone()
    x[:, positions] = float("nan")
    return replace(problem, **{name: x})


def _check(problem: Problem, positions: list[int], world: int) -> None:
    places = torch.arange(SEQLEN, device="cuda")
    sees = as_mask(problem.mask).dense(places.cpu(), places.cpu()).cuda()  # (batch or 1, queries, keys)
    clean = _results(problem, world)
    for name in ("k", "v", "q", "dout"):
        got = _results(_poisoned(problem, name, positions), world)
        rows = sees[:, :, positions].any(2) if name in ("k", "v") else torch.zeros_like(sees[:, :, 0])
        if name in ("q", "dout"):
            rows[:, positions] = True
        keys = (sees & rows[:, :, None]).any(1)
        out_rows = torch.zeros_like(rows) if name == "dout" else rows
        for result, reached in (("out", out_rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            if result in got:
                apart = ~reached.expand(BATCH, -1)
                assert torch.equal(got[result][apart], clean[result][apart]), f"{result}, NaN in {name}"
        lost = "out" if name != "dout" else "dq"
        if lost in got:
            seen = rows.expand(BATCH, -1) & sees.any(2)
            assert got[lost][seen].isnan().any(-1).all()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_several_tiles_a_program(mask: str, headdim: int, world: int) -> None:
    given = Problem.random(
        seqlen=SEQLEN, batch=BATCH, heads=HEADS, headdim=headdim, mask=MASKS[mask], dtype=torch.bfloat16, device="cuda"
    )
    _check(given, POSITIONS, world)


@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_when_every_tile_is_repeated(headdim: int) -> None:
    given = Problem.random(
        seqlen=SEQLEN, batch=BATCH, heads=HEADS, headdim=headdim, mask=rf.Causal(), dtype=torch.bfloat16, device="cuda"
    )
    changed = replace(given, v=torch.full_like(given.v, float("nan")))
    for world in (1, 3):
        assert all(x.isnan().all() for x in _results(changed, world).values() if x.shape[1:] == given.q.shape[1:])


def test_the_largest_values_in_padding() -> None:
    mask = rf.KeyPadding([SEQLEN - 77, 5000])
    given = Problem.random(
        seqlen=SEQLEN, batch=BATCH, heads=HEADS, headdim=128, mask=mask, dtype=torch.bfloat16, device="cuda"
    )
    changed = replace(given, v=given.v.clone(), k=given.k.clone())
    for x in (changed.k, changed.v):
        x[0, SEQLEN - 77 :] = x[1, 5000:] = torch.finfo(x.dtype).max
    clean, got = _results(given, 1), _results(changed, 1)
    for name, x in clean.items():
        assert torch.equal(got[name], x), name
