"""Failure handling of a ring: each rank reports, breaks its own connections, and collects the reports of all ranks.

A rank that fails, or waits in vain, first publishes a report in the group's store. It then closes its connections,
which wakes every rank that waits for it. The woken ranks do the same, so all living ranks report within a moment. Each
rank draws the same conclusion from the reports: the ranks that raised, are gone, or are late. Nothing else breaks,
because the ring has process groups of its own; `transport.nccl.new_group` names one exception.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - torch documents it

from ringflash.coordination import processes
from ringflash.coordination.mailbox import Board
from ringflash.errors import PeerFailed, PeerLost, RingflashError, RingTimeout

Verdict = Literal["late", "closed", "behind"]

INTERVAL = 0.1  # seconds between two checks of a wait
PATIENCE = 0.5  # seconds of waiting after which a rank looks for reports and ended processes
GRACE = 1.0  # seconds within which a living, waiting rank reports after connections close
ALONE = 0.2  # as GRACE, for a rank that cannot read reports and knows of an ended process
_POLL = 0.02
_BROKEN = "broken"  # a key of the store; the other keys are rank numbers
_LONGEST = 6000  # characters of a text in a report: a board has room for them in any script


@dataclass(frozen=True)
class FailureReport:
    """A rank's report of a broken ring.

    Args:
        rank: the rank that reports.
        kind: the rank "raised" an error, waited past the deadline ("late"), found a connection "closed", or is
            "behind": it reached the end of its pass after other ranks had reported.
        hop: the hop at which the rank waited; None in the agreement before the first hop, or without a wait.
        peers: the ranks that it waited for; empty if it waited for all ranks, or for none.
        text: a traceback, or the plan that the rank follows.
    """

    rank: int
    kind: Verdict | Literal["raised"]
    hop: int | None
    peers: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        if self.kind == "raised":
            return "raised"
        if self.kind == "behind":
            return "came to the end of its pass after others had given up"
        where = "in the agreement before hop 0" if self.hop is None else f"at hop {self.hop}"
        whom = f" for rank {', '.join(map(str, self.peers))}" if self.peers else ""
        return f"waited {where}{whom} until {'the deadline' if self.kind == 'late' else 'the connection closed'}"


def conclude(
    reports: Sequence[FailureReport],
    ended: Sequence[int],
    world_size: int,
    deadline: float,
    rank: int,
    *,
    readable: bool = True,
) -> RingflashError:
    """Returns the error that `rank` raises.

    Args:
        reports: the reports of the ranks, at least one.
        ended: the ranks with a process that is known to have ended.
        world_size: number of ranks in the ring.
        deadline: seconds that a rank waits for a message.
        rank: the rank that raises.
        readable: whether this rank could read the reports of other ranks.
    """
    raised = [report for report in reports if report.kind == "raised"]
    if raised:
        return PeerFailed([report.rank for report in raised], [report.text for report in raised], rank=rank)
    by_rank = {report.rank: report for report in reports}
    missing = [r for r in range(world_size) if r not in by_rank]
    waited_for = {peer for report in reports for peer in report.peers}
    # A rank without a report may just be busy: ranks that are gone, then ranks that were waited for, take precedence.
    gone = sorted({*ended} & {*missing})
    behind = [report.rank for report in reports if report.kind == "behind"]
    peers = gone or sorted(waited_for & {*missing}) or missing or behind or sorted(waited_for)
    late = [report for report in reports if report.kind == "late"]
    hop = next((report.hop for report in late or reports if {*report.peers} & {*peers}), (late or reports)[0].hop)
    silence = "sent no failure report" if readable else "unknown: the group's store, which holds reports, has ended"
    texts = [str(by_rank[r]) if r in by_rank else silence for r in range(world_size)]
    if gone or not late:
        return PeerLost(peers, hop, texts, rank=rank)
    if not missing and not behind:  # all live and wait for messages that no rank sends: their plans differ
        texts = [f"{text}\n    {by_rank[r].text}".rstrip() for r, text in enumerate(texts)]
    return RingTimeout(peers, hop, deadline, texts, rank=rank)


def _copy_of(error: RingflashError) -> RingflashError:
    """Returns `error` without a traceback, to be raised.

    An error that was raised refers to frames, and so to the tensors of the broken call. Their graph refers to the
    context through C++, where Python's garbage collector cannot follow. A ring that kept such an error would never end.
    """
    copy = type(error).__new__(type(error))
    Exception.__init__(copy, *error.args)  # a subclass may take arguments that are not known here
    copy.__dict__.update(error.__dict__)
    return copy


class Faults:
    """One rank's view of what went wrong in its ring.

    Args:
        store: shared by the ranks, with keys that only this ring uses.
        rank: this rank.
        world_size: number of ranks in the ring.
        deadline: seconds that a rank waits for a message.
    """

    def __init__(self, store: Store, rank: int, world_size: int, deadline: float) -> None:
        self._rank, self._world_size, self.deadline = rank, world_size, deadline
        self.store, self.number = store, 0
        # Set if all ranks are on one host: the board outlives the process that serves the store.
        self.board: Board | None = None
        self.error: RingflashError | None = None  # set once, and the ring is unusable from then on; copies are raised
        self.plan: object = ""  # the plan that this rank follows, for its report
        self.delivered = False  # True once the error has been raised, or is about to be
        self.identities: list[str] = []  # identity of each rank's process
        self._others: list[Faults] = []
        self._breaks: list[Callable[[], None]] = []
        self._releases: list[Callable[[], None]] = []
        self._closes: list[Callable[[], None]] = []
        self.closed = False
        self._cancel: Callable[[], None] | None = None  # cancels an error that another thread has not raised yet
        self._lock = threading.RLock()

    def on_break(self, close: Callable[[], None]) -> None:
        """Registers `close`, called as soon as the ring breaks: it ends waits of processes, here and on peers."""
        self._breaks.append(close)

    def on_release(self, release: Callable[[], None]) -> None:
        """Registers `release`, called once the error is known: it ends waits of this rank's GPU."""
        self._releases.append(release)

    def on_close(self, close: Callable[[], None]) -> None:
        """Registers `close`, called when the ring frees its resources."""
        self._closes.append(close)

    def close(self) -> None:
        """Frees the resources of the ring. `error` keeps its value."""
        self.closed = True
        for close in self._closes:
            close()
        for other in self._others:
            other._others.remove(self)
        for kept in (self._closes, self._breaks, self._releases, self._others):
            kept.clear()  # the callbacks refer to objects that refer to this one
        self.board = None

    def join(self, other: Faults) -> None:
        """Makes each of two rings break when the other does; this rank is in both rings."""
        self._others.append(other)
        other._others.append(self)

    @property
    def is_whole(self) -> bool:
        """Returns whether no rank has reported a failure. Ranks that ask at about the same time get the same answer."""
        return self.error is None and not self.was_reported()

    def raise_async(self, elsewhere: Callable[[], None], cancel: Callable[[], None]) -> None:
        """Raises the error in another thread, unless some thread has raised it or is about to.

        Args:
            elsewhere: makes the other thread raise the error.
            cancel: takes the error back while the other thread has not raised it yet; `claim` calls it.
        """
        with self._lock:
            if not self.delivered:
                self.delivered, self._cancel = True, cancel
                elsewhere()

    def claim(self) -> None:
        """Claims the error for the caller, which is about to raise it: no other thread raises it from then on."""
        with self._lock:
            self.delivered = True
            if self._cancel is not None:
                self._cancel()
                self._cancel = None

    def release(self) -> None:
        """Ends all waits of this rank's GPU. Results that the GPU computes from then on are invalid."""
        with suppress(IndexError):  # another thread may release at the same time
            while True:
                self._releases.pop()()

    def check(self) -> None:
        """Raises the error that ended this ring, if there is one."""
        if self.error is not None:
            self.claim()
            raise _copy_of(self.error)

    def ended(self) -> list[int]:
        """Returns the ranks on this host with a process that has ended."""
        return processes.ended(self.identities)

    def wait(self, attempt: Callable[[float], bool], hop: int | None, peers: Sequence[int] = ()) -> None:
        """Waits for messages of `peers`.

        Args:
            attempt: waits for at most the given seconds and returns whether the messages came. It raises RuntimeError
                if a connection is closed.
            hop: the hop of the messages; None in the agreement before the first hop.
            peers: the senders; empty if they are all ranks.

        Raises:
            PeerFailed, PeerLost, RingTimeout: the messages will not come.
        """
        self.check()
        start = time.monotonic()
        verdict: Verdict | None = None
        cause: RuntimeError | None = None
        while verdict is None:
            try:
                if attempt(INTERVAL):
                    return
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                verdict, cause = "late" if time.monotonic() - start >= 0.9 * self.deadline else "closed", error
            else:
                verdict = self.judge(time.monotonic() - start, peers)
        raise self.give_up(verdict, hop, peers) from cause

    def wait_for(self, work: dist.Work) -> None:
        """Waits for a gloo collective, as `wait` does."""

        def attempt(seconds: float) -> bool:
            try:
                return work.wait(timedelta(seconds=seconds))
            except RuntimeError:  # a timeout, a failure, or completion just after the timeout
                return work.is_completed() and work.wait(timedelta(seconds=seconds))

        self.wait(attempt, hop=None)

    def judge(self, waited: float, peers: Sequence[int]) -> Verdict | None:
        """Judges a wait for messages of `peers` (all ranks if empty) that has lasted `waited` seconds.

        Returns:
            The verdict if the messages are not expected any more, otherwise None.
        """
        if waited >= self.deadline:
            return "late"
        if waited < PATIENCE:
            return None
        ended = {*self.ended()}
        return "closed" if self.was_reported() or ended & ({*peers} or ended) else None

    def look_back(self, started: float) -> None:
        """Raises the peers' conclusion at the end of a pass that took so long that they may have given up.

        A process that does not wait for messages would otherwise continue with the results of a broken ring.

        Args:
            started: `time.monotonic()` at the start of the pass.

        Raises:
            PeerFailed, PeerLost, RingTimeout: another rank has reported that the ring is broken.
        """
        if time.monotonic() - started >= PATIENCE and self.was_reported():
            raise self.give_up("behind", None)

    def raised(self, error: BaseException) -> None:
        """Reports that this rank raised `error` in a ring, so that the other ranks raise too."""
        if self.error is None:
            text = "".join(traceback.format_exception(error))
            self._end(FailureReport(self._rank, "raised", None, (), f"{type(error).__name__}: {error}\n{text}"))
            self.claim()
            self.release()

    def broken(self, kind: Verdict, hop: int | None, peers: Sequence[int] = ()) -> RingflashError:
        """Ends the ring after this rank waited for `peers` in vain, and returns the error to raise."""
        return self._end(FailureReport(self._rank, kind, hop, tuple(peers), str(self.plan)))

    def give_up(self, kind: Verdict, hop: int | None, peers: Sequence[int] = ()) -> RingflashError:
        """Ends the ring as `broken` does, and all waits of this rank's GPU; the caller raises the returned error."""
        error = self.broken(kind, hop, peers)
        self.claim()
        self.release()
        return error

    def was_reported(self) -> bool:
        """Returns whether any rank has reported that the ring is broken."""
        if self.board is not None and not self.board.is_empty():
            return True
        with suppress(RuntimeError):
            return self.store.check([_BROKEN])
        return False

    def _end(self, report: FailureReport) -> RingflashError:
        with self._lock:  # the watch thread may get here together with the thread that posts GPU work
            if self.error is None:
                self._report(report)
                for close in self._breaks:
                    close()
                reports, ended = ([report], []) if report.kind == "raised" else self._collect_reports(report)
                self.error = conclude(
                    reports, ended, self._world_size, self.deadline, self._rank, readable=self._is_readable()
                )
        for other in self._others:
            if other.error is None:
                other.raised(self.error)
        return _copy_of(self.error)

    def _report(self, report: FailureReport) -> None:
        half = _LONGEST // 2
        text = report.text if len(report.text) <= _LONGEST else f"{report.text[:half]}\n...\n{report.text[-half:]}"
        fields = json.dumps(asdict(replace(report, text=text)), ensure_ascii=False)
        if self.board is not None:
            self.board.put(self._rank, fields)
        with suppress(RuntimeError):  # the store may have ended with the rank that serves it
            self.store.set(str(self._rank), fields)
            self.store.set(_BROKEN, "")

    def _report_of(self, rank: int) -> FailureReport | None:
        """Returns the report of `rank`, or None if there is none."""
        text: str | bytes | None = None if self.board is None else self.board.get(rank)
        if text is None:
            with suppress(RuntimeError):
                text = self.store.get(str(rank)) if self.store.check([str(rank)]) else None
        if text is None:
            return None
        fields = json.loads(text)
        return FailureReport(**{**fields, "peers": tuple(fields["peers"])})

    def _is_readable(self) -> bool:
        """Returns whether this rank can read the reports of other ranks."""
        with suppress(RuntimeError):
            return self.board is not None or self.store.check([_BROKEN]) in (True, False)
        return False

    def _collect_reports(self, own: FailureReport) -> tuple[list[FailureReport], list[int]]:
        """Returns the reports in rank order, once no further report is expected, and the ranks that had ended."""
        start, reports, ended = time.monotonic(), {own.rank: own}, list[int]()
        while True:
            waited, readable = time.monotonic() - start, self._is_readable()
            # Looked up before the reports, so that the report of a rank in `ended` is not missed. Without reports only
            # the first ranks that ended count: others may have raised this error and then ended.
            if readable or not ended:
                ended = self.ended()
            missing = [rank for rank in range(self._world_size) if rank not in reports]
            for rank in missing:
                report = self._report_of(rank)
                if report is not None:
                    reports[rank] = report
            raised = any(report.kind == "raised" for report in reports.values())
            patience = ALONE if ended and not readable else GRACE
            if raised or {*missing} - {*reports} <= {*ended} or waited >= patience:
                return [reports[rank] for rank in sorted(reports)], ended
            time.sleep(_POLL * (1 + self._world_size // 32))  # one process may serve the store for all ranks
