"""The grid of heads, headdims, lengths and dtypes from FlashAttention's own tests; on a GPU."""

import pytest
import torch

import ringflash as rf
from tests.helpers.accuracy import Problem, assert_accurate_together
from tests.kernels.backends import GPU_BACKENDS
from tests.kernels.triton.test_backend import DEVICE, GPU, ROUNDING

pytestmark = [
    pytest.mark.skipif(not GPU, reason="hours in the interpreter"),
    pytest.mark.timeout(900),  # includes the compilation of kernels
]

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
HEADDIMS = [64, 96, 128, 192, 256]
LENGTHS = [
    (1, 1),
    (3, 3),
    (64, 128),
    (113, 203),
    (108, 256),
    (239, 1),
    (256, 512),
    (512, 256),
    (640, 128),
    (799, 3),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
    (4224, 4224),
]


def draws_of(seqlen: tuple[int, int]) -> int:
    """Returns the number of problems to pool errors over: among few numbers, the largest error is chance."""
    return 16 if max(seqlen) <= 640 else 4


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grid(dtype: torch.dtype, heads: str, headdim: int, causal: bool, backend: str) -> None:
    misses = []
    for index, seqlen in enumerate(LENGTHS):
        draws = [
            Problem.random(
                seqlen=seqlen,
                heads=HEADS[heads],
                headdim=headdim,
                batch=8 if max(seqlen) <= 256 else 2,
                dtype=dtype,
                mask=rf.Causal() if causal else None,
                device=DEVICE,
                seed=index + draw * len(LENGTHS),
            )
            for draw in range(draws_of(seqlen))
        ]
        for deterministic in (True, False):
            results = [draw.flash(backend=backend, deterministic=deterministic) for draw in draws]
            try:
                assert_accurate_together(results, draws, rounding=ROUNDING)
            except AssertionError as error:
                misses.append(f"{seqlen}, {'deterministic' if deterministic else 'fast'}: {error}")
    assert not misses, "\n".join(misses)
