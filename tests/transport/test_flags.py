"""The flags of the symmetric transport that a rank sets when it ends all waits of its GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ringflash.transport import symmetric
from ringflash.transport.symmetric import SymmetricTransport


@pytest.mark.parametrize("world", [2, 8, 64])
def test_a_release_sets_each_flag_and_nothing_else(world: int) -> None:
    page = torch.zeros(symmetric._PAGE, dtype=torch.uint8)
    transport = object.__new__(SymmetricTransport)
    transport.__dict__.update(_world_size=world, _words=SimpleNamespace(own=page))
    places = {
        page.data_ptr() + transport._place(what, channel, rank)
        for what in (symmetric._READY, symmetric._FREE)
        for channel in range(symmetric._CHANNELS)
        for rank in range(world)
    }
    flags = transport._flags()
    assert {*flags} == places
    assert len(flags) == 2 * symmetric._CHANNELS * world
