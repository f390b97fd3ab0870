"""The kernels are within the bars under every mode, on a GPU or else in the interpreter."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate, assert_accurate_together
from tests.helpers.strategies import block_sparse, masks, modes
from tests.kernels.backends import DTYPE_OF, GPU_BACKENDS
from tests.kernels.triton.test_backend import DEVICE, DTYPES, GPU, ROUNDING
from tests.ops.test_modes import MODES

SEQLEN = 515 if GPU else 83
# A mode takes seconds in the interpreter, so modes that share no code are tested together.
TOGETHER: dict[str, dict[str, Any]] = {
    "none": {},
    "dropout and headdim_v": MODES["dropout"] | MODES["headdim_v"],
    "softcap, alibi and sinks": MODES["softcap"] | MODES["alibi"] | MODES["sinks"],
    "all": MODES["all"],
}
CASES = MODES | {"192 and 128": {"headdim": (192, 128)}} if GPU else TOGETHER
WORLD = 3 if GPU else 2  # two ranks need four calls of a kernel, three need nine
PARTS = range(6 if GPU else 1)  # a GPU's compiler takes a minute for ten examples
DRAWN = settings(deadline=None, max_examples=10 if GPU else 4, suppress_health_check=[HealthCheck.too_slow])


def problem(mode: str, **given: Any) -> Problem:
    defaults = {"seqlen": SEQLEN, "batch": 2, "heads": (4, 2) if GPU else (2, 1), "mask": rf.Causal(), "headdim": 16}
    return Problem.random(**{**defaults, "device": DEVICE, **CASES[mode], **given})


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("mode", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flash(dtype: torch.dtype, mode: str, backend: str) -> None:
    given = problem(mode, dtype=dtype)
    for deterministic in (True, False):
        assert_accurate(given.flash(backend=backend, deterministic=deterministic), given, rounding=ROUNDING)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("mode", CASES if GPU else ["all"])
@pytest.mark.parametrize("layout", LAYOUTS if GPU else ["zigzag"])
@pytest.mark.parametrize("dtype", DTYPES if GPU else [torch.float32])
def test_rings(dtype: torch.dtype, layout: str, mode: str, backend: str) -> None:
    given = problem(mode, dtype=dtype, seqlen=SEQLEN if GPU else 50)
    context = rf.ContextParallel.local(WORLD, layout)
    for deterministic in (True, False):
        assert_accurate(given.ring(context, backend=backend, deterministic=deterministic), given, rounding=ROUNDING)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    "mask",
    [
        None,
        rf.Causal() & rf.Documents([0, 13, 60, SEQLEN]),
        rf.Causal() & block_sparse(SEQLEN, 16, seed=0, density=0.5),
    ],
)
@pytest.mark.parametrize("mode", CASES if GPU else ["all"])
def test_masks(mode: str, mask: Mask | None, backend: str) -> None:
    given = problem(mode, mask=mask, dtype=DTYPE_OF[backend])
    for deterministic in (True, False):
        assert_accurate(given.flash(backend=backend, deterministic=deterministic), given, rounding=ROUNDING)


@pytest.mark.parametrize("seqlen", [(30, 83), (83, 30)])
def test_fewer_and_more_queries_than_keys(seqlen: tuple[int, int]) -> None:
    given = problem("all", seqlen=seqlen)
    assert_accurate(given.flash(backend="triton"), given, rounding=ROUNDING)


@pytest.mark.parametrize("part", PARTS)
@DRAWN
@given(mode=modes(), mask=masks(40), world=st.integers(1, WORLD), layout=st.sampled_from(LAYOUTS), fast=st.booleans())
def test_any_modes_and_masks_agree_with_eager(
    mode: dict[str, Any], mask: Mask, world: int, layout: str, fast: bool, part: int
) -> None:
    given = Problem.random(seqlen=40, heads=(2, 1), mask=mask, device=DEVICE, **mode)
    context = rf.ContextParallel.local(world, layout)
    results = [given.ring(context, backend=backend, deterministic=not fast) for backend in ("triton", "eager")]
    for got, expected in zip(*results, strict=True):
        size = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(got, expected, rtol=0, atol=3e-5 * size)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("mode", CASES if GPU else ["all"])
def test_heads_split_over_ranks(mode: str, backend: str) -> None:
    sizes: dict[str, Any] = {"seqlen": SEQLEN, "heads": (4, 1)} if GPU else {"seqlen": 30, "heads": (2, 1)}
    draws = [problem(mode, dtype=DTYPE_OF[backend], seed=seed, **sizes) for seed in range(4 if GPU else 1)]
    context = rf.ContextParallel.local(4 if GPU else 2, heads=2)
    for deterministic in (True, False):
        results = [draw.ring(context, backend=backend, deterministic=deterministic) for draw in draws]
        assert_accurate_together(results, draws, rounding=ROUNDING)


def test_the_weights_that_eager_drops() -> None:
    """Checks that both backends drop the same weights, which the identity as values makes visible."""
    seqlen = 64
    q, k = (torch.randn(2, seqlen, heads, 16, device=DEVICE) for heads in (4, 2))
    v = torch.eye(seqlen, device=DEVICE)[None, :, None].expand(2, -1, 2, -1)
    dropped = []
    for backend in ("triton", "eager"):
        options = rf.AttentionOptions(backend=backend)
        out = as_tensor(rf.flash_attention(q, k, v, dropout=rf.Dropout(0.4, seed=2**61 + 77), options=options))
        dropped.append(out == 0)
    assert torch.equal(*dropped)
    assert 0.3 < dropped[0].double().mean() < 0.5


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("mode", ["none", "all"])
def test_deterministic_is_bitwise(mode: str, backend: str) -> None:
    given = problem(mode, seqlen=1024 if GPU else 40, dtype=torch.float16)
    first = given.flash(backend=backend, deterministic=True)
    for _ in range(250 if GPU else 1):
        again = given.flash(backend=backend, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_fast_and_deterministic_agree(backend: str) -> None:
    given = problem("none", dtype=torch.float16)
    fast, exact = (given.flash(backend=backend, deterministic=x) for x in (False, True))
    assert torch.equal(fast[0], exact[0])
    for a, b in zip(fast[1:], exact[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
