"""What users see on GPUs, where the process does not wait for messages: the same named errors, as soon."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import ringflash as rf
from tests.faults import Outcome, call_ring, die, outcome_of, planted, raise_out_of_memory, run_to_their_ends

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _hang() -> None:
    time.sleep(6)


def _with_fault(transport: str, step: int, action: Callable[[], None]) -> Outcome:
    context = rf.ContextParallel(dist.group.WORLD, transport=transport, timeout=3.0, hops="ring")
    call_ring(context)  # compiles
    with planted(step, action):
        return outcome_of(call_ring, context)


def _hang_before_a_replay() -> Outcome:
    context = rf.ContextParallel(
        dist.group.WORLD, transport="symmetric", timeout=3.0, fixed_lengths=True, cuda_graphs=True
    )
    for _ in range(3):
        call_ring(context)
    if context.rank == 1:
        _hang()
    return outcome_of(call_ring, context)


def test_a_rank_that_does_not_come_to_a_replay() -> None:
    exits, outcomes = run_to_their_ends(2, _hang_before_a_replay, backend="nccl")
    assert exits == [3, 3], outcomes
    assert outcomes[0] is not None
    assert outcomes[0].kind == "RingTimeout", outcomes
    assert outcomes[0].seconds < 5
    assert outcomes[0].fields["peers"] == [1]


@pytest.mark.parametrize("transport", ["nccl", "symmetric"])
@pytest.mark.parametrize(
    ("action", "kind", "codes", "seconds"),
    [
        (_hang, "RingTimeout", [3, 3], (3, 5)),
        (die, "PeerLost", [3, -signal.SIGKILL], (0, 5)),
        (raise_out_of_memory, "PeerFailed", [3, 3], (0, 5)),
    ],
)
@pytest.mark.parametrize("step", [0, 3])
def test_a_fault_in_mid_ring(
    transport: str, step: int, action: Callable[[], None], kind: str, codes: list[int], seconds: tuple[float, float]
) -> None:
    exits, outcomes = run_to_their_ends(2, _with_fault, transport, step, action, backend="nccl")
    assert exits == codes, outcomes
    assert outcomes[0] is not None
    assert outcomes[0].kind == kind, outcomes
    assert seconds[0] <= outcomes[0].seconds < seconds[1], outcomes
    named = outcomes[0].fields["ranks" if kind == "PeerFailed" else "peers"]
    assert named == [1]
