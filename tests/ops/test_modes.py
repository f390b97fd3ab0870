"""Modes of attention, exact in float64: alone and combined, under every mask, on one device and on rings."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash import reference
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Mask
from tests.helpers.accuracy import Problem, as_tensor, assert_accurate
from tests.helpers.pairs import all_pairs
from tests.helpers.strategies import masks, modes

SEQLEN = 70
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "dropout": {"dropout": rf.Dropout(0.3, seed=2**62 + 5)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": 1},
    "alibi of each sequence": {"alibi": 2},
    "sinks": {"sinks": True},
    "headdim_v": {"headdim": (48, 32)},
    "wider headdim_v": {"headdim": (24, 40)},
    "softmax_scale": {"softmax_scale": 0.3},
}
MODES["all"] = {name: value for mode in MODES.values() for name, value in mode.items()}
MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": rf.Causal(),
    "sparse": rf.Causal() & rf.Documents([0, 13, 13, 50, SEQLEN]),
}


def problem(mode: str, mask: Mask | None = MASKS["causal"], **given: Any) -> Problem:
    return Problem.random(
        **{"seqlen": SEQLEN, "mask": mask, "headdim": 16, "dtype": torch.float64, **MODES[mode], **given}
    )


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", MODES)
def test_flash(mode: str, mask: str, deterministic: bool) -> None:
    given = problem(mode, MASKS[mask])
    assert_accurate(given.flash(deterministic=deterministic), given)


@pytest.mark.parametrize("seqlen", [(31, 70), (70, 31), (300, 270)])
@pytest.mark.parametrize("mode", MODES)
def test_fewer_and_more_queries_than_keys(mode: str, seqlen: tuple[int, int]) -> None:
    given = problem(mode, seqlen=seqlen)
    assert_accurate(given.flash(), given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [(3, 3), (4, 1)])
def test_heads(mode: str, heads: tuple[int, int]) -> None:
    given = problem(mode, heads=heads)
    assert_accurate(given.flash(), given)


@pytest.mark.parametrize(
    ("mode", "layout", "world", "mask", "deterministic"),
    all_pairs([*MODES], LAYOUTS, [2, 3, 5], [*MASKS], [True, False]),
)
def test_rings(mode: str, layout: str, world: int, mask: str, deterministic: bool) -> None:
    given = problem(mode, MASKS[mask])
    assert_accurate(given.ring(rf.ContextParallel.local(world, layout), deterministic=deterministic), given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype: torch.dtype, mode: str) -> None:
    given = problem(mode, dtype=dtype, seqlen=150)
    for got in (given.flash(), given.ring(rf.ContextParallel.local(3))):
        assert_accurate(got, given)


@settings(deadline=None, max_examples=50)
@given(mode=modes(), mask=masks(40), seqlen_q=st.integers(1, 50), deterministic=st.booleans())
def test_any_modes_and_masks(mode: dict[str, Any], mask: Mask, seqlen_q: int, deterministic: bool) -> None:
    given = Problem.random(seqlen=(seqlen_q, 40), mask=mask, dtype=torch.float64, **mode)
    assert_accurate(given.flash(deterministic=deterministic), given)


@settings(deadline=None, max_examples=50)
@given(mode=modes(), mask=masks(40), world=st.integers(2, 5), layout=st.sampled_from(LAYOUTS), fast=st.booleans())
def test_any_modes_and_masks_on_rings(mode: dict[str, Any], mask: Mask, world: int, layout: str, fast: bool) -> None:
    given = Problem.random(seqlen=40, mask=mask, dtype=torch.float64, **mode)
    assert_accurate(given.ring(rf.ContextParallel.local(world, layout), deterministic=not fast), given)


def _lse(given: Problem, context: rf.ContextParallel | None = None) -> Tensor:
    options = rf.AttentionOptions(return_lse=True, alibi_slopes=given.alibi_slopes, sinks=given.sinks)
    rest: dict[str, Any] = {"mask": given.mask, "softcap": given.softcap, "dropout": given.dropout, "options": options}
    rest["softmax_scale"] = given.softmax_scale
    if context is None:
        return rf.flash_attention(given.q, given.k, given.v, **rest)[1]
    q, k, v = (context.shard(x) for x in (given.q, given.k, given.v))
    return context.unshard(rf.ring_attention(q, k, v, context, **rest)[1], dim=2)


@pytest.mark.parametrize("mode", MODES)
def test_lse(mode: str) -> None:
    """Checks that lse includes the sinks and ignores dropout."""
    given = problem(mode, MASKS["sparse"])
    score_config: dict[str, Any] = {"mask": given.mask, "softmax_scale": given.softmax_scale, "softcap": given.softcap}
    expected = reference.attention(
        given.q, given.k, given.v, **score_config, alibi_slopes=given.alibi_slopes, sinks=given.sinks
    )[1]
    for context in (None, rf.ContextParallel.local(3)):
        torch.testing.assert_close(_lse(given, context), expected, rtol=0, atol=1e-12)


def test_lse_counts_the_sink_as_a_key() -> None:
    given = problem("sinks")
    assert given.sinks is not None
    without = _lse(problem("none"))
    torch.testing.assert_close(_lse(given), torch.logaddexp(without, given.sinks[:, None].expand_as(without)))


@pytest.mark.parametrize("context", [None, rf.ContextParallel.local(2)])
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_see_nothing(mode: str, context: rf.ContextParallel | None) -> None:
    """Checks output 0, lse -inf and gradient 0 with sinks too: a sink takes weight from keys, and here are no keys."""
    given = problem(mode, rf.KeyPadding([20, 0]) & rf.Documents([0, 20, SEQLEN]))
    out, *grads = given.flash() if context is None else given.ring(context)
    for rows in (out[:, 20:], out[1], grads[0][:, 20:], grads[0][1], *(x[1] for x in grads[1:3])):
        assert torch.equal(rows, torch.zeros_like(rows))
    lse = _lse(given, context)
    assert (lse[:, :, 20:] == -math.inf).all()
    assert (lse[1] == -math.inf).all()
    assert torch.isfinite(lse[0, :, :20]).all()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("world", [0, 2])
def test_gradcheck_of_all_at_once(world: int, fast: bool) -> None:
    context = rf.ContextParallel.local(max(world, 1))
    q = torch.randn(1, 5, 2, 16, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 5, 1, 16, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 5, 1, 18, dtype=torch.float64, requires_grad=True)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([[0.5, 0.25]])

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        options = rf.AttentionOptions(return_lse=True, deterministic=not fast, alibi_slopes=slopes, sinks=sinks)
        rest: dict[str, Any] = {"mask": rf.Causal(), "softcap": 1.5, "dropout": rf.Dropout(0.3, 1), "options": options}
        return rf.ring_attention(q, k, v, context, **rest) if world else rf.flash_attention(q, k, v, **rest)

    assert torch.autograd.gradcheck(attention, (q, k, v, sinks), fast_mode=bool(world))


def test_sinks_of_a_lower_precision_get_their_gradient_in_it() -> None:
    given = problem("sinks", dtype=torch.bfloat16)
    assert given.sinks is not None
    sinks = given.sinks.clone().requires_grad_()
    assert sinks.dtype == torch.bfloat16
    out = rf.flash_attention(given.q, given.k, given.v, mask=given.mask, options=rf.AttentionOptions(sinks=sinks))
    as_tensor(out).backward(given.dout)
    assert sinks.grad is not None
    assert sinks.grad.dtype == torch.bfloat16
    torch.testing.assert_close(sinks.grad.double(), given.exact[4], rtol=2**-7, atol=0.02)


def test_sinks_that_swallow_everything_and_nothing() -> None:
    given = problem("none")
    call = lambda logit: as_tensor(  # noqa: E731
        rf.flash_attention(
            given.q, given.k, given.v, options=rf.AttentionOptions(sinks=torch.full((4,), logit, dtype=torch.float64))
        )
    )
    without = as_tensor(rf.flash_attention(given.q, given.k, given.v))
    assert torch.equal(call(-math.inf), without)
    assert call(1e4).abs().max() == 0


def test_slopes_are_those_of_all_sequences_or_of_each() -> None:
    given = problem("alibi")
    assert given.alibi_slopes is not None
    call = lambda slopes: as_tensor(  # noqa: E731
        rf.flash_attention(given.q, given.k, given.v, options=rf.AttentionOptions(alibi_slopes=slopes))
    )
    assert torch.equal(call(given.alibi_slopes), call(given.alibi_slopes.expand(2, 4)))


def test_no_dropout_is_none() -> None:
    given = problem("none")
    dropped = as_tensor(rf.flash_attention(given.q, given.k, given.v, mask=given.mask, dropout=rf.Dropout(0.0)))
    assert torch.equal(dropped, as_tensor(rf.flash_attention(given.q, given.k, given.v, mask=given.mask)))


def test_what_is_asked_of_torch_holds_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that options.deterministic None follows torch.use_deterministic_algorithms."""
    from ringflash.ops.one_device import OneDevice

    asked: list[bool] = []

    def forward(of: OneDevice, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(of.call.deterministic)
        return q, q

    monkeypatch.setattr(OneDevice, "forward", forward)
    q = torch.zeros(1, 4, 1, 16)
    for enabled in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda enabled=enabled: enabled)
        for said in (None, False, True):
            rf.flash_attention(q, q, q, options=rf.AttentionOptions(deterministic=said))
    assert asked == [False, False, True, True, False, True]
