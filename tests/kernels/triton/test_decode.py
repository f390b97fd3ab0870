"""The Triton decoding kernels are within the bars, on a GPU or else in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.kernels.decode_step import Partials, merge_tree, sight_of
from ringflash.kernels.triton.decode_config import decode_config, splits_for
from ringflash.masks import Full, Mask
from tests.kernels.triton.test_backend import DEVICE, DTYPES, GPU, ROUNDING
from tests.ops.test_decode import MASKS, NINE, Decoding, assert_decoded, modes

SPLITS = [1, 3] if not GPU else [None, 1, 3, 16]


def problem(**given: Any) -> Decoding:
    return Decoding.random(**{"device": DEVICE, "heads": (2, 1), "capacity": 203, "lengths": (203, 120), **given})


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(("seqlen_q", "mask"), MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype: torch.dtype, seqlen_q: int, mask: Mask | None, splits: int | None) -> None:
    given = problem(seqlen_q=seqlen_q, mask=mask, dtype=dtype)
    assert_decoded(given.decode(backend="triton", splits=splits), given, rounding=ROUNDING)


@pytest.mark.parametrize("headdims", [(16, 16), (40, 24), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_headdims(dtype: torch.dtype, headdims: tuple[int, int]) -> None:
    given = problem(headdims=headdims, dtype=dtype)
    assert_decoded(given.decode(backend="triton", splits=2), given, rounding=ROUNDING)


@pytest.mark.parametrize(("heads", "seqlen_q"), [((4, 4), 1), ((6, 2), 3), ((8, 1), 9)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_and_several_tiles_of_rows(dtype: torch.dtype, heads: tuple[int, int], seqlen_q: int) -> None:
    mask = rf.Tree(NINE) if seqlen_q == 9 else rf.Causal()
    given = problem(heads=heads, seqlen_q=seqlen_q, mask=mask, dtype=dtype)
    assert_decoded(given.decode(backend="triton", splits=1), given, rounding=ROUNDING)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mode", range(4))
def test_modes(mode: int, splits: int) -> None:
    rest = modes(2, 3, DEVICE)[mode]
    given = problem(seqlen_q=2, mask=rf.Causal(), lengths=(0, 1, 203), dtype=torch.float32, **rest)
    assert_decoded(given.decode(backend="triton", splits=splits), given, rounding=ROUNDING)


def test_lengths_from_none_to_all() -> None:
    given = problem(seqlen_q=5, mask=rf.Causal(), lengths=(0, 3, 64, 65, 203), dtype=torch.float32)
    assert_decoded(given.decode(backend="triton", splits=4), given, rounding=ROUNDING)


def test_a_chain_of_64_tokens_is_causal() -> None:
    given = problem(seqlen_q=64, mask=rf.Causal(), lengths=(150,), dtype=torch.float32)
    chain = replace(given, mask=rf.Tree(list(range(-1, 63))))
    for a, b in zip(chain.decode(backend="triton", splits=1), given.decode(backend="triton", splits=1), strict=True):
        assert torch.equal(a, b)


def test_a_cache_of_any_strides() -> None:
    given = problem(heads=(4, 2), dtype=torch.float32)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (given.k, given.v))
    changed = replace(given, k=k, v=v)
    for a, b in zip(changed.decode(backend="triton", splits=2), given.decode(backend="triton", splits=2), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("repeats", [250 if GPU else 1])
def test_repeats_are_bitwise_equal(repeats: int) -> None:
    given = problem(dtype=torch.float16)
    first = given.decode(backend="triton", splits=8)
    for _ in range(repeats):
        again = given.decode(backend="triton", splits=8)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("splits", [1, 2])
def test_a_sharded_cache(splits: int) -> None:
    given = problem(seqlen_q=5, mask=rf.Causal(), lengths=(200,), capacity=200, dtype=torch.float32)
    given = replace(given, sinks=torch.tensor([1.0, -1.0], device=DEVICE))
    shards = replace(given, lengths=torch.tensor([[100], [100]], device=DEVICE))
    got = shards.decode(backend="triton", splits=splits, context=rf.ContextParallel.local(2))
    assert_decoded(got, given, rounding=ROUNDING)


def test_other_tiles() -> None:
    given = problem(dtype=torch.float32)
    assert_decoded(given.decode(backend="triton", splits=2, tiles=rf.DecodeTiles(16, 2, 2)), given, rounding=ROUNDING)


def test_merging_as_a_tree() -> None:
    states = [
        rf.AttentionState(torch.randn(1, 2, 3), torch.rand(1, 2, 3) + 1, torch.randn(1, 3, 2, 16)) for _ in range(7)
    ]
    partials = Partials.of(states)
    assert partials.count == 7
    for state, again in zip(states, partials.states(), strict=True):
        assert all(torch.equal(getattr(state, x), getattr(again, x)) for x in "mlo")
    merged, one_by_one = merge_tree(states), states[0]
    for state in states[1:]:
        one_by_one = one_by_one.merge(state)
    torch.testing.assert_close(merged.finalize(), one_by_one.finalize(), rtol=1e-6, atol=1e-6)


def test_sight() -> None:
    assert sight_of(Full(), 5, 100).is_uniform(5, 100)
    assert sight_of(rf.Causal(), 1, 100).is_uniform(1, 100)
    assert not sight_of(rf.Causal(), 2, 100).is_uniform(2, 100)
    assert sight_of(rf.Tree([-1]), 1, 100).tree == ()
    assert sight_of(rf.Tree([-1, 0, 0]), 3, 100).tree == (0b1, 0b11, 0b101)
    words = sight_of(rf.Tree([-1] * 64), 64, 100).tree
    assert words[62:] == (2**62, -(2**63))


def test_splits_fill_the_device() -> None:
    assert splits_for(64, 131072, 396) == 6  # one wave fills 384 of 396 slots
    assert splits_for(4 * 396, 131072, 396) == 1
    assert 100 < splits_for(1, 131072, 396) <= 128
    assert splits_for(1, 200, 396) == 1
    for programs in (1, 3, 8, 64, 100, 400):
        splits = splits_for(programs, 2**20, 264)
        waves = programs * splits / 264
        assert splits > 100 or waves / -(-waves // 1) >= 0.8


def test_rows_of_a_tile() -> None:
    config = decode_config(128, 128, torch.bfloat16, None)
    assert [config.block_m(rows) for rows in (1, 16, 17, 40, 64, 500)] == [16, 16, 32, 64, 64, 64]


@pytest.mark.skipif(not GPU, reason="CUDA graphs and streams")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_cuda_graph_follows_the_lengths_and_nothing_waits_for_the_gpu() -> None:
    given = problem(seqlen_q=9, mask=rf.Tree(NINE), lengths=(120, 50), dtype=torch.float16)
    clean = replace(given, k=torch.randn_like(given.k), v=torch.randn_like(given.v))
    clean.decode(check_lengths=True)  # compiles and uploads the tree
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        clean.decode(check_lengths=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = clean.decode()
    for lengths in ((203, 9), (0, 130)):
        clean.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert_decoded(result, clean, rounding=ROUNDING)


@pytest.mark.skipif(not GPU, reason="needs more memory than the interpreter's machine has")
def test_offsets_beyond_int32() -> None:
    """Checks the last sequence and the last rows of a cache of more than 2^31 elements."""
    capacity = 2**18 + 64
    cache = torch.zeros(2, capacity, 64, 128, device="cuda", dtype=torch.bfloat16)
    cache[:, -300:].normal_()
    assert cache.stride(0) > 2**31
    q = torch.randn(2, 1, 64, 128, device="cuda", dtype=torch.bfloat16)
    out = rf.flash_decode(q, cache, cache, cache_seqlens=capacity, mask=rf.SlidingWindow(299, 0))
    assert isinstance(out, Tensor)
    tail = cache[:, -300:].clone()
    near = Decoding(q, tail, tail, torch.tensor([300, 300], device="cuda"), None)
    assert_decoded((out, near.decode()[1]), near, rounding=ROUNDING)
