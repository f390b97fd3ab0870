"""Prepared decoding steps: found again for the same arguments only, with the results of the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.kernels.decode_step import DecodeTiles
from ringflash.masks import Mask
from ringflash.ops import decode
from tests.kernels.triton.test_backend import DEVICE

DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32


def _inputs(capacity: int = 40, seqlen_q: int = 2, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = {"device": DEVICE, "dtype": DTYPE} | options
    q = torch.randn(3, seqlen_q, 4, 16, **options)
    k, v = (torch.randn(3, capacity, 2, 16, **options) for _ in range(2))
    return q, k, v


def _found(call: Any) -> bool:
    before = decode._known.info()
    call()
    return decode._known.info().hits > before.hits


def _lengths(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("mask", [None, rf.Causal(), rf.Tree([-1, 0]), rf.Causal() & rf.SlidingWindow(9)])
def test_found_steps_have_the_bits_of_the_operator(
    backend: str, splits: int | None, mask: Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = rf.DecodeOptions(backend=backend, splits=splits, return_lse=True)
    cases = [(_inputs(), lengths) for lengths in (_lengths(40, 7, 2), _lengths(3, 39, 20), 33, 7)]
    with monkeypatch.context() as patch:
        patch.setattr(decode, "key_of", lambda *arguments: None)
        expected = [rf.flash_decode(*x, cache_seqlens=n, mask=mask, options=options) for x, n in cases]
    for _ in range(2):
        for (x, lengths), wanted in zip(cases, expected, strict=True):
            got = rf.flash_decode(*x, cache_seqlens=lengths, mask=mask, options=options)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_step_is_found_by_everything_but_values() -> None:
    lengths = _lengths(40, 7, 2)
    rf.flash_decode(*_inputs(), cache_seqlens=lengths)
    assert _found(lambda: rf.flash_decode(*_inputs(), cache_seqlens=_lengths(1, 2, 3)))
    rf.flash_decode(*_inputs(), cache_seqlens=5)
    assert _found(lambda: rf.flash_decode(*_inputs(), cache_seqlens=6))
    q, k, v = _inputs()
    others: list[Any] = [
        lambda: rf.flash_decode(*_inputs(41), cache_seqlens=lengths),
        lambda: rf.flash_decode(*_inputs(seqlen_q=3), cache_seqlens=lengths),
        lambda: rf.flash_decode(*_inputs(), cache_seqlens=lengths.int()),
        lambda: rf.flash_decode(*_inputs(), cache_seqlens=lengths, mask=rf.Causal()),
        lambda: rf.flash_decode(*_inputs(), cache_seqlens=lengths, softmax_scale=0.3),
        lambda: rf.flash_decode(*_inputs(), cache_seqlens=lengths, options=rf.DecodeOptions(softcap=2.0)),
        lambda: rf.flash_decode(*_inputs(), cache_seqlens=lengths, options=rf.DecodeOptions(splits=2)),
        lambda: rf.flash_decode(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, cache_seqlens=lengths),
    ]
    for index, other in enumerate(others):
        assert not _found(other), index
        assert _found(other), index


WRONG: list[dict[str, Any]] = [
    {"cache_seqlens": 41},
    {"cache_seqlens": -1},
    {"cache_seqlens": True},
    {"cache_seqlens": 4.0},
    {"cache_seqlens": [1, 2, 3]},
    {"softmax_scale": "1"},
    {"mask": rf.Causal},
    {"mask": rf.KeyPadding([1, 2, 3])},
    {"return_lse": 1},
    {"options": rf.DecodeOptions(splits=0)},
    {"options": rf.DecodeOptions(splits=[1])},  # pyright: ignore[reportArgumentType]
    {"options": rf.DecodeOptions(tiles={})},  # pyright: ignore[reportArgumentType]
    {"options": rf.DecodeOptions(newest_rank=1)},
    {"options": rf.DecodeOptions(backend="eager", tiles=DecodeTiles(16, 4, 2))},
    {"options": None},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_argument_is_refused_however_often_right_ones_came(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"cache_seqlens": 1}
    for _ in range(2):
        rf.flash_decode(*_inputs(), **right)
        size = decode._known.info().size
        with pytest.raises(ArgumentError):
            rf.flash_decode(*_inputs(), **{**right, **wrong})
        assert decode._known.info().size == size


def test_inputs_that_require_gradients_are_refused_in_found_steps_too() -> None:
    q, k, v = _inputs()
    rf.flash_decode(q, k, v, cache_seqlens=3)
    with pytest.raises(ArgumentError, match="no backward"):
        rf.flash_decode(q.requires_grad_(), k, v, cache_seqlens=3)
    with torch.no_grad():
        assert _found(lambda: rf.flash_decode(q, k, v, cache_seqlens=3))


def test_lengths_on_the_cpu_are_checked_in_every_step() -> None:
    inputs = _inputs(device="cpu")
    rf.flash_decode(*inputs, cache_seqlens=torch.tensor([1, 2, 3]))
    with pytest.raises(ArgumentError, match="0 to 40"):
        rf.flash_decode(*inputs, cache_seqlens=torch.tensor([1, 2, 41]))


def test_modes_and_profilers_see_the_operator() -> None:
    inputs = _inputs()
    rf.flash_decode(*inputs, cache_seqlens=3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        rf.flash_decode(*inputs, cache_seqlens=3)
    assert "ringflash::decode" in {event.name for event in profile.events() or []}
