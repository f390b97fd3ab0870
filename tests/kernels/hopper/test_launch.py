"""Number of heads with tiles mixed in one wave of a launch."""

import pytest

from ringflash.kernels.hopper.launch import TOGETHER_BYTES, TOGETHER_TILES, choose_heads_per_wave

MIB = 2**20


def test_what_they_stream_stays_in_cache() -> None:
    size = choose_heads_per_wave(ntiles=1000, heads=64, streamed_bytes=2 * MIB, programs=132, waves=2)
    assert size == TOGETHER_BYTES // (2 * MIB)


@pytest.mark.parametrize("waves", [0.9, 2, 5.3])
@pytest.mark.parametrize("ntiles", [1, 8, 32, 100])
def test_their_tiles_fill_the_gpu(ntiles: int, waves: float) -> None:
    assert (
        choose_heads_per_wave(ntiles, heads=1000, streamed_bytes=2**40, programs=132, waves=waves) * ntiles
        >= waves * 132
    )


@pytest.mark.parametrize("heads", [1, 7, 16, 61, 64, 120])
@pytest.mark.parametrize("ntiles", [1, 32, 500])
def test_the_last_group_is_about_as_large(heads: int, ntiles: int) -> None:
    size = choose_heads_per_wave(ntiles, heads, streamed_bytes=8 * MIB, programs=132, waves=2)
    assert 1 <= size <= heads
    assert (heads % size or size) * 2 >= size


def test_keys_that_are_few_for_a_large_group() -> None:
    assert choose_heads_per_wave(ntiles=1, heads=65, streamed_bytes=0, programs=132, waves=2) == 65


def test_in_order_few_tiles_of_a_head_are_in_turn() -> None:
    for programs, heads in ((132, 64), (132, 16), (3, 16)):
        size = choose_heads_per_wave(1000, heads, streamed_bytes=2**40, programs=programs, waves=2, in_order=True)
        assert size == heads or size * (TOGETHER_TILES + 1) > programs
        assert size >= choose_heads_per_wave(1000, heads, streamed_bytes=2**40, programs=programs, waves=2)
