"""The Hopper kernels give the same bits in every run, whichever program processes a tile; on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from tests.helpers.accuracy import Problem
from tests.kernels.backends import GPU_BACKENDS

pytestmark = pytest.mark.skipif("hopper" not in GPU_BACKENDS, reason="needs sm_90")

MASKS = [rf.Causal(), rf.Causal() & rf.SlidingWindow(300, 0), None]
MASKS_BACKWARD = [*MASKS, rf.KeyPadding([1500, 3, 700]), rf.Causal() & rf.Documents([0, 700, 713, 1500])]


def problem(mask: rf.Causal | None, headdim: int, seqlen: int = 1500) -> Problem:
    return Problem.random(
        seqlen=seqlen, heads=(8, 2), headdim=headdim, dtype=torch.bfloat16, mask=mask, device="cuda", batch=3
    )


def run(given: Problem, inputs: list[Tensor], **options: Any) -> Tensor:
    chosen = rf.AttentionOptions(backend="hopper", **options)
    out = rf.flash_attention(*inputs, mask=given.mask, options=chosen)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("seqlen", [1500, 8500])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_forward(headdim: int, mask: rf.Causal | None, seqlen: int) -> None:
    given = problem(mask, headdim, seqlen)
    first = run(given, [given.q, given.k, given.v])
    repeats = 1_500_000 // seqlen
    different = sum((run(given, [given.q, given.k, given.v]) != first).any().long() for _ in range(repeats))
    assert not different


@pytest.mark.parametrize("mask", MASKS[:2])
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_hops(headdim: int, mask: rf.Causal) -> None:
    """Repeats rings: states pass between hops, tiles process none, one or many others, and sums span many launches."""
    given = Problem.random(
        seqlen=6000, heads=(8, 2), headdim=headdim, dtype=torch.bfloat16, mask=mask, device="cuda", batch=2
    )
    context = rf.ContextParallel.local(3, hops="ring")
    first = given.ring(context, deterministic=True)
    for _ in range(20):
        assert all(map(torch.equal, given.ring(context, deterministic=True), first))


@pytest.mark.parametrize("processors", [1, 3, 131])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", [MASKS[1], *MASKS_BACKWARD[-2:]])
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_any_number_of_programs(
    headdim: int, mask: rf.Causal, deterministic: bool, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks any number of programs: none waits for a tile that no program has begun, and the order of sums stays.

    A program processes many tiles one after the other. Under padding, some of them have nothing to process.
    """
    given = problem(mask, headdim)
    monkeypatch.setattr("ringflash.kernels.hopper.calls.adds_in_turns", lambda *shape: False)
    expected = given.flash(backend="hopper", deterministic=deterministic)
    monkeypatch.setattr("ringflash.kernels.hopper.launch.processors", lambda device: processors)
    got = given.flash(backend="hopper", deterministic=deterministic)
    compared = [0, 1, 2, 3] if deterministic else [0, 2, 3]  # dq is added in any order
    assert all(torch.equal(got[i], expected[i]) for i in compared)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS_BACKWARD)
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_deterministic_backward(
    headdim: int, mask: rf.Causal | None, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringflash.kernels.hopper.calls.head_parts", lambda *_: parts)
    given = problem(mask, headdim, 1500 + parts)  # other lengths, for which no call is known yet
    inputs = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    out = run(given, inputs, deterministic=True)
    first = torch.autograd.grad(out, inputs, given.dout, retain_graph=True)
    for _ in range(250):
        again = torch.autograd.grad(out, inputs, given.dout, retain_graph=True)
        assert all(map(torch.equal, again, first))
