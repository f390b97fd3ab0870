"""The sum of dQ is converted to rows, whatever was added and in whatever order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.kernels.contract import BackwardArguments, DqSum, ForwardArguments, ScoreConfig, TileProblem
from ringflash.kernels.hopper.backend import HOPPER as BACKEND
from ringflash.kernels.hopper.config import dq_tile
from ringflash.kernels.hopper.dq_accumulator import DqAccumulator
from ringflash.layouts.layout import Chunk
from ringflash.masks import Full
from tests.helpers.accuracy import Problem
from tests.kernels.backends import GPU_BACKENDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = "hopper" in GPU_BACKENDS
SHAPES = [
    (2, 128, 3, 64),
    (1, 300, 2, 64),
    (2, 131, 2, 128),
    (1, 64, 1, 96),
    (2, 131, 2, 72),
    (1, 1, 2, 40),
    (2, 131, 2, 256),
    (1, 70, 1, 136),
]


def arrange(rows: Tensor) -> Tensor:
    """Returns `rows` (batch, nheads, tokens, columns) in the order of the kernel's sum, by definition of that order."""
    batch, nheads, tokens, columns = rows.shape
    block_m = 128 if columns == 64 else 64
    pieces = [slice(begin, begin + 64) for begin in range(0, max(columns, block_m), 64)]
    tiles = []
    for tile in rows.reshape(-1, block_m, columns):
        for piece in pieces:
            x = tile[piece, :] if columns == 64 else tile[:, piece]
            flat, width = x.new_empty(x.numel()), x.shape[1]
            for row in range(64):
                warp, second, thread = row // 16, row % 16 // 8, row % 8
                at = torch.arange(width, device=x.device)
                group, pair, which = at // 8, at % 8 // 2, at % 2
                flat[(((warp * (width // 8) + group) * 8 + thread) * 4 + pair) * 4 + second * 2 + which] = x[row]
            tiles.append(flat)
    return torch.cat(tiles).reshape(batch, nheads, tokens, columns)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_finish_gives_rows(shape: tuple[int, ...], with_rows: bool, ordered: bool) -> None:
    seqlen, headdim = shape[1], shape[3]
    q = torch.zeros(shape, dtype=torch.float16, device=DEVICE)
    total = DqAccumulator(q, hops=1, ordered=ordered)
    tiles = total.tiles(0.5, in_turns=False)
    rows = torch.randn(tiles.shape, device=DEVICE)
    tiles.copy_(arrange(rows))
    if ordered:  # every tile but the first has a stored value; the first is uninitialised memory
        assert total.counters is not None
        total.counters[1:] = 1
        columns = tiles.shape[3]
        tiles.view(-1, dq_tile(columns))[0] = torch.nan
        rows[0, 0, : dq_tile(columns) // columns] = 0.0
    expected = 0.5 * rows[:, :, :seqlen, :headdim].transpose(1, 2)
    if with_rows:  # from other kernels, for hops that the Hopper kernels refuse
        more = torch.randn(shape, device=DEVICE)
        total.rows().add_(more)
        expected = expected + more
    result = total.finish()
    assert torch.equal(result, expected.half())
    assert result.is_contiguous()


def test_nothing_added_is_contiguous_zeros() -> None:
    q = torch.full((1, 2, 5, 64), torch.nan, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    for total in (
        DqAccumulator(q, hops=1, ordered=False),
        DqAccumulator(q, hops=1, ordered=True),
        DqSum(q, torch.float32, ordered=False),
    ):
        dq = total.finish()
        assert torch.equal(dq, torch.zeros_like(q))
        assert dq.is_contiguous()  # as in the operator's fake kernel


def test_only_rows_added() -> None:
    q = torch.zeros(1, 5, 2, 64, dtype=torch.float16, device=DEVICE)
    total = DqAccumulator(q, hops=1, ordered=False)
    total.rows().add_(3.0)
    assert torch.equal(total.finish(), torch.full_like(q, 3.0))
    assert torch.equal(total.finish(), q)  # `finish` returns the sum once


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_hops_of_both_kinds_of_kernels(deterministic: bool, headdim: int) -> None:
    """Checks a sum of tiles from one hop and rows from another, which has keys that the copy engine cannot read."""
    shape, halves = (2, 1024, 4, headdim), (Chunk(0, 512), Chunk(512, 512))
    q, k, v, dout = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    score_config = ScoreConfig(headdim**-0.5)
    whole = (Chunk(0, 1024),)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 1024, device=DEVICE)
    everything = TileProblem(whole, whole, Full(), score_config)
    BACKEND.forward(ForwardArguments(q, k, v, everything, None, out, lse, first=True, last=True))
    delta = BACKEND.delta(out, dout, None)

    def gradient(change: Callable[[Tensor], Tensor]) -> Tensor:
        total = BACKEND.new_dq(q, hops=2, deterministic=deterministic)
        for chunk, keep in zip(halves, (change, Tensor.contiguous), strict=True):
            keys, values = (keep(x[:, chunk.start : chunk.stop]) for x in (k, v))
            dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (keys, values))
            tile_problem = TileProblem(whole, (chunk,), Full(), score_config)
            inputs = BackwardArguments(dout, q, keys, values, lse, delta, tile_problem)
            BACKEND.backward_dkdv(inputs, dk, dv, accumulate=False, dq=total)
        return total.finish().float()

    def misaligned(x: Tensor) -> Tensor:
        storage = x.new_empty(x.numel() + 1)
        return storage[1:].view(x.shape).copy_(x)

    same, mixed = gradient(Tensor.contiguous), gradient(misaligned)
    assert (mixed - same).norm() < 5e-3 * same.norm()


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_turns_are_left_for_the_next_hop(headdim: int) -> None:
    """Checks that all counters are 1 after every launch, and that the sum agrees with an unordered one."""
    q, dout = (torch.randn(2, 1000, 8, headdim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 1000, 2, headdim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    whole = (Chunk(0, 1000),)
    totals = [BACKEND.new_dq(q, hops=2, deterministic=deterministic) for deterministic in (True, False)]
    documents = rf.Documents([0, 300, 310, 1000])
    for mask in (Full(), rf.Causal(), rf.SlidingWindow(200, 50), documents, rf.KeyPadding([5, 0])):
        tile_problem = TileProblem(whole, whole, mask, ScoreConfig(headdim**-0.5))
        out, lse = torch.empty_like(q), torch.empty(2, 8, 1000, device=DEVICE)
        BACKEND.forward(ForwardArguments(q, k, v, tile_problem, None, out, lse, first=True, last=True))
        inputs = BackwardArguments(dout, q, k, v, lse, BACKEND.delta(out, dout, None), tile_problem)
        for total in totals:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            BACKEND.backward_dkdv(inputs, dk, dv, accumulate=False, dq=total)
        assert isinstance(totals[0], DqAccumulator)
        assert totals[0].counters is not None
        assert (totals[0].counters == 1).all()
    ordered, expected = (total.finish().float() for total in totals)
    assert (ordered - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("headdim", [64, 96, 128, 256])
def test_the_first_turn_stores(headdim: int) -> None:
    """Checks tiles that the first hop stores, tiles that the second hop stores or adds to, and tiles without a sum."""
    given = Problem.random(
        seqlen=(1000, 700), heads=(4, 4), headdim=headdim, dtype=torch.bfloat16, mask=rf.Causal(), device=DEVICE
    )
    q, k, v, dout = given.q, given.k, given.v, given.dout
    queries, score_config = (Chunk(0, 1000),), ScoreConfig(headdim**-0.5)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 1000, device=DEVICE)
    both = TileProblem(queries, (Chunk(300, 700),), rf.Causal(), score_config)
    BACKEND.forward(ForwardArguments(q, k, v, both, None, out, lse, first=True, last=True))
    delta = BACKEND.delta(out, dout, None)
    total = BACKEND.new_dq(q, hops=2, deterministic=True)
    assert isinstance(total, DqAccumulator)
    total.tiles(score_config.softmax_scale, in_turns=False).fill_(torch.nan)
    for begin, end in ((300, 700), (0, 300)):
        keys, values = k[:, begin:end], v[:, begin:end]
        dk, dv = torch.empty_like(keys), torch.empty_like(values)
        hop = TileProblem(queries, (Chunk(300 + begin, end - begin),), rf.Causal(), score_config)
        inputs = BackwardArguments(dout, q, keys, values, lse, delta, hop)
        BACKEND.backward_dkdv(inputs, dk, dv, accumulate=False, dq=total)
    dq, expected = total.finish(), given.exact[1]
    assert not dq[:, :300].any()
    assert (dq - expected).norm() < 5e-3 * expected.norm()
