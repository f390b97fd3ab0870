"""Every backend under every mask: random compositions, padding that holds NaN, fully masked tiles."""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.helpers.strategies import block_sparse, masks
from tests.kernels.backends import DTYPE_OF, GPU_BACKENDS
from tests.kernels.triton.test_backend import DEVICE, DTYPES, GPU, ROUNDING

SEQLEN = 70
INTERPRETED = settings(deadline=None, max_examples=100 if GPU else 4, suppress_health_check=[HealthCheck.too_slow])
EXAMPLES: list[Mask] = [
    rf.SlidingWindow(20, 5),
    rf.Causal() & rf.SlidingWindow(33),
    rf.Causal() & rf.Documents([0, 1, 1, 40, 90, 190, 203]),
    rf.KeyPadding([203, 64]),
    rf.PrefixLM([100, 3]) & rf.KeyPadding([190, 140]),
    block_sparse(203, 32, seed=0, density=0.4),
    rf.Causal() & block_sparse(203, 7, seed=1, density=0.6),
    rf.Tree([-1, 0, 1, 1, 2, 2, 3, 3, 4], start=194),
]
# A kernel reads a mask in the same way for every dtype. Two masks suffice to run the code paths of each dtype.
CASES = [(mask, dtype) for i, mask in enumerate(EXAMPLES) for dtype in (DTYPES if GPU or i in (4, 5) else DTYPES[:1])]

NOTHING_FROM_66 = rf.BlockSparse(torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).bool(), 22)


@settings(deadline=None, max_examples=60)
@given(mask=masks(SEQLEN), seqlen_q=st.integers(1, SEQLEN + 10))
def test_eager_is_exact(mask: Mask, seqlen_q: int) -> None:
    problem = Problem.random(seqlen=(seqlen_q, SEQLEN), headdim=16, dtype=torch.float64, mask=mask)
    assert_accurate(problem.flash(), problem)


@settings(deadline=None, max_examples=60)
@given(mask=masks(SEQLEN), world=st.integers(1, 5), layout=st.sampled_from(LAYOUTS))
def test_rings_are_exact(mask: Mask, world: int, layout: str) -> None:
    problem = Problem.random(seqlen=SEQLEN, headdim=16, dtype=torch.float64, mask=mask)
    assert_accurate(problem.ring(rf.ContextParallel.local(world, layout)), problem)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@INTERPRETED
@given(mask=masks(SEQLEN), world=st.integers(1, 3 if GPU else 2), layout=st.sampled_from(LAYOUTS))
def test_kernels_agree_with_eager(backend: str, mask: Mask, world: int, layout: str) -> None:
    dtype = DTYPE_OF[backend]
    problem = Problem.random(seqlen=SEQLEN, heads=(2, 1), headdim=16, dtype=dtype, mask=mask, device=DEVICE)
    context = rf.ContextParallel.local(world, layout)
    most = max(map(len, context.plan(mask, SEQLEN).layout.chunks))
    assume(GPU or most <= 4)  # pairs of many chunks take minutes in the interpreter
    results = problem.ring(context, backend=backend), problem.ring(context, backend="eager")
    for got, expected in zip(*results, strict=True):
        rounding, size = 1e-5 if dtype == torch.float32 else 2e-2, max(1.0, expected.abs().max().item())
        torch.testing.assert_close(got, expected, rtol=0, atol=rounding * size)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(("mask", "dtype"), CASES)
def test_kernels_within_the_bars(mask: Mask, dtype: torch.dtype, backend: str) -> None:
    problem = Problem.random(seqlen=203, heads=(2, 1), dtype=dtype, mask=mask, device=DEVICE)
    assert_accurate(problem.flash(backend=backend), problem, rounding=ROUNDING)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("backend", ["eager", *GPU_BACKENDS])
