"""Failures of a rank that raises, hangs, dies or leaves the plan: every rank soon gets a named error."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it

import ringflash as rf
from ringflash import context as contexts
from ringflash.coordination import processes
from ringflash.coordination.failures import FailureReport, Faults, conclude
from ringflash.coordination.watch import Watch
from ringflash.errors import ArgumentError, PeerFailed, PeerLost, RankMismatch, RingTimeout
from ringflash.ring.plan import Plan
from tests.helpers.accuracy import Problem
from tests.helpers.distributed import run_ranks
from tests.helpers.faults import (
    Outcome,
    call_ring,
    die,
    outcome_of,
    planted,
    raise_out_of_memory,
    run_to_their_ends,
    usual_seconds,
)
from tests.helpers.patience import PATIENCE

WORLD = 3


def _with_fault(step: int, action: Callable[[], None], timeout: float) -> Outcome:
    """Returns the outcome of a call with `action` on rank 1, which breaks the connection but not the group."""
    usual = usual_seconds()
    context = rf.ContextParallel(dist.group.WORLD, timeout=timeout)
    with planted(step, action):
        return replace(outcome_of(call_ring, context), usual=usual)


def _raises_in_mid_ring() -> list[Outcome]:
    outcomes = []
    for step in (0, 1, 3, 5):  # hops 0 and 1 of the forward, hops 0 and 2 of the backward
        outcomes.append(_with_fault(step, raise_out_of_memory, 20.0))
        call_ring(rf.ContextParallel(dist.group.WORLD, timeout=20.0))  # a new connection works
    return outcomes


def test_a_rank_that_raises_in_mid_ring_brings_the_others_down() -> None:
    for case in zip(*run_ranks(WORLD, _raises_in_mid_ring), strict=True):
        assert [outcome.kind for outcome in case] == ["PeerFailed", "OutOfMemoryError", "PeerFailed"]
        for outcome in case:
            assert outcome.seconds - outcome.usual < 2, outcome
        for outcome in (case[0], case[2]):
            assert outcome.fields["ranks"] == [1]
            assert "rank 1: OutOfMemoryError: planted: out of memory\nTraceback" in outcome.text
            assert "in raise_out_of_memory" in outcome.text


def _broken_context() -> tuple[str, str]:
    context = rf.ContextParallel(dist.group.WORLD)
    with planted(0, raise_out_of_memory):
        first = outcome_of(call_ring, context)
    return first.kind, outcome_of(context.unshard, torch.zeros(1, 2)).text


def test_a_context_stays_broken() -> None:
    (first, later), (second, late) = run_ranks(2, _broken_context)
    assert (first, second) == ("PeerFailed", "OutOfMemoryError")
    for text in (later, late):
        assert "ranks [1] raised" in text


def _sockets() -> int:
    """Returns the number of open sockets of this process."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the folder itself is closed by now
            names.append(str(path.readlink()))
    return sum(name.startswith("socket:") for name in names)


def _connections_of_a_broken_ring() -> bool:
    """Returns whether a broken ring closes its sockets long before its deadline."""
    context = rf.ContextParallel(dist.group.WORLD, timeout=50.0)
    before = _sockets()
    with planted(1, raise_out_of_memory):
        outcome_of(call_ring, context)
    end = time.monotonic() + 15
    while _sockets() >= before and time.monotonic() < end:
        time.sleep(0.01)
    return _sockets() < before


def test_a_broken_ring_closes_its_connections() -> None:
    assert run_ranks(WORLD, _connections_of_a_broken_ring) == [True] * WORLD


def _hangs() -> list[Outcome]:
    outcomes = []
    for step in (0, 4):
        outcomes.append(_with_fault(step, lambda: time.sleep(5), 2.0))
        dist.barrier()  # a rank that is late for the next call would wait less
    context = rf.ContextParallel(dist.group.WORLD, timeout=2.0)
    if context.rank == 1:
        time.sleep(5)  # the others wait for rank 1 meanwhile
    return [*outcomes, replace(outcome_of(call_ring, context), usual=outcomes[0].usual)]


