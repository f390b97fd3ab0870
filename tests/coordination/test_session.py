"""Optimistic agreement, which continues without waiting, tested over gloo; GPUs use it, as they wait on the device."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from ringflash.coordination.session import _MAX_CALLS, ControlPlane
from ringflash.coordination.words import KEPT, GlooWords
from ringflash.errors import RingflashError
from ringflash.transport.connect import _introduce, _own_gloo
from tests.helpers.distributed import run_ranks

CALL = {"operation": "attention", "seqlen": 8}


def control_of_all() -> ControlPlane:
    """Returns a control plane of all ranks in which known calls do not wait."""
    group = dist.group.WORLD
    assert group is not None
    gloo, faults = _own_gloo(range(dist.get_world_size()), [group], timedelta(seconds=20))
    control = ControlPlane(group, gloo, faults, optimistic=True)
    _introduce(control)
    return control


def _runs() -> list[str]:
    """Returns the outcomes of several cases on this rank."""
    rank, stories = dist.get_rank(), []
    control = control_of_all()
    for _ in range(3):
        assert control.agree({**CALL, "rank": rank}, free="rank") == [0, 1]
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    start = time.monotonic()
    control.agree({**CALL, "rank": rank}, free="rank")
    stories.append("went on" if time.monotonic() - start < 2 else "waited")
    dist.barrier()

    def told(*fields: dict[str, int | str]) -> str:
        try:
            for field in fields:
                control.agree({**field, "rank": rank}, free="rank")
        except RingflashError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return "nothing"

    changed = {**CALL, "operation": "backward"} if rank == 1 else CALL
    stories.append(told(changed, CALL))  # rank 0 knows the call and raises in the next one
    control = control_of_all()
    lengths = {"operation": "attention", "seqlen": 5}

    def agreed(seqlen: int) -> str:
        try:
            return str(control.agree({**lengths, "seqlen": seqlen}, free="seqlen"))
        except RingflashError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"

    assert agreed(5) == "[5, 5]"
    stories.append(agreed(5 + rank))  # rank 0 cannot notice the change yet
    stories.append(agreed(5))
    control = control_of_all()
    told(CALL)
    if rank == 1:
        control.fail(ValueError("of the arguments"))
        stories.append("failed")
    else:
        stories.append(told(CALL, CALL))
    control = control_of_all()
    assert agreed(5) == "[5, 5]"
    for seqlen in (5 + rank, 5):
        if rank == 0:  # its shard has the same length, but of another sequence
            control.forget()
        stories.append(agreed(seqlen))
    return stories


def test_known_calls_do_not_wait_and_differences_come_out() -> None:
    first, second = run_ranks(2, _runs)
    assert first[0] == second[0] == "went on"
    assert second[1].startswith("RankMismatch: ranks disagree on operation")
    assert first[1].startswith(("RankMismatch: ranks disagree on operation", "PeerFailed: ranks [1]"))
    assert first[2] == "[5, 5]"
    assert first[3].startswith(("RankMismatch: ranks disagree on seqlen", "PeerFailed: ranks [1]"))
    assert second[2].startswith("RankMismatch: ranks disagree on seqlen")
    assert second[3].startswith("PeerFailed")  # the ring has broken
    assert second[4] == "failed"
    assert first[4].startswith("PeerFailed: ranks [1] raised")
    assert first[5:] == second[5:] == ["[5, 6]", "[5, 5]"]


def _fails_ahead() -> tuple[str, bool, bool]:
    """Returns the error of a rank whose peer failed, and whether its GPU's waits ended and the error was delivered."""
    rank, control, released, error = dist.get_rank(), control_of_all(), list[bool](), "none"
    control.faults.on_release(lambda: released.append(True))
    for _ in range(2):
        control.agree({**CALL, "rank": rank}, free="rank")
    if rank == 1:
        control.fail(ValueError("of rank 1"))
        return "ValueError", bool(released), control.faults.delivered
    try:
        for _ in range(2):  # the first one continues without waiting
            control.agree({**CALL, "rank": rank}, free="rank")
    except RingflashError as raised:
        error = type(raised).__name__
    return error, bool(released), control.faults.delivered


def test_a_failure_beside_a_call_ahead_ends_the_waits_of_both_gpus() -> None:
    assert run_ranks(2, _fails_ahead) == [("PeerFailed", True, True), ("ValueError", True, True)]


def _between_calls() -> list[str]:
    """Runs calls that continue without waiting, with other kinds of exchanges before their results are checked."""
    rank, control = dist.get_rank(), control_of_all()
    for number in range(40):
        assert control.agree({**CALL, "rank": rank}, free="rank") == [0, 1]
        for _ in range(number % 7):
            control.compare("plan", "the same", "the same")
        if number % 5 == 4:
            assert control.tell(str(rank)) == ["0", "1"]
    return [type(control._words).__name__]


def test_calls_ahead_are_looked_at_after_other_exchanges() -> None:
    assert run_ranks(2, _between_calls) == [["SharedWords"]] * 2


def _known_calls() -> list[str]:
    """Returns the results of repeated calls of two kinds, and their descriptions; the calls of one kind raise."""
    rank, control, described, told = dist.get_rank(), control_of_all(), list[str](), list[str]()

    def call(kind: str) -> list[int]:
        def fields() -> dict[str, int | str]:
            described.append(kind)
            return {"operation": kind, "rank": rank}

        def then(ranks: list[int]) -> list[int]:
            if kind == "bad":
                raise ValueError(f"of ranks {ranks}")
            return [10 * rank for rank in ranks]

        return control.agree_on(kind, fields, free="rank", then=then)

    for kind in ("good", "bad", "good", "bad", "good"):
        try:
            told.append(f"{kind} {call(kind)}")
        except ValueError as error:
            told.append(f"{kind} {error}")
    return [*told, *described]


def test_known_calls_are_not_described_again_and_raise_again() -> None:
    good, bad = "good [0, 10]", "bad of ranks [0, 1]"
    assert run_ranks(2, _known_calls) == [[good, bad, good, bad, good, "good", "bad"]] * 2


def _many_calls() -> tuple[int, int]:
    """Returns the numbers of kept calls and messages after more calls than the limit."""
    control = control_of_all()
    for number in range(_MAX_CALLS + 3):
        for _ in range(2):  # the second call finds the first one's entry
            assert control.agree({**CALL, "number": number}, free="seqlen") == [8]
    assert isinstance(control._words, GlooWords)  # a single rank shares no memory
    return len(control._calls), len(control._words._messages)


def test_what_is_kept_of_calls_is_bounded() -> None:
    ((calls, messages),) = run_ranks(1, _many_calls)
    assert 0 < calls <= _MAX_CALLS
    assert 0 < messages <= KEPT
