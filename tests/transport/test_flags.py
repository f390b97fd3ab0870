"""The flags of the symmetric transport: those of each message, and those that end all waits of a rank's GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from ringflash.coordination.cuda_driver import FlagBatch, await_flag, write_flag
from ringflash.transport import symmetric
from ringflash.transport.base import Message, Span
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


class _Operation(ctypes.Structure):
    """CUstreamMemOpWaitValueParams and CUstreamMemOpWriteValueParams of cuda.h, in a union of 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


def _operations(batch: FlagBatch) -> list[tuple[str, int, int]]:
    """Returns kind, address and value of each operation, as the driver reads them."""
    found = (_Operation * batch.count).from_buffer(batch.array)
    assert all((each.alias, each.padding) == (0, 0) for each in found)
    assert all(each.flags == (1 if each.operation == 1 else 0) for each in found)  # a wait is for equality
    return [({1: "await", 2: "write"}[each.operation], each.address, each.value) for each in found]


def test_a_batch_is_what_the_driver_reads() -> None:
    assert ctypes.sizeof(_Operation) == 48
    batch = FlagBatch([write_flag(2**47 + 8, 1), await_flag(2**40 + 4, 3), write_flag(16, 0)])
    assert _operations(batch) == [("write", 2**47 + 8, 1), ("await", 2**40 + 4, 3), ("write", 16, 0)]


def test_all_flags_of_a_rank_are_set_before_it_awaits_one() -> None:
    """Checks the flags around the copies of two received messages, with one sent message."""
    transport = object.__new__(SymmetricTransport)
    bases = [10_000, 20_000, 30_000]
    transport.__dict__.update(_world_size=3, _rank=1, _words=SimpleNamespace(addresses=bases))
    span = Span.of(torch.zeros(4))
    channel = 2
    sends = Message(2, span, channel, sends=True, hop=0)
    receives = [Message(peer, span, channel, sends=False, hop=0, mirror=span) for peer in (0, 2)]

    def flag(owner: int, what: int, peer: int) -> int:
        return bases[owner] + transport._place(what, channel, peer)

    def awaited(what: int, peer: int) -> list[tuple[str, int, int]]:
        return [("await", flag(1, what, peer), 1), ("write", flag(1, what, peer), 0)]

    ready, free = symmetric._READY, symmetric._FREE
    before, between, after = map(_operations, transport._flags_of([receives[0], sends, receives[1]]))
    assert before == [("write", flag(2, ready, 1), 1), *awaited(ready, 0)]
    assert between == [("write", flag(0, free, 1), 1), *awaited(ready, 2)]
    assert after == [("write", flag(2, free, 1), 1), *awaited(free, 2)]


def test_a_span_of_all_elements_is_the_memory() -> None:
    memory = torch.arange(6.0)
    assert Span.of(memory).vector is memory
    part = Span(memory, 2, 3)
    assert part.vector.tolist() == [2.0, 3.0, 4.0]
    assert (part.address, part.nbytes) == (part.vector.data_ptr(), 12)
