"""Errors outside of the hops: when a rank raises, its peers do not wait for it until the deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.coordination.session import ControlPlane
from ringflash.errors import ArgumentError
from ringflash.ops import attention, decode, decode_op, derivatives, ring_call
from ringflash.ops.call import AttentionCall
from ringflash.ring import tiles
from tests.helpers.distributed import run_ranks
from tests.helpers.faults import Outcome, call_ring, outcome_of, usual_seconds

WORLD = 3
DEADLINE = 25.0
Fault = tuple[Any, str, int, Callable[[], None]]  # owner, attribute, index of the call, action


def _raise() -> None:
    raise RuntimeError("planted: outside of the hops")


def _interrupt() -> None:
    raise KeyboardInterrupt("planted: by the user")


def _refuse() -> None:
    raise ArgumentError("q", expected="nothing", got="a planted error", remedy="Remove it.")


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    """Makes rank 1 run the fault's action at one of its calls of a function of the library."""
    owner, name, at, action = fault
    original, calls = getattr(owner, name), iter(range(100))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            action()
        return original(*args, **kwargs)

    if dist.get_rank() == 1:
        setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)


FORWARD, BACKWARD = 0, 1
FAULTS: list[Fault] = [
    *((AttentionCall, name, at, _raise) for name in ("kernel_run", "mask_of") for at in (FORWARD, BACKWARD)),
    *((ring_call, name, at, _raise) for name in ("_fields", "_planned") for at in (FORWARD, BACKWARD)),
    *((ring_call, "_joined", at, _raise) for at in (0, 2)),  # of out, then of dq
    (AttentionCall, "kernel_run", FORWARD, _interrupt),
    *((ControlPlane, "_checked", at, _interrupt) for at in (FORWARD, BACKWARD)),
    *((tiles.KernelRun, "problem", at, _refuse) for at in (1, 4)),  # a hop's kernel refuses an argument
    # before and after the operators
    *((attention, "_validate", 0, action) for action in (_raise, _interrupt)),
    (rf.Dropout, "drawn", 0, _raise),
    *((derivatives, "_gradients", 0, action) for action in (_raise, _interrupt)),
]


OF_OPERATORS = [("kernel_run", BACKWARD), ("mask_of", BACKWARD), ("_fields", BACKWARD), ("_gradients", 0)]


def _ring_calls() -> list[Outcome]:
    usual, outcomes = usual_seconds(), []
    for fault in FAULTS:
        context = rf.ContextParallel(dist.group.WORLD, timeout=DEADLINE)
        options: Any = {"dropout": rf.Dropout(0.1, seed=3)} if fault[0] is rf.Dropout else {}
        if fault[1:3] in OF_OPERATORS:  # of a call that is not prepared
            options = {"options": rf.AttentionOptions(alibi_slopes=torch.ones(4))}
        with _planted(fault):
            outcome = outcome_of(call_ring, context, **options)
            if not outcome.kind:  # peers had all data of this call and see the failure in the next
                outcome = outcome_of(call_ring, context, **options)
        outcomes.append(replace(outcome, usual=usual))
        dist.barrier()
    call_ring(rf.ContextParallel(dist.group.WORLD, timeout=DEADLINE))
    return outcomes


def _decode(context: rf.ContextParallel) -> None:
    q, cache, options = torch.ones(1, 1, 2, 16), torch.ones(1, 4, 2, 16), rf.DecodeOptions(check_lengths=True)
    rf.flash_decode(q, cache, cache, cache_seqlens=4, context=context, options=options)


DECODE_FAULTS: list[Fault] = [
    (decode, "_check_tensors", 0, _interrupt),
    (decode, "_check_lengths", 0, _raise),
    (decode_op, "sight_of", 0, _raise),
    (decode_op, "_agree", 0, _interrupt),
    (decode_op, "_of_all_ranks", 0, _raise),
]


def _decode_calls() -> list[Outcome]:
    _decode(rf.ContextParallel.local(1))
    outcomes = []
    for fault in DECODE_FAULTS:
        context = rf.ContextParallel(dist.group.WORLD, timeout=DEADLINE)
        _decode(context)
        dist.barrier()
        with _planted(fault):
            outcomes.append(outcome_of(_decode, context))
        dist.barrier()
    return outcomes


@pytest.mark.parametrize(("calls", "faults"), [(_ring_calls, FAULTS), (_decode_calls, DECODE_FAULTS)])
def test_peers_of_a_rank_that_raises_outside_of_the_hops(
    calls: Callable[[], list[Outcome]], faults: list[Fault]
) -> None:
    kinds = {_raise: "RuntimeError", _interrupt: "KeyboardInterrupt", _refuse: "ArgumentError"}
    for (owner, name, at, action), *outcomes in zip(faults, *run_ranks(WORLD, calls), strict=True):
        place = f"{name} of {owner.__name__}, call {at}"
        assert outcomes[1].kind == kinds[action], place
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.kind == "PeerFailed", (place, outcome)
            assert outcome.fields["ranks"] == [1]
            assert f"rank 1: {kinds[action]}: " in outcome.text
            assert outcome.seconds - outcome.usual < 4, (place, outcome)


def _changed_input(context: rf.ContextParallel) -> None:
    leaf = torch.ones(1, 4, 2, 16, requires_grad=True)
    q = leaf * 2
    out = rf.ring_attention(q, q, q, context)
    if context.rank == 1:
        q.mul_(3)
    out.sum().backward()


def _checkpointed(context: rf.ContextParallel) -> None:
    leaf = torch.ones(1, 4, 2, 16, requires_grad=True)
    out = checkpoint(lambda q: rf.ring_attention(q, q, q, context), leaf, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()


def _backward_calls() -> list[list[Outcome]]:
    """Returns outcomes of backwards that fail on rank 1 before their operator, and of calls in the same ring later."""
    usual = usual_seconds()
    context = rf.ContextParallel(dist.group.WORLD, timeout=DEADLINE)
    _checkpointed(context)
    dist.barrier()
    changed = outcome_of(_changed_input, context)
    with _planted((attention, "key_of", 1, _raise)):  # call 1 is the recomputed forward
        recomputed = outcome_of(_checkpointed, context)
    later = outcome_of(call_ring, context)
    return [[replace(outcome, usual=usual) for outcome in (changed, recomputed)], [later]]


def test_a_backward_that_fails_before_its_operator_is_announced_once() -> None:
    ranks = run_ranks(WORLD, _backward_calls)
    for rank, ((changed, recomputed), (later,)) in enumerate(ranks):
        assert later.kind == "", later
        if rank == 1:
            assert "modified by an inplace operation" in changed.text
            assert recomputed.text == "planted: outside of the hops"
            continue
        for outcome in (changed, recomputed):
            assert outcome.kind == "PeerFailed", outcome
            assert outcome.fields["ranks"] == [1]
            assert outcome.seconds - outcome.usual < 4, outcome
