"""Numbers worked by hand: two tiles of an online softmax, causal attention tile by tile, and a tree of tokens."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import ringflash as rf
from ringflash import reference
from ringflash.kernels.contract import ForwardArguments, ScoreConfig, TileProblem
from ringflash.kernels.eager.backend import EAGER
from ringflash.layouts.layout import Chunk
from ringflash.masks import Full, Mask
from ringflash.state import LN2, LOG2E
from tests.helpers.accuracy import as_tensor

# One query over two tiles of four keys, softmax_scale 1.
Q = [1.0, 0, 2, 1]
K = [[1.0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0], [2, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1]]
V = [[2.0, 1, 0, 3], [1, 0, 1, 2], [0, 2, 1, 1], [3, 1, 0, 0], [1, 3, 2, 0], [0, 1, 0, 2], [2, 0, 1, 1], [1, 0, 0, 3]]
OUT = [0.920, 2.306, 1.540, 0.452]

# Six causal queries over six keys in tiles of 2 by 3, softmax_scale 1 / sqrt(2).
CAUSAL_Q = [[1.0, 0.5], [0.8, -0.1], [0.2, 0.9], [-0.3, 0.4], [0.7, 0.6], [0.1, -0.5]]
CAUSAL_K = [[0.3, 0.7], [0.6, 0.2], [-0.1, 0.8], [0.4, -0.3], [0.9, 0.1], [0.2, 0.5]]
CAUSAL_V = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
CAUSAL_OUT = [[1.0, 0.0], [0.4489, 0.5511], [0.5436, 0.4564], [0.5855, 0.4145], [0.5063, 0.4937], [0.5244, 0.4756]]

NINE = (-1, 0, 1, 1, 2, 2, 3, 3, 4)  # parents of tokens A to I


def tensor(rows: list[list[float]], headdim: int = 0) -> Tensor:
    """Returns `rows` as (1, rows, 1, headdim), padded with zeros."""
    x = torch.tensor(rows)
    return pad(x, (0, max(0, headdim - x.shape[1])))[None, :, None]


def tile(
    state: rf.AttentionState, q: Tensor, k: Tensor, v: Tensor, at: tuple[int, int], mask: Mask, scale: float, last: bool
) -> tuple[Tensor, Tensor]:
    """Continues `state` over a tile and returns out and lse, which are written by the last tile.

    `at` has the positions of the tile's first query and first key.
    """
    q_chunk, k_chunk = (Chunk(start, x.shape[1]) for start, x in zip(at, (q, k), strict=True))
    out, lse = torch.zeros(1, q.shape[1], 1, v.shape[3]), torch.zeros(1, 1, q.shape[1])
    tile_problem = TileProblem((q_chunk,), (k_chunk,), mask, ScoreConfig(scale))
    EAGER.forward(ForwardArguments(q, k, v, tile_problem, state, out, lse, first=False, last=last))
    return out, lse


def test_two_tiles_of_an_online_softmax() -> None:
    q, k, v = tensor([Q]), tensor(K), tensor(V)
    state = rf.AttentionState.empty(1, 1, 1, 4)
    tile(state, q, k[:, :4], v[:, :4], (7, 0), Full(), 1.0, last=False)
    assert state.m.item() * LN2 == pytest.approx(4.0, abs=1e-6)  # the state's maximum is scaled for base 2
    assert state.l.item() == pytest.approx(1.320, abs=5.1e-4)
    assert state.o.flatten().tolist() == pytest.approx([0.641, 2.185, 1.135, 1.420], abs=5.1e-4)
    out, lse = tile(state, q, k[:, 4:], v[:, 4:], (7, 4), Full(), 1.0, last=True)
    assert out.flatten().tolist() == pytest.approx(OUT, abs=5.1e-4)
    scores = torch.tensor(K) @ torch.tensor(Q)
    assert lse.item() == pytest.approx(torch.logsumexp(scores, 0).item(), abs=1e-6)


def test_two_tiles_that_are_merged() -> None:
    states = []
    for keys in (slice(0, 4), slice(4, 8)):
        scores = LOG2E * torch.tensor(K)[keys] @ torch.tensor(Q)
        weights = torch.exp2(scores - scores.max())
        row = weights @ torch.tensor(V)[keys]
        states.append(rf.AttentionState(scores.max().view(1, 1, 1), weights.sum().view(1, 1, 1), row.view(1, 1, 1, 4)))
    out, _ = states[0].merge(states[1]).finalize()
    assert out.flatten().tolist() == pytest.approx(OUT, abs=5.1e-4)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_two_tiles_by_the_public_function(backend: str) -> None:
    """Pads headdim 4 to 16 with zeros, which add nothing to a score; softmax_scale is given explicitly."""
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    q, k, v = (tensor(x, 16).to(device) for x in ([Q], K, V))
    options = rf.AttentionOptions(backend=backend)
    out = as_tensor(rf.flash_attention(q, k, v, softmax_scale=1.0, options=options))
    assert out.flatten()[:4].tolist() == pytest.approx(OUT, abs=5.1e-4)


def test_causal_tiles_of_2_by_3() -> None:
    q, k, v = tensor(CAUSAL_Q), tensor(CAUSAL_K), tensor(CAUSAL_V)
    rows = []
    for first in (0, 2, 4):
        state, queries = rf.AttentionState.empty(1, 2, 1, 2), q[:, first : first + 2]
        tile(state, queries, k[:, :3], v[:, :3], (first, 0), rf.Causal(), 2**-0.5, last=False)
        out, _ = tile(state, queries, k[:, 3:], v[:, 3:], (first, 3), rf.Causal(), 2**-0.5, last=True)
        rows.append(out)
    torch.testing.assert_close(torch.cat(rows, 1)[0, :, 0], torch.tensor(CAUSAL_OUT), rtol=0, atol=5.1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_causal_on_rings(backend: str, world: int) -> None:
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    context = rf.ContextParallel.local(world)
    q, k, v = (context.shard(tensor(x, 16).to(device)) for x in (CAUSAL_Q, CAUSAL_K, CAUSAL_V))
    options = rf.AttentionOptions(backend=backend)
    shard = as_tensor(
        rf.ring_attention(q, k, v, context, mask=rf.Causal(), softmax_scale=1 / math.sqrt(2), options=options)
    )
    out = context.unshard(shard)[0, :, 0, :2].cpu()
    torch.testing.assert_close(out, torch.tensor(CAUSAL_OUT), rtol=0, atol=5.1e-5)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_tree_of_nine_tokens(backend: str) -> None:
    """Shows the mask's rows: scores of 0 give equal weights to the visible tokens, and the values are the identity."""
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    q, v = torch.zeros(1, 9, 1, 16, device=device), torch.eye(9, 16, device=device)[None, :, None]
    options = rf.AttentionOptions(backend=backend)
    out = as_tensor(rf.flash_attention(q, q, v, mask=rf.Tree(NINE), options=options))[0, :, 0]
    seen = ["".join(name for name, weight in zip("ABCDEFGHI", row, strict=False) if weight > 0) for row in out.tolist()]
    assert seen == ["A", "AB", "ABC", "ABD", "ABCE", "ABCF", "ABDG", "ABDH", "ABCEI"]
    assert torch.equal(out.sum(1).cpu().round(decimals=6), torch.ones(9))
    expected, _ = reference.attention(q, q, v, mask=rf.Tree(NINE))
    torch.testing.assert_close(out, expected[0, :, 0])
