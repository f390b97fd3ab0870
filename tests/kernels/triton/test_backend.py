"""The Triton kernels are within the bars, on a GPU or else in the interpreter; so are the Hopper kernels on sm_90."""

import itertools
from typing import Any

import pytest
import torch

import ringflash as rf
from ringflash.errors import ArgumentError
from tests.helpers.accuracy import Problem, assert_accurate
from tests.kernels.backends import DTYPE_OF, GPU_BACKENDS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
MASKS = [None, rf.Causal()]
LENGTHS = [(1, 1), (3, 3), (64, 128), (113, 203), (239, 1), (203, 113)]
GPU_LENGTHS = [(108, 256), (256, 512), (512, 256), (640, 128), (799, 3), (1023, 1024), (1024, 1023), (2048, 2048)]
# These kernels compute float32 in float32, so its largest errors are compared above this floor, in eps. Lower
# precisions have no floor.
ROUNDING = 16.0
HEADDIMS = [16, 40, 64, 128, 256]
HEADS = [(4, 4), (6, 2), (4, 1)]
WORLDS = [(1, "zigzag"), (2, "zigzag"), (3, "contiguous"), *([(4, "zigzag")] if GPU else [])]


def with_dtypes(values: list[Any]) -> list[tuple[Any, torch.dtype]]:
    """Returns each value with each dtype; in the interpreter, where a case takes seconds, with dtypes in rotation."""
    return list(itertools.product(values, DTYPES)) if GPU else list(zip(values, itertools.cycle(DTYPES), strict=False))


def problem(**given: Any) -> Problem:
    return Problem.random(device=DEVICE, **{"batch": 1, "heads": (2, 1), **given})


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen", [*LENGTHS, *(GPU_LENGTHS if GPU else [])])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(dtype: torch.dtype, seqlen: tuple[int, int], mask: rf.Causal | None, backend: str) -> None:
    given = problem(seqlen=seqlen, dtype=dtype, mask=mask)
    assert_accurate(given.flash(backend=backend), given, rounding=ROUNDING)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("mask", MASKS if GPU else MASKS[1:])  # the causal mask has full and partial tiles
@pytest.mark.parametrize("headdim", [*HEADDIMS, *([80, 96, 192] if GPU else [])])
@pytest.mark.parametrize("dtype", DTYPES)
def test_headdims(dtype: torch.dtype, headdim: int, mask: rf.Causal | None, backend: str) -> None:
    given = problem(seqlen=513 if GPU else 150, headdim=headdim, dtype=dtype, mask=mask)
    assert_accurate(given.flash(backend=backend), given, rounding=ROUNDING)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(("heads", "dtype"), with_dtypes(HEADS))
def test_grouped_heads(heads: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    given = problem(seqlen=150 if GPU else 70, heads=heads, batch=2, dtype=dtype, mask=rf.Causal())
    assert_accurate(given.flash(backend=backend), given, rounding=ROUNDING)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("ring", "dtype"), with_dtypes(WORLDS))
def test_rings(ring: tuple[int, str], dtype: torch.dtype, mask: rf.Causal | None, backend: str) -> None:
    given = problem(seqlen=1531 if GPU else 203, dtype=dtype, mask=mask)
    assert_accurate(given.ring(rf.ContextParallel.local(*ring), backend=backend), given, rounding=ROUNDING)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_lse_and_its_gradient(backend: str) -> None:
    given = problem(seqlen=(90, 70), dtype=DTYPE_OF[backend], mask=rf.Causal())
    results = []
    for each in (backend, "eager"):
        options = rf.AttentionOptions(return_lse=True, backend=each)
        q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
        result = rf.flash_attention(q, k, v, mask=given.mask, options=options)
        assert isinstance(result, tuple)
        out, lse = result
        dlse = torch.linspace(-1, 1, lse.numel(), device=lse.device).view_as(lse)
        results.append([lse, *torch.autograd.grad((out, lse), (q, k, v), (given.dout, dlse))])
    tolerance = 1e-5 if DTYPE_OF[backend] == torch.float32 else 3e-2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_strides_do_not_matter(backend: str) -> None:
    given = problem(seqlen=70, heads=(4, 2), dtype=DTYPE_OF[backend], mask=rf.Causal())
    transposed = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    innermost = lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)  # noqa: E731
    for change in (transposed, innermost):
        changed = given.mapped(change)
        results = [x.flash(backend=backend, deterministic=True) for x in (given, changed)]
        if backend == "hopper" and change is innermost:  # the Triton kernels run these
            assert_accurate(results[1], changed)
        else:
            assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("headdim", [32, 128])
def test_an_expanded_gradient(headdim: int, backend: str) -> None:
    """Checks a gradient that the copy engine cannot read, so that the Hopper backend calls the Triton kernels."""
    given = problem(seqlen=40, headdim=headdim, dtype=DTYPE_OF[backend])
    one = torch.ones((), dtype=given.dout.dtype, device=DEVICE)
    ones = Problem(given.q, given.k, given.v, one.expand_as(given.dout), None)
    assert_accurate(ones.flash(backend=backend), ones, rounding=ROUNDING)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("repeats", [250 if GPU else 2])
def test_repeats_are_bitwise_equal(repeats: int, backend: str) -> None:
    given = problem(seqlen=1024 if GPU else 150, dtype=torch.float16, mask=rf.Causal())
    first = given.flash(backend=backend, deterministic=True)
    for _ in range(repeats):
        again = given.flash(backend=backend, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.skipif(GPU, reason="the interpreter is for machines without a GPU")
def test_the_interpreter_refuses_bfloat16() -> None:
    given = problem(seqlen=8, dtype=torch.bfloat16)
    with pytest.raises(
        ArgumentError, match=r"backend: expected one of .* for Triton's interpreter, got torch.bfloat16"
    ):
        given.flash(backend="triton")


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_float64_goes_to_eager_and_kernels_refuse_it(backend: str) -> None:
    given = problem(seqlen=8, dtype=torch.float64)
    assert_accurate(given.flash(backend="auto"), given)
    with pytest.raises(ArgumentError, match=r"backend: expected one of .*got torch.float64"):
        given.flash(backend=backend)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.skipif(not GPU, reason="needs more memory and time than the interpreter has")
def test_offsets_beyond_int32(backend: str) -> None:
    """Checks heads of rows that begin 2^31 elements into the storage, at the end of a long sequence."""
    storage = torch.zeros(1, 2**17 + 64, 128, 128, device="cuda", dtype=torch.bfloat16)
    far = storage[:, -64:]
    far.normal_()
    q = far[:, :, :2]
    given = Problem(q, far[:, :, 2:4], far[:, :, 4:6], torch.randn_like(q), rf.Causal())
    assert storage.numel() > 2**31
    assert_accurate(given.flash(backend=backend), given, rounding=ROUNDING)
