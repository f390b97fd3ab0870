"""The backward for sm_90 is within the bars with dQ added in semaphore order or in any order; on a GPU."""

import pytest
import torch

import ringflash as rf
from ringflash.kernels.hopper.mask_tables import intervals
from ringflash.layouts.layout import Chunk
from ringflash.masks import Full, Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.kernels.backends import GPU_BACKENDS

NEEDS_SM_90 = pytest.mark.skipif("hopper" not in GPU_BACKENDS, reason="needs sm_90")

MASKS = [
    Full(),
    rf.Causal(),
    rf.SlidingWindow(100, 30),
    rf.Causal() & rf.Documents([0, 1, 1, 140, 300, 431]),
    rf.KeyPadding([431, 64]),
    rf.PrefixLM([100, 3]) & rf.KeyPadding([400, 140]),
]


@NEEDS_SM_90
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_the_default_mode(
    headdim: int, heads: tuple[int, int], mask: Mask, in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringflash.kernels.hopper.calls.adds_in_turns", lambda *shape: in_turns)
    problem = Problem.random(seqlen=431, heads=heads, headdim=headdim, dtype=torch.bfloat16, mask=mask, device="cuda")
    assert_accurate(problem.flash(backend="hopper"), problem)


@NEEDS_SM_90
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("mask", [None, rf.Causal()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen", [(300, 431), (799, 150), (33, 700)])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_other_lengths(
    headdim: int,
    seqlen: tuple[int, int],
    dtype: torch.dtype,
    mask: Mask | None,
    in_turns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ringflash.kernels.hopper.calls.adds_in_turns", lambda *shape: in_turns)
    problem = Problem.random(seqlen=seqlen, heads=(8, 2), headdim=headdim, dtype=dtype, mask=mask, device="cuda")
    assert_accurate(problem.flash(backend="hopper"), problem)


WINDOWS = [
    rf.Causal() & rf.SlidingWindow(200, 0),
    rf.SlidingWindow(130, 70),
    rf.SlidingWindow(200, 200) & rf.KeyPadding([1500, 1400]),
]


@NEEDS_SM_90
@pytest.mark.parametrize("mask", WINDOWS, ids=str)
@pytest.mark.parametrize("nheads_kv", [8, 4, 1])
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_windows_of_shared_heads(headdim: int, nheads_kv: int, mask: Mask) -> None:
    """Checks windows with shared heads: all tiles of a head are processed before the tiles of the group's next head."""
    problem = Problem.random(
        seqlen=1500, heads=(8, nheads_kv), headdim=headdim, dtype=torch.bfloat16, mask=mask, device="cuda"
    )
    assert_accurate(problem.flash(backend="hopper", deterministic=True), problem)


@pytest.mark.parametrize(
    ("mask", "shifted"),
    [
        (Full(), False),
        (rf.Causal(), False),
        *((mask, True) for mask in WINDOWS),
        (rf.Causal() & rf.SlidingWindow(1000, 0), False),
        (rf.Causal() & rf.Documents([0, 700, 713, 1500]), False),
    ],
    ids=str,
)
def test_tiles_that_shift_are_told_from_other_masks(mask: Mask, shifted: bool) -> None:
    whole = (Chunk(0, 1500),)
    for block in (64, 128):
        known = intervals(mask, whole, whole, 128, block, torch.device("cpu"), by_keys=True, ordered=True)
        assert known.shifted == shifted