@pytest.mark.parametrize("value", [math.nan, 3e38])
@pytest.mark.parametrize("other", [rf.Documents([0, 30, 66, 70]), NOTHING_FROM_66])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, in Triton's interpreter
def test_padding_is_never_read(other: Mask, backend: str, value: float, deterministic: bool) -> None:
    """Checks that keys past their sequence's end, and rows past the longest sequence, may hold any value."""
    mask = rf.KeyPadding([66, 21]) & other
    dtype = DTYPE_OF.get(backend, torch.float32)
    clean = Problem.random(seqlen=70, heads=(2, 1), headdim=16, dtype=dtype, mask=mask, device=DEVICE)
    expected = clean.flash(backend=backend, deterministic=deterministic)
    dirty = clean.mapped(torch.clone)
    dirty.k[1, 21:] = value
    dirty.v[1, 21:] = value
    for x in (dirty.q, dirty.k, dirty.v, dirty.dout):
        x[:, 66:] = value
    for got, want in zip(dirty.flash(backend=backend, deterministic=deterministic), expected, strict=True):
        rounding = 1e-5 if dtype == torch.float32 else 2e-2
        tolerance = 0.0 if deterministic or not GPU else rounding  # fast: dq is added up in any order
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", ["eager", *GPU_BACKENDS])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, in Triton's interpreter
def test_padding_that_visits_ranks_is_never_read(backend: str) -> None:
    """Checks two ranks with four chunks of 25 rows: the last ends in padding, beyond all rows of the other rank."""
    dtype = DTYPE_OF.get(backend, torch.float32)
    mask = rf.Causal() & rf.KeyPadding([80, 80])
    clean = Problem.random(seqlen=100, heads=(1, 1), headdim=16, dtype=dtype, mask=mask, device=DEVICE)
    dirty = clean.mapped(torch.clone)
    for x in (dirty.k, dirty.v):
        x[:, 80:] = math.nan
    context = rf.ContextParallel.local(2, "zigzag", hops="ring")
    expected = clean.ring(context, backend=backend, deterministic=True)
    for got, want in zip(dirty.ring(context, backend=backend, deterministic=True), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("backend", ["eager", *GPU_BACKENDS])
@pytest.mark.parametrize("size", [16, 32])  # of a mask block; tiles have 32 rows in the interpreter, 64 on GPUs
@pytest.mark.parametrize(
    ("shown", "border", "fully_masked"),
    [
        # The blocks show keys to these rows, and so do the documents, but none in common: in a part of a tile,
        ([(0, 0), (1, 0), (1, 2), (2, 1), (3, 3)], 1.25, (1.25, 2)),
        # and in a whole tile. There the blocks show to some rows a key that the documents show to other rows.
        ([(0, 0), (1, 1), (2, 0), (2, 3), (3, 0)], 2, (2, 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, in Triton's interpreter
def test_queries_that_see_nothing_are_never_read(
    shown: list[tuple[int, int]],
    border: float,
    fully_masked: tuple[float, float],
    size: int,
    backend: str,
    deterministic: bool,
) -> None:
    cells = torch.zeros(4, 4, dtype=torch.bool)
    cells[tuple(torch.tensor(shown).T)] = True
    documents = rf.Documents([0, int(border * size), 4 * size])
    mask = rf.BlockSparse(cells, size) & documents & rf.Causal()
    rows = slice(*(int(edge * size) for edge in fully_masked))
    assert not mask.dense(torch.arange(4 * size), torch.arange(4 * size))[0, rows].any()
    dtype = DTYPE_OF.get(backend, torch.float32)
    clean = Problem.random(seqlen=4 * size, heads=(2, 1), headdim=16, dtype=dtype, mask=mask, device=DEVICE)
    expected = clean.flash(backend=backend, deterministic=deterministic)
    dirty = clean.mapped(torch.clone)
    for x in (dirty.q, dirty.dout):
        x[:, rows] = math.nan
    for got, want in zip(dirty.flash(backend=backend, deterministic=deterministic), expected, strict=True):
        rounding = 1e-5 if dtype == torch.float32 else 2e-2
        tolerance = 0.0 if deterministic or not GPU else rounding  # fast: dq is added up in any order
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_tiles_that_begin_within_a_word_of_bits(backend: str) -> None:
    """Checks a mask of one bit per key on a rank with keys from 34 on: its tiles begin inside a word of bits."""
    dtype = DTYPE_OF[backend]
    mask = block_sparse(67, 1, seed=2, density=0.5)
    problem = Problem.random(seqlen=67, heads=(2, 1), headdim=16, dtype=dtype, mask=mask, device=DEVICE)
    assert_accurate(
        problem.ring(rf.ContextParallel.local(2, "contiguous"), backend=backend), problem, rounding=ROUNDING
    )


@pytest.mark.parametrize("backend", ["eager", *GPU_BACKENDS])
def test_rows_that_see_nothing(backend: str) -> None:
    options = rf.AttentionOptions(return_lse=True, backend=backend)
    mask = rf.KeyPadding([20, 20]) & rf.Documents([0, 20, 70]) & rf.SlidingWindow(3, 3)
    dtype = DTYPE_OF.get(backend, torch.float32)
    problem = Problem.random(seqlen=70, heads=(2, 1), headdim=16, dtype=dtype, mask=mask, device=DEVICE)
    result = rf.flash_attention(problem.q, problem.k, problem.v, mask=mask, options=options)
    assert isinstance(result, tuple)
    assert (result[1][..., 20:] == -math.inf).all()
    for tensor in problem.flash(backend=backend):
        assert torch.equal(tensor[:, 20:], torch.zeros_like(tensor[:, 20:]))
