"""Tile sizes that a call of the Triton kernels gets."""

from dataclasses import replace

import pytest
import torch

from ringflash.kernels.triton import config

PLAIN = config.Call(headdim=64, headdim_v=64, dtype=torch.bfloat16, seqlen_k=4096, capability=90)
CHOICES = [config.forward_config, config.dq_config, config.dkdv_config]


def test_registers_are_capped_where_nothing_else_takes_them() -> None:
    assert config.forward_config(PLAIN).max_registers == 160
    assert config.dkdv_config(replace(PLAIN, short_spans=True)).max_registers == 168
    assert config.dkdv_config(PLAIN).max_registers is None


def test_four_programs_have_room_where_spans_are_short() -> None:
    """Checks that four programs fill an SM's 228 KiB. Each takes 1 KiB more than it requests, barriers included."""
    tiles = config.forward_config(replace(PLAIN, short_spans=True))
    shared = 2 * 64 * (tiles.block_m + 2 * tiles.num_stages * tiles.block_n)
    assert tiles.by_pointers
    assert 4 * (shared + 1024) == 228 * 1024


@pytest.mark.parametrize("other", [{"ragged": True}, {"modes": True}])
def test_they_are_not_elsewhere(other: dict[str, bool]) -> None:
    assert config.forward_config(replace(PLAIN, **other)).max_registers is None
    assert config.dkdv_config(replace(PLAIN, short_spans=True, **other)).max_registers is None
    assert config.dkdv_config(replace(PLAIN, short_spans=True, listed=True)).max_registers is None


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_call_has_tiles(dtype: torch.dtype, capability: int) -> None:
    for headdim in (8, 64, 72, 128, 192, 256):
        for number in range(32):
            ragged, short_spans, listed, modes, long = (bool(number >> bit & 1) for bit in range(5))
            if listed and not short_spans:
                continue
            call = replace(
                PLAIN,
                headdim=headdim,
                headdim_v=headdim,
                dtype=dtype,
                ragged=ragged,
                short_spans=short_spans,
                listed=listed,
                modes=modes,
                seqlen_k=config.LONG_KEYS if long else 4096,
                capability=capability,
            )
            single_pass = config.fuses_dq(headdim, headdim, listed=listed)
            for choose in [*CHOICES, config.single_pass_config] if single_pass else CHOICES:
                tiles = choose(call)
                assert tiles.block_d >= headdim
                assert min(tiles.block_m, tiles.block_n) >= 16