def test_a_rank_that_hangs_is_named_within_the_deadline() -> None:
    by_rank = run_ranks(WORLD, _hangs)
    for case in range(3):
        for rank in (0, 2):
            outcome = by_rank[rank][case]
            assert outcome.kind == "RingTimeout", outcome
            assert outcome.seconds >= 2
            assert outcome.seconds - outcome.usual < 4
            assert outcome.fields["peers"] == [1]
            assert outcome.fields["hop"] in ({0, 1}, {1, 2}, {None})[case], outcome
            assert "waited 2 s for rank 1 at" in outcome.text
            assert "rank 1: sent no failure report" in outcome.text
        assert by_rank[1][case].kind == "RingTimeout"  # when rank 1 continues, the others have given up


@contextmanager
def _astray() -> Iterator[None]:
    """Makes rank 1 drop the last hop of its plan."""
    call_ring(rf.ContextParallel.local(2))
    original = contexts.make_plan

    def make_plan(layout: Any, mask: Any, rank: int, inner: int | None) -> Plan:
        plan = original(layout, mask, rank, inner)
        if rank != 1 or dist.get_rank() != 1:
            return plan
        *steps, before, _, closing = plan.steps
        (batch,) = before.kv
        sends = batch._replace(transfers=tuple(transfer for transfer in batch.transfers if transfer.sends))
        return replace(plan, steps=(*steps, before._replace(kv=(sends,)), closing))

    contexts.make_plan = make_plan
    try:
        yield
    finally:
        contexts.make_plan = original


def _different_hops() -> list[Outcome]:
    usual = usual_seconds()
    with _astray():
        checked = rf.ContextParallel(dist.group.WORLD, timeout=2.0, debug=True)
        unchecked = rf.ContextParallel(dist.group.WORLD, timeout=2.0)
        return [replace(outcome_of(call_ring, context), usual=usual) for context in (checked, unchecked)]


def test_ranks_that_follow_different_plans() -> None:
    for checked, unchecked in run_ranks(WORLD, _different_hops):
        assert checked.kind == "RankMismatch"
        assert checked.seconds - checked.usual < 1
        assert "ranks disagree on plan: rank 1 against the rest" in checked.text
        assert unchecked.kind == "RingTimeout"
        assert unchecked.seconds - unchecked.usual < 4
        for text in (checked.text, unchecked.text):
            for rank in range(WORLD):
                assert f"rank {rank} of 3, zigzag, " in text
            assert text.count("  hop 2: ") == WORLD - 1


def test_a_profiler_runs_after_an_error_was_cancelled() -> None:
    program = "import sys; from ringflash.coordination.watch import _cancel; _cancel(); _cancel()"
    program += "; sys.setprofile(lambda *given: None); (lambda: None)()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def _debugged() -> str:
    context = rf.ContextParallel(dist.group.WORLD, debug=True)
    call_ring(context, mask=rf.Causal())
    other = rf.ContextParallel(dist.group.WORLD, debug=context.rank == 0)
    return outcome_of(call_ring, other).text


def test_debug_mode_of_ranks_that_agree() -> None:
    for text in run_ranks(2, _debugged):
        assert "ranks disagree on debug" in text


def _die_at(step: int) -> Outcome:
    return _with_fault(step, die, 20.0)


def _die_before_a_call() -> Outcome:
    context = rf.ContextParallel(dist.group.WORLD, timeout=20.0)
    usual = usual_seconds()
    call_ring(context)
    if context.rank == 1:
        time.sleep(0.5)  # the others wait for this rank
        die()
    return replace(outcome_of(call_ring, context), usual=usual)


