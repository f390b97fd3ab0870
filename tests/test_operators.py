"""The interpreter's operators that look types up once give the same bits as Triton's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringflash as rf
from tests.helpers import operators
from tests.helpers.accuracy import Problem
from tests.helpers.strategies import block_sparse
from tests.ops.test_decode import Decoding
from tests.ops.test_modes import MODES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
SEQLEN = 40  # two tiles, the last of them short


def _attention(dtype: torch.dtype) -> list[Tensor]:
    mask = rf.Causal() & rf.Documents([0, 13, SEQLEN])
    given = Problem.random(seqlen=SEQLEN, heads=(2, 1), dtype=dtype, mask=mask, **MODES["all"])
    return given.flash(backend="triton", deterministic=True)


def _listed_tiles(dtype: torch.dtype) -> list[Tensor]:
    mask = rf.Causal() & block_sparse(SEQLEN, 16, seed=0, density=0.5)
    given = Problem.random(seqlen=SEQLEN, batch=1, heads=(2, 1), headdim=16, dtype=dtype, mask=mask)
    return given.flash(backend="triton")


def _ring(dtype: torch.dtype) -> list[Tensor]:
    given = Problem.random(seqlen=SEQLEN, batch=1, heads=(2, 1), headdim=16, dtype=dtype, mask=rf.Causal())
    return given.ring(rf.ContextParallel.local(2), backend="triton")


def _decoding(dtype: torch.dtype) -> list[Tensor]:
    mask = rf.Causal() & rf.SlidingWindow(20)
    given = Decoding.random(seqlen_q=5, mask=mask, lengths=(60, 37), heads=(2, 1), dtype=dtype)
    return [*given.decode(backend="triton", splits=2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("results", [_attention, _listed_tiles, _ring, _decoding])
def test_the_same_bits_as_triton_s_own(results: Callable[[torch.dtype], list[Tensor]], dtype: torch.dtype) -> None:
    fast = results(dtype)
    operators.uninstall()
    try:
        own = results(dtype)
    finally:
        operators.install()
    assert all(torch.equal(a, b) for a, b in zip(fast, own, strict=True))
