"""The backward of heads wider than 128, whose warpgroups share out the gradients and not the keys; on a GPU."""

import pytest
import torch

import ringflash as rf
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.kernels.backends import GPU_BACKENDS

pytestmark = pytest.mark.skipif("hopper" not in GPU_BACKENDS, reason="needs sm_90")

MASKS = [None, rf.Causal(), rf.SlidingWindow(300, 100), rf.Causal() & rf.Documents([0, 7, 500, 513, 1301])]


def problem(headdim: int, heads: tuple[int, int], mask: Mask | None, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem.random(seqlen=1301, heads=heads, headdim=headdim, dtype=dtype, mask=mask, device="cuda")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("headdim", "heads"), [(256, (4, 4)), (256, (8, 2)), (192, (4, 2)), (136, (4, 1))])
def test_one_hop(headdim: int, heads: tuple[int, int], mask: Mask | None, deterministic: bool) -> None:
    given = problem(headdim, heads, mask)
    assert_accurate(given.flash(backend="hopper", deterministic=deterministic), given)


@pytest.mark.parametrize("processors", [1, 7])
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_tiles_a_program(processors: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a program's next tile of keys waits until dk and dv of the one before have left the buffers of dq."""
    monkeypatch.setattr("ringflash.kernels.hopper.launch.processors", lambda device: processors)
    given = problem(256, (4, 2), rf.Causal() & rf.SlidingWindow(100, 0))
    assert_accurate(given.flash(backend="hopper", deterministic=deterministic), given)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_hops(mask: Mask | None, deterministic: bool) -> None:
    """Checks gradients that are added to in float32. The forward of these hops runs on the Triton kernels."""
    given = problem(256, (4, 2), mask)
    context = rf.ContextParallel.local(3, hops="ring")
    assert_accurate(given.ring(context, backend="hopper", deterministic=deterministic), given)


@pytest.mark.parametrize("seqlen", [(5, 70), (333, 1001), (2000, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_lengths(seqlen: tuple[int, int], dtype: torch.dtype) -> None:
    given = Problem.random(seqlen=seqlen, heads=(6, 2), headdim=256, dtype=dtype, mask=None, device="cuda")
    assert_accurate(given.flash(backend="hopper"), given)
