"""Virtual ranks: messages arrive when all ranks have yielded, and plans that do not match are found."""

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from ringflash.transport.base import Message, Span
from ringflash.transport.local import LocalNetwork, LocalTransport, run_lockstep


def _pass_on(transport: LocalTransport, rank: int, world: int, steps: int) -> Generator[None, None, Tensor]:
    """Sends a number around the ring, one rank further at each step."""
    here = torch.tensor([float(rank)])
    for _ in range(steps):
        arriving = torch.full((1,), torch.nan)
        messages = [
            Message((rank + 1) % world, Span.of(here), 0, sends=True, hop=0),
            Message((rank - 1) % world, Span.of(arriving), 0, sends=False, hop=0),
        ]
        handle = transport.start(messages)
        assert arriving.isnan().all()  # nothing arrives before all ranks have yielded
        yield
        transport.finish(handle)
        here = arriving
    return here


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_number_goes_around(steps: int) -> None:
    network = LocalNetwork()
    results = run_lockstep([_pass_on(network.transport(r), r, 3, steps) for r in range(3)], network)
    assert [x.item() for x in results] == [(r - steps) % 3 for r in range(3)]


def _sends_into_the_void(transport: LocalTransport) -> Generator[None, None, None]:
    transport.start([Message(1, Span.of(torch.zeros(1)), 0, sends=True, hop=0)])
    yield


def test_a_message_without_a_receiver() -> None:
    network = LocalNetwork()
    with pytest.raises(AssertionError, match="plans do not match: .*0 -> 1: nobody receives"):
        run_lockstep([_sends_into_the_void(network.transport(0))], network)


def test_ranks_of_different_lengths() -> None:
    network = LocalNetwork()
    ranks = [_pass_on(network.transport(0), 0, 1, steps) for steps in (1, 2)]
    with pytest.raises(AssertionError, match="different numbers of steps"):
        run_lockstep(ranks, network)
