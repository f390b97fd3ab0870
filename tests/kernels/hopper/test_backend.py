"""Calls that the Hopper backend runs itself, and the arguments of its launchers; no kernel runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.kernels.contract import BackwardArguments, ForwardArguments, ScoreConfig, TileProblem
from ringflash.kernels.eager.backend import EAGER
from ringflash.kernels.hopper import backend
from ringflash.kernels.hopper.backend import HOPPER
from ringflash.kernels.select import choose
from ringflash.kernels.triton.backend import TRITON, TritonBackend
from ringflash.layouts.layout import Chunk
from ringflash.masks import Full, Mask
from ringflash.state import AttentionState
from tests.helpers.strategies import block_sparse

CPU = torch.device("cpu")
SEQLEN = 48
WHOLE = (Chunk(0, SEQLEN),)
PLAIN = ScoreConfig(softmax_scale=0.125)


def call(
    headdim: int = 64,
    headdim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    mask: Mask | None = None,
    chunks: tuple[Chunk, ...] = WHOLE,
    carried: bool = False,
    change: Callable[[Tensor], Tensor] = lambda x: x,
    **score_config: Any,
) -> tuple[list[Tensor], TileProblem, bool]:
    """Returns q, k and v of a hop, its tile problem, and whether a state is carried from an earlier hop."""
    q, k = (change(torch.ones(2, SEQLEN, heads, headdim, dtype=dtype)) for heads in (4, 2))
    v = change(torch.ones(2, SEQLEN, 2, headdim_v or headdim, dtype=dtype))
    return [q, k, v], TileProblem(chunks, chunks, mask or Full(), replace(PLAIN, **score_config)), carried


Call = tuple[list[Tensor], TileProblem, bool]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Replaces the launchers and returns a list of their calls, each with its arguments."""
    seen = []

    def spy(name: str) -> Callable[..., None]:
        return lambda *given, **named: seen.append((name, given, named))

    monkeypatch.setattr("ringflash.kernels.hopper.calls.forward", spy("hopper"))
    monkeypatch.setattr("ringflash.kernels.hopper.calls.backward", spy("hopper"))
    for name in ("forward", "backward_dq", "backward_dkdv"):
        monkeypatch.setattr(TritonBackend, name, staticmethod(spy("portable")))
    return seen


def run_forward(given: Call) -> None:
    (q, k, v), tile_problem, carried = given
    out, lse = v.new_zeros((*q.shape[:3], v.shape[3])), torch.zeros(2, 4, SEQLEN)
    state = AttentionState(lse, lse, out.float()) if carried else None
    HOPPER.forward(ForwardArguments(q, k, v, tile_problem, state, out, lse, first=not carried, last=True))


def run_backward(given: Call, *, deterministic: bool = False) -> None:
    (q, k, v), tile_problem, carried = given
    dout, lse = v.new_ones((*q.shape[:3], v.shape[3])), torch.zeros(2, 4, SEQLEN)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    dq = HOPPER.new_dq(q, hops=1, deterministic=deterministic)
    inputs = BackwardArguments(dout, q, k, v, lse, lse, tile_problem)
    HOPPER.backward_dkdv(inputs, dk, dv, accumulate=carried, dq=dq)