@pytest.mark.parametrize(
    ("function", "args", "hops"),
    # Step 4 is hop 1 of the backward. The others may be a hop behind the rank that dies, or a hop ahead.
    [(_die_at, (0,), {0, 1}), (_die_at, (4,), {0, 1, 2}), (_die_before_a_call, (), {None})],
)
def test_a_rank_that_is_killed(function: Callable[..., Outcome], args: tuple[Any, ...], hops: set[int | None]) -> None:
    codes, outcomes = run_to_their_ends(WORLD, function, *args)
    assert codes == [3, -signal.SIGKILL, 3], outcomes
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome is not None
        assert outcome.kind == "PeerLost", outcome
        assert outcome.seconds - outcome.usual < 5
        assert outcome.fields["peers"] == [1]
        assert outcome.fields["hop"] in hops
        assert "lost rank 1 at" in outcome.text


def _server_dies(step: int | None) -> Outcome:
    """Returns the outcome when rank 0, which serves the store, dies at hop `step`, or before a call if None.

    Rank 2 leaves as soon as it knows.
    """
    usual = usual_seconds()
    context = rf.ContextParallel(dist.group.WORLD, timeout=20.0)
    if step is None:
        call_ring(context)
        if context.rank == 0:
            die()
        return replace(outcome_of(call_ring, context), usual=usual)
    with planted(step, die, rank=0):
        return replace(outcome_of(call_ring, context), usual=usual)


@pytest.mark.parametrize("step", [0, 2, 4, None])
def test_only_the_rank_that_serves_the_store_is_blamed_when_it_dies(step: int | None) -> None:
    codes, outcomes = run_to_their_ends(WORLD, _server_dies, step, over_tcp=True)
    assert codes == [-signal.SIGKILL, 3, 3], outcomes
    for outcome in outcomes[1:]:
        assert outcome is not None
        assert outcome.kind == "PeerLost", outcome
        assert outcome.seconds - outcome.usual < 5
        assert outcome.fields["peers"] == [0], outcome
        assert "lost rank 0 at" in outcome.text


def _server_dies_unread() -> Outcome:
    # As on several hosts: ranks share no memory, and the store that holds their reports dies with rank 0.
    setattr(processes, "together", lambda identities: False)  # noqa: B010 - pyright checks the type of an assignment
    outcome = _server_dies(0)
    time.sleep(2)  # without reports, a slower rank takes a survivor that has ended for lost
    return outcome


def test_survivors_that_cannot_read_reports_do_not_blame_each_other() -> None:
    codes, outcomes = run_to_their_ends(WORLD, _server_dies_unread, over_tcp=True)
    assert codes == [-signal.SIGKILL, 3, 3], outcomes
    for rank in (1, 2):
        outcome = outcomes[rank]
        assert outcome is not None
        assert outcome.kind == "PeerLost", outcome
        assert outcome.fields["peers"] == [0], outcome
        assert f"rank {3 - rank}: unknown: the group's store, which holds reports, has ended" in outcome.text


def _die_before_a_context() -> Outcome:
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    store.set(f"in the group {dist.get_rank()}", "")
    if dist.get_rank() == 1:
        # A rank that still connects would raise gloo's error in `init_process_group`, before it makes a context.
        store.wait([f"in the group {rank}" for rank in range(WORLD)])
        die()
    return outcome_of(rf.ContextParallel, dist.group.WORLD, timeout=20.0)


def test_a_rank_that_dies_before_a_context_is_made() -> None:
    codes, outcomes = run_to_their_ends(WORLD, _die_before_a_context)
    assert codes == [3, -signal.SIGKILL, 3], outcomes
    for rank in (0, 2):
        outcome = outcomes[rank]
        assert outcome is not None
        assert outcome.kind == "GroupFailed", outcome
        assert f"the process group failed while its ranks made a context (seen on rank {rank}): " in outcome.text
        assert "See the output of the other ranks" in outcome.text


