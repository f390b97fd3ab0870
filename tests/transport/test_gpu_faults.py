"""Failures on GPUs, where the process does not wait for messages: the same named errors, as soon."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Literal

import pytest
import torch.distributed as dist

import ringflash as rf
from ringflash.ring.cuda_graphs import UNASKED
from tests.helpers import one_gpu
from tests.helpers.faults import Outcome, call_ring, die, outcome_of, planted, raise_out_of_memory, run_to_their_ends

pytestmark = pytest.mark.skipif(one_gpu.GPUS == 0, reason="needs a GPU")
WORLDS = one_gpu.WORLDS if one_gpu.GPUS == 1 else [2]


def _hang() -> None:
    time.sleep(6)


def _compile(transport: str) -> None:
    """Compiles the kernels of `call_ring`, which takes longer than the timeouts of these tests."""
    call_ring(rf.ContextParallel(dist.group.WORLD, transport=transport, hops="ring"))


def _with_fault(transport: str, step: int, action: Callable[[], None]) -> Outcome:
    _compile(transport)
    context = rf.ContextParallel(dist.group.WORLD, transport=transport, timeout=3.0, hops="ring")
    call_ring(context)
    with planted(step, action):
        return outcome_of(call_ring, context)


def _hang_before_a_replay(graphs: bool | Literal["auto"]) -> Outcome:
    _compile("symmetric")
    context = rf.ContextParallel(
        dist.group.WORLD, transport="symmetric", timeout=3.0, fixed_lengths=True, cuda_graphs=graphs
    )
    for _ in range(3 if graphs is True else UNASKED + 1):
        call_ring(context)
    assert context.graphs is not None
    assert len(context.graphs) == 2
    if context.rank == 1:
        _hang()
    return outcome_of(call_ring, context)


@pytest.mark.parametrize("graphs", [True, "auto"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_does_not_come_to_a_replay(world: int, graphs: bool | Literal["auto"]) -> None:
    exits, outcomes = run_to_their_ends(world, _hang_before_a_replay, graphs, backend="nccl")
    assert exits == [3] * world, outcomes
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome is not None
        assert outcome.kind == "RingTimeout", outcomes
        assert outcome.seconds < 5
        assert outcome.fields["peers"] == [1]


@pytest.mark.parametrize("transport", one_gpu.TRANSPORTS)
@pytest.mark.parametrize(
    ("action", "kind", "code", "seconds"),
    [
        (_hang, "RingTimeout", 3, (3, 5)),
        (die, "PeerLost", -signal.SIGKILL, (0, 5)),
        (raise_out_of_memory, "PeerFailed", 3, (0, 5)),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_a_fault_in_mid_ring(
    transport: str,
    world: int,
    backward: bool,
    action: Callable[[], None],
    kind: str,
    code: int,
    seconds: tuple[float, float],
) -> None:
    step = world + 1 if backward else 0  # the hops of the forward are counted first
    exits, outcomes = run_to_their_ends(world, _with_fault, transport, step, action, backend="nccl")
    assert exits == [code if rank == 1 else 3 for rank in range(world)], outcomes
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome is not None
        assert outcome.kind == kind, outcomes
        assert seconds[0] <= outcome.seconds < seconds[1], outcomes
        assert outcome.fields["ranks" if kind == "PeerFailed" else "peers"] == [1]
