"""The forward of narrow heads uses other tiles if queries see many keys; on a GPU."""

import pytest
import torch

import ringflash as rf
from ringflash.kernels.contract import ScoreConfig, TileProblem
from ringflash.kernels.hopper.calls import tiling
from ringflash.kernels.hopper.config import forward_config
from ringflash.kernels.hopper.mask_tables import intervals
from ringflash.layouts.layout import Chunk
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.kernels.backends import GPU_BACKENDS

CASES = [(8500, rf.Causal()), (9000, rf.Causal() & rf.SlidingWindow(6000, 0)), (6500, rf.KeyPadding([6400]))]


@pytest.mark.parametrize("headdim", [64, 96])
@pytest.mark.parametrize(("seqlen", "mask"), CASES)
def test_cases_are_long(seqlen: int, mask: Mask, headdim: int) -> None:
    whole = (Chunk(0, seqlen),)
    known = intervals(mask, whole, whole, 128, 128, torch.device("cpu"), by_keys=False)
    short = forward_config(headdim, masked=True, visits=0)
    config, _ = tiling(TileProblem(whole, whole, mask, ScoreConfig(1.0)), headdim, torch.device("cpu"))
    assert config == forward_config(headdim, masked=True, visits=known.visits)
    assert config.consumers > short.consumers


def test_hops_with_a_state_have_room_for_it() -> None:
    for headdim in (64, 96, 128):
        config = forward_config(headdim, masked=False, visits=1e9, alone=False)
        of_state = 4 * 64 * config.block_d * config.consumers
        of_inputs = 2 * config.block_d * (64 * config.consumers + 2 * config.stages * config.block_n)
        assert of_state + of_inputs <= 225 * 1024  # of 227 KiB; barriers and checks take up to two


def test_documents_that_fit_short_tiles_alone_keep_them() -> None:
    """Checks documents under which tiles of 128 rows need no mask; tiles of 192 rows would need one."""
    whole = (Chunk(0, 4096),)
    tile_problem = TileProblem(whole, whole, rf.Documents(range(0, 4097, 128)), ScoreConfig(0.125))
    config, known = tiling(tile_problem, 64, torch.device("cpu"))
    assert config == forward_config(64, masked=True, visits=0)
    assert not known.masked


@pytest.mark.skipif("hopper" not in GPU_BACKENDS, reason="needs sm_90")
@pytest.mark.parametrize("headdim", [64, 80, 96])
@pytest.mark.parametrize(("seqlen", "mask"), CASES)
def test_accuracy(seqlen: int, mask: Mask, headdim: int) -> None:
    given = Problem.random(
        seqlen=seqlen, heads=(2, 1), headdim=headdim, batch=1, dtype=torch.bfloat16, mask=mask, device="cuda"
    )
    assert_accurate(given.flash(backend="hopper"), given)


@pytest.mark.skipif("hopper" not in GPU_BACKENDS, reason="needs sm_90")
@pytest.mark.parametrize("headdim", [64, 96])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_state_passes(layout: str, headdim: int) -> None:
    given = Problem.random(
        seqlen=13000, heads=(2, 1), headdim=headdim, batch=1, dtype=torch.bfloat16, mask=rf.Causal(), device="cuda"
    )
    assert_accurate(given.ring(rf.ContextParallel.local(2, layout=layout), backend="hopper"), given)