def _deadlines() -> list[str]:
    group = dist.group.WORLD
    wrong: list[Any] = [60, timedelta(minutes=2), 0, -1.0, "fast"]
    texts = [outcome_of(rf.ContextParallel, group, timeout=timeout).text for timeout in wrong]
    rf.ContextParallel(group, timeout=59.5)
    rf.ContextParallel(group, timeout=timedelta(seconds=20))
    mismatch = outcome_of(rf.ContextParallel, group, timeout=5.0 + dist.get_rank())
    return [*texts, mismatch.text]


def test_deadlines_in_the_wrong_order() -> None:
    for texts in run_ranks(2, _deadlines):
        for text, got in zip(texts[:4], ("60 s", "120 s", "0 s", "-1 s"), strict=True):
            assert f"timeout: expected more than 0 and less than the 60 s of the process group, got {got}" in text
        assert "ring < NCCL watchdog < heartbeat < launcher" in texts[0]
        assert "timeout: expected seconds or a timedelta, got 'fast'" in texts[4]
        assert "ranks disagree on timeout" in texts[5]


def _out_of_place() -> list[str]:
    q = torch.zeros(1, 6, 2, 16)
    meta = q.to("meta")
    context = rf.ContextParallel(dist.group.WORLD)
    texts = [outcome_of(context.check_device, torch.device("cuda", 0)).text]
    texts.append(outcome_of(rf.ContextParallel, dist.group.WORLD, transport="symmetric").text)
    texts.append(outcome_of(rf.ContextParallel, dist.group.WORLD, transport="nvlink").text)
    texts.append(outcome_of(rf.ring_attention, meta, meta, meta, context).text)
    half = dist.new_group([0, 1])
    assert isinstance(half, dist.ProcessGroup)
    on_half = rf.ContextParallel(half)
    call_ring(on_half)
    dist.destroy_process_group(half)
    texts.append(outcome_of(call_ring, on_half).text)
    texts.append(outcome_of(on_half.unshard, q).text)
    texts.append(outcome_of(rf.ContextParallel, half).text)
    assert context.transport_reason == "the group has no NCCL backend"
    return texts


def test_wrong_groups_and_devices_and_transports() -> None:
    for cuda, symmetric, unknown, meta, destroyed, unsharded, anew in run_ranks(2, _out_of_place):
        assert cuda.startswith("q: expected a tensor on cpu, as the context, got cuda:0")
        assert symmetric.startswith("transport: expected an NCCL group for symmetric, got gloo")
        assert unknown.startswith("transport: expected one of ('auto', 'nccl', 'symmetric'), got 'nvlink'")
        assert "q: expected a device with storage, got meta" in meta
        assert anew.startswith("mesh_or_group: expected a process group that exists, got one that was destroyed")
        for text in (destroyed, unsharded):
            assert text.startswith("context: expected a context whose process group exists, got one whose group was")


def _alone() -> bool:
    problem = Problem.random(seqlen=50, mask=rf.Causal())
    rings = problem.ring(rf.ContextParallel(dist.group.WORLD, debug=True))
    return all(torch.equal(a, b) for a, b in zip(rings, problem.flash(), strict=True))


def test_a_world_of_one_is_the_single_device_bitwise() -> None:
    assert run_ranks(1, _alone) == [True]


def _watched(done: Callable[[], bool], deadline: float) -> tuple[Faults, Watch, list[bool]]:
    faults, released = Faults(HashStore(), 0, 2, deadline), []
    faults.on_release(lambda: released.append(True))
    watch = Watch(faults)
    watch.add(done, 2, [1])
    return faults, watch, released


def _wait_for_a_stream() -> None:
    for _ in range(1000):  # like calls outside of the ring
        time.sleep(0.01)


