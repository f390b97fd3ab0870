"""Choice of the backward by backend "auto" on sm_90; no kernel runs."""

from itertools import product

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.kernels import fallback
from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.eager.backend import EagerBackend
from ringflash.kernels.hopper.backend import AUTO, HOPPER
from ringflash.kernels.hopper.config import adds_in_turns
from ringflash.kernels.select import _in_triton
from ringflash.kernels.triton import backend
from ringflash.kernels.triton.backend import TRITON
from ringflash.masks import Full, Mask
from tests.helpers.accuracy import Problem, assert_accurate
from tests.helpers.strategies import block_sparse
from tests.kernels.triton.test_backend import DEVICE, GPU, ROUNDING

PLAIN = ScoreConfig(softmax_scale=0.125)


@pytest.mark.parametrize(
    ("headdim", "batch", "seqlen_q", "seqlen_k", "nheads_kv", "in_one"),
    [
        (64, 1, 1024, 1024, 16, False),
        (64, 1, 1152, 1152, 16, True),
        (64, 8, 1024, 1024, 16, True),
        (64, 8, 256, 256, 16, False),
        (72, 8, 256, 256, 16, True),
        (64, 1, 1024, 1024, 8, False),
        (64, 1, 2048, 2048, 8, True),
        (128, 1, 512, 512, 16, False),
        (128, 1, 1024, 1024, 8, False),
        (128, 1, 1024, 1024, 16, True),
        (128, 64, 128, 128, 16, True),
        (64, 1000, 64, 64, 16, False),  # at most half a tile of rows
        (128, 1000, 64, 64, 16, True),
        (64, 8, 16, 1024, 16, True),
        (64, 1, 1024, 16, 8, False),
        (64, 1, 4096, 4096, 1, True),  # more rows than any measured case of little work
        (192, 2, 4096, 4096, 16, True),
    ],
)
def test_a_backward_of_little_work_is_two_kernels(
    headdim: int, batch: int, seqlen_q: int, seqlen_k: int, nheads_kv: int, in_one: bool
) -> None:
    q = torch.empty(batch, seqlen_q, 16, headdim, dtype=torch.bfloat16, device="meta")
    v = torch.empty(batch, seqlen_k, nheads_kv, headdim, dtype=torch.bfloat16, device="meta")
    for mask, deterministic in product((Full(), rf.Causal()), (False, True)):
        assert AUTO.fuses_dq(q, v, mask, PLAIN, hops=1, deterministic=deterministic) == in_one
        assert AUTO.fuses_dq(q, v, mask, PLAIN, hops=2, deterministic=deterministic)


@pytest.mark.parametrize(
    ("rows", "nheads_kv", "headdim", "in_turns"),
    [(768, 16, 64, True), (769, 16, 64, False), (1024, 16, 96, True), (1025, 16, 128, False), (2048, 8, 128, True)],
)
def test_short_sequences_add_in_turns(rows: int, nheads_kv: int, headdim: int, in_turns: bool) -> None:
    assert adds_in_turns(rows, 16, nheads_kv, headdim) == in_turns


@pytest.mark.parametrize(("mask", "in_one"), [(block_sparse(64, 32, seed=0, density=0.5), True), (Full(), False)])
def test_a_short_one_is_as_triton_has_it(mask: Mask, in_one: bool) -> None:
    q = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta")
    assert AUTO.fuses_dq(q, q, mask, PLAIN, hops=1, deterministic=False) == in_one
    assert not AUTO.fuses_dq(q, q, mask, PLAIN, hops=1, deterministic=True)


def test_only_auto_leaves_it_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "check_supported", lambda device, dtype: None)
    monkeypatch.setattr(fallback, "remedy", lambda device: "Use another GPU.")
    for missing, auto in ((None, AUTO), ("they need another", TRITON)):
        monkeypatch.setattr(fallback, "why_not", lambda device, missing=missing: missing)
        assert _in_triton.__wrapped__("auto", torch.device("cuda"), torch.bfloat16) is auto
        assert _in_triton.__wrapped__("triton", torch.device("cuda"), torch.bfloat16) is TRITON
    monkeypatch.setattr(fallback, "why_not", lambda device: None)
    assert _in_triton.__wrapped__("hopper", torch.device("cuda"), torch.bfloat16) is HOPPER


def test_a_grouped_ring_asks_with_the_keys_that_it_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[int, int]] = []

    def asked(q: Tensor, v: Tensor, *given: object, **named: object) -> bool:
        rows.append((q.shape[1], v.shape[1]))
        return False

    monkeypatch.setattr(EagerBackend, "fuses_dq", staticmethod(asked))
    Problem.random(seqlen=48, headdim=16, mask=None).ring(rf.ContextParallel.local(3, hops="grouped"), backend="eager")
    assert rows == [(16, 48)] * 3


@pytest.mark.skipif(not GPU, reason="what a GPU is given")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", [None, rf.Causal(), rf.Causal() & rf.Documents([0, 128, 500])])
@pytest.mark.parametrize(("headdim", "heads"), [(64, (4, 4)), (128, (4, 4)), (64, (4, 2))])
def test_short_sequences_within_the_bars(
    headdim: int, heads: tuple[int, int], mask: Mask | None, deterministic: bool
) -> None:
    """Checks calls in which the backward may run in another backend than the forward that it continues."""
    problem = Problem.random(seqlen=500, heads=heads, headdim=headdim, dtype=torch.bfloat16, mask=mask, device=DEVICE)
    assert_accurate(problem.flash(deterministic=deterministic), problem, rounding=ROUNDING)
    for hops in ("ring", "grouped"):
        context = rf.ContextParallel.local(3, hops=hops)
        assert_accurate(problem.ring(context, deterministic=deterministic), problem, rounding=ROUNDING)