def innermost(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def shifted(x: Tensor) -> Tensor:
    """Returns a copy of `x` at an address that is no multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


KNOWN: dict[str, Call] = {
    "full": call(),
    "float16": call(dtype=torch.float16),
    "causal": call(mask=rf.Causal()),
    "window": call(mask=rf.SlidingWindow(5, 3)),
    "padding and documents": call(mask=rf.KeyPadding([SEQLEN, 3]) & rf.Documents([0, 7, SEQLEN])),
    "two chunks": call(chunks=(Chunk(0, 24), Chunk(72, 24)), carried=True),
    "negative queries": call(mask=rf.Causal(), chunks=(Chunk(-8, SEQLEN),)),
    "narrow": call(headdim=8),
    "odd": call(headdim=40),
    "128 in a ring": call(headdim=128, carried=True),
    "256": call(headdim=256),
    "heads before rows": call(change=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "some of the heads": call(change=lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]]),
}
UNKNOWN: dict[str, Call] = {
    "softcap": call(softcap=20.0),
    "alibi": call(alibi_slopes=torch.ones(1, 4)),
    "dropout": call(dropout_p=0.1),
    "softmax_scale of 0": call(softmax_scale=0.0),
    "bitmap": call(mask=rf.Causal() & block_sparse(SEQLEN, 16, seed=0, density=0.5)),
    "tree": call(mask=rf.Tree([-1, 0, 0], start=9)),
    "wider values": call(headdim=64, headdim_v=128),
    "narrower values": call(headdim=128, headdim_v=64),
    "float32": call(dtype=torch.float32),
    "wider than 256": call(headdim=264),
    "rows of 72 bytes": call(headdim=36),
    "chunks out of order": call(chunks=(Chunk(24, 24), Chunk(0, 24))),
    "headdim not innermost": call(change=innermost),
    "unaligned": call(change=shifted),
    "expanded": call(change=lambda x: x[:, :1].expand(x.shape)),
}


def run_deterministic(given: Call) -> None:
    run_backward(given, deterministic=True)


@pytest.mark.parametrize("run", [run_forward, run_backward, run_deterministic])
@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "hopper") for name in KNOWN), *((name, "portable") for name in UNKNOWN)]
)
def test_routes(calls: list[Any], name: str, kernels: str, run: Callable[[Call], None]) -> None:
    given = KNOWN[name] if kernels == "hopper" else UNKNOWN[name]
    run(given)
    (q, _, v), tile_problem, _ = given
    deterministic = run is run_deterministic
    single = kernels == "hopper" or TRITON.fuses_dq(
        q, v, tile_problem.mask, tile_problem.score_config, hops=1, deterministic=deterministic
    )
    assert [kernels_called for kernels_called, _, _ in calls] == [kernels] * (1 if run is run_forward or single else 2)


def test_routes_of_sinks_and_of_wide_heads(calls: list[Any]) -> None:
    """Checks that sinks, and wide heads in a ring, keep only the forward from the Hopper kernels."""
    for given in (call(sinks=torch.zeros(4)), call(headdim=256, carried=True)):
        run_forward(given)
        run_backward(given)
    assert [kernels for kernels, _, _ in calls] == ["portable", "hopper"] * 2


def test_a_gradient_that_is_expanded_goes_to_portable(calls: list[Any]) -> None:
    (q, k, v), tile_problem, _ = call()
    lse = torch.zeros(2, 4, SEQLEN)
    dout = torch.ones((), dtype=q.dtype).expand_as(q)
    HOPPER.backward_dkdv(BackwardArguments(dout, q, k, v, lse, lse, tile_problem), k, v, accumulate=False)
    assert [kernels for kernels, _, _ in calls] == ["portable"]


def test_sums_of_dq_that_are_mostly_padding(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a large dq sum goes to the Triton kernels if most of it pads many short sequences to whole tiles."""
    given = call(headdim=16)
    run_backward(given)
    monkeypatch.setattr(backend, "MOST_PADDING", 0)
    run_backward(given)
    assert [kernels for kernels, _, _ in calls] == ["hopper", *["portable"] * 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of the Triton backend have it on GPUs")
@pytest.mark.parametrize("headdim", [64, 72, 128])
@pytest.mark.parametrize(
    "mask", [rf.Causal(), rf.Documents([0, 7, SEQLEN]), block_sparse(SEQLEN, 16, seed=0, density=0.5)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_goes_to_portable_with_dq_comes_out_right(deterministic: bool, mask: Mask, headdim: int) -> None:
    """Checks calls with a dq sum in the Triton kernels, where one pass may be slower than two or have no tile sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, headdim), (4, headdim), (2, headdim), (2, headdim)]
    dout, q, k, v = (torch.randn(2, SEQLEN, *size, generator=generator) for size in sizes)
    tile_problem = TileProblem(WHOLE, WHOLE, mask, PLAIN)
    out, lse = torch.empty_like(q), torch.empty(2, 4, SEQLEN)
    EAGER.forward(ForwardArguments(q, k, v, tile_problem, None, out, lse, first=True, last=True))
    inputs = BackwardArguments(dout, q, k, v, lse, EAGER.delta(out, dout, None), tile_problem)
    results = []
    for kernels in (HOPPER, EAGER):
        dq, dk, dv = kernels.new_dq(q, hops=1, deterministic=deterministic), torch.empty_like(k), torch.empty_like(v)
        kernels.backward_dkdv(inputs, dk, dv, accumulate=False, dq=dq)
        results.append([dq.finish(), dk, dv])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_single_pass_is_everywhere_that_the_backward_is(calls: list[Any], name: str) -> None:
    (q, _, v), tile_problem, _ = given = (KNOWN | UNKNOWN)[name]
    run_backward(given)
    if calls[0][0] == "hopper":
        for deterministic in (False, True):
            assert HOPPER.fuses_dq(
                q, v, tile_problem.mask, tile_problem.score_config, hops=1, deterministic=deterministic
            )


@pytest.mark.parametrize("mask", [rf.Causal() & rf.Documents([0, 7, SEQLEN]), rf.KeyPadding([SEQLEN - 8, 0])])
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_inputs_are_not_copied(calls: list[Any], run: Callable[[Call], None], mask: Mask) -> None:
    given = call(mask=mask)
    run(given)
    ((_, (arguments, *_), _),) = calls
    assert [x for x in given[0] if not any(x is argument for argument in arguments)] == []


def test_hopper_refuses_a_cpu() -> None:
    with pytest.raises(ArgumentError, match=r"^backend: expected (what the hopper kernels run on|CUDA tensors)"):
        choose("hopper", torch.zeros(1, 4, 2, 16))


def test_auto_is_eager_on_a_cpu() -> None:
    assert choose("auto", torch.zeros(1, 4, 2, 16)) is EAGER


@pytest.mark.parametrize("name", ["decode", "decode_splits", "decode_partial", "decode_combine"])
def test_decoding_is_that_of_the_triton_backend(name: str) -> None:
    assert getattr(HOPPER, name) is getattr(TRITON, name)