def test_a_message_on_a_gpu_that_is_late_raises_where_the_process_waits() -> None:
    faults, _, released = _watched(lambda: False, 0.3)
    with pytest.raises(RingTimeout, match="waited 0.3 s for rank 1 at hop 2") as caught:
        _wait_for_a_stream()
    assert (caught.value.peers, caught.value.hop) == ([1], 2)
    with pytest.raises(RingTimeout):
        faults.check()
    while not released:
        time.sleep(0.01)


def test_messages_on_a_gpu_that_come() -> None:
    seen = threading.Event()
    faults, watch, released = _watched(seen.is_set, 1.0)
    time.sleep(0.2)  # far below the deadline, even on busy cores
    seen.set()
    time.sleep(0.2)
    watch.add(lambda: True, 3, [1])
    time.sleep(1.2)  # longer than the deadline, without a pending message
    faults.check()
    assert not released


def test_a_collective_that_is_done_just_after_a_wait_for_it_has_ended() -> None:
    class Late:
        waits = 0

        def wait(self, _: timedelta) -> bool:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")
            return True

        def is_completed(self) -> bool:
            return True

    faults = Faults(HashStore(), 0, 2, 5.0)
    faults.wait_for(Late())  # type: ignore[arg-type]
    assert faults.error is None


def test_reports_of_ranks() -> None:
    def report(rank: int, kind: Any, hop: int | None, *peers: int) -> FailureReport:
        return FailureReport(rank, kind, hop, peers, f"plan or traceback of {rank}")

    late, closed = report(2, "late", 1, 1), report(0, "closed", 2, 2)
    error = conclude([closed, late], [], 4, 3.0, rank=0)  # no rank waited for rank 3
    assert isinstance(error, RingTimeout)
    assert (error.peers, error.hop, error.deadline, error.rank) == ([1], 1, 3.0, 0)
    error = conclude([closed, late], [1], 4, 3.0, rank=2)  # the process of rank 1 has ended
    assert isinstance(error, PeerLost)
    assert (error.peers, error.hop, error.rank) == ([1], 1, 2)
    error = conclude([report(0, "closed", 1, 2)], [], 3, 3.0, rank=0)
    assert isinstance(error, PeerLost)
    assert (error.peers, error.hop) == ([2], 1)
    error = conclude([late, report(1, "raised", 0)], [], 3, 3.0, rank=2)
    assert isinstance(error, PeerFailed)
    assert error.ranks == [1]
    error = conclude([report(0, "closed", None), report(2, "late", None)], [], 3, 3.0, rank=2)
    assert isinstance(error, RingTimeout)
    assert (error.peers, error.hop) == ([1], None)
    error = conclude([report(0, "late", 1, 1), report(1, "late", None)], [], 2, 3.0, rank=0)
    assert "rank 1: waited in the agreement before hop 0 until the deadline\n    plan or traceback of 1" in str(error)
    error = conclude(
        [report(0, "late", 1, 2), report(1, "closed", 1, 0), report(2, "behind", None)], [], 3, 3.0, rank=2
    )
    assert isinstance(error, RingTimeout)
    assert (error.peers, error.hop) == ([2], 1)
    assert str(error).count("plan or traceback") == 0


def test_a_pass_that_took_too_long_looks_back() -> None:
    """Checks a process that does not wait for messages: after a slow pass, it asks whether others have given up."""
    store = HashStore()
    faults, peer = Faults(store, 1, 2, 5.0), Faults(store, 0, 2, 5.0)
    faults.identities = peer.identities = ["", ""]
    faults.look_back(0.0)
    peer.broken("late", 1, [1])
    faults.look_back(time.monotonic())  # a quick pass: no rank can have given up
    with pytest.raises(RingTimeout) as caught:
        faults.look_back(0.0)
    assert caught.value.peers == [1]
    assert caught.value.hop == 1


def test_errors_are_what_callers_catch() -> None:
    assert issubclass(RingTimeout, TimeoutError)
    assert issubclass(PeerLost, ConnectionError)
    for kind in (ArgumentError, RankMismatch):
        assert issubclass(kind, ValueError)
