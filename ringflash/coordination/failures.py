"""What ranks do when a ring breaks: each leaves word, breaks its own connections, and hears the others out.

A rank that fails, or waits in vain, first leaves word in the group's store, then closes its connections, so that every
rank that waits for it wakes and does the same. Within a moment all that live have left word, and each concludes alike
from all words: who raised, who is gone, who is late. The ring's groups are its own, so nothing else breaks with them.
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

INTERVAL = 0.1  # seconds between two looks at what is awaited
PATIENCE = 0.5  # seconds after which a message is late enough to ask for its sender
GRACE = 1.0  # seconds in which a rank that lives and waits leaves word, once connections close
_POLL = 0.02
_BROKEN = "broken"  # a key of the store, beside those of ranks
_LONGEST = 6000  # characters of a text that are told: a board has room for these in any script


@dataclass(frozen=True)
class FailureReport:
    """What a rank leaves when a ring breaks.

    Args:
        rank: whose word it is.
        kind: it "raised", waited until it was too "late", found a connection "closed", or is "behind": it came to the
            end of its pass after others had left word.
        hop: where it waited; None where ranks agree, before the first hop.
        peers: whom it waited for; none where that is all of them.
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
    words: Sequence[FailureReport], ended: Sequence[int], world_size: int, deadline: float, rank: int
) -> RingflashError:
    """What `rank` raises, given the words that ranks left, and the ranks whose processes are known to have ended."""
    raised = [word for word in words if word.kind == "raised"]
    if raised:
        return PeerFailed([word.rank for word in raised], [word.text for word in raised], rank=rank)
    said = {word.rank: word for word in words}
    missing = [r for r in range(world_size) if r not in said]
    waited_for = {peer for word in words for peer in word.peers}
    # Of the ranks without word some may merely be busy: those come first that are gone, or were waited for.
    gone = sorted({*ended} & {*missing})
    behind = [word.rank for word in words if word.kind == "behind"]
    peers = gone or sorted(waited_for & {*missing}) or missing or behind or sorted(waited_for)
    late = [word for word in words if word.kind == "late"]
    hop = next((word.hop for word in late or words if {*word.peers} & {*peers}), (late or words)[0].hop)
    texts = [str(said[r]) if r in said else "left no word" for r in range(world_size)]
    if gone or not late:
        return PeerLost(peers, hop, texts, rank=rank)
    if not missing and not behind:  # all live, and wait for what nobody sends: they follow different plans
        texts = [f"{text}\n    {said[r].text}".rstrip() for r, text in enumerate(texts)]
    return RingTimeout(peers, hop, deadline, texts, rank=rank)


def _copy_of(error: RingflashError) -> RingflashError:
    """Returns `error` without a traceback, to be raised.

    An error that was raised refers to frames, and so to the tensors of the broken call. Their graph refers to the
    context through C++, where Python's garbage collector cannot follow. A ring that kept that error would never end.
    """
    copy = type(error).__new__(type(error))
    Exception.__init__(copy, *error.args)  # its own arguments are not known here
    copy.__dict__.update(error.__dict__)
    return copy


class Faults:
    """One rank's view of what went wrong in its ring.

    Args:
        store: shared by the ranks, with keys of this ring's own.
        rank: this rank.
        world_size: ranks in the ring.
        deadline: seconds that a rank waits for a message.
    """

    def __init__(self, store: Store, rank: int, world_size: int, deadline: float) -> None:
        self._rank, self._world_size, self.deadline = rank, world_size, deadline
        self.store, self.number = store, 0
        # Where all ranks are of one host: it outlives the process that serves the store.
        self.board: Board | None = None
        self.error: RingflashError | None = None  # set once, copies are raised; the ring is of no use from then on
        self.plan: object = ""  # what this rank follows, for its word
        self.delivered = False  # whether a caller has seen the error
        self.identities: list[str] = []  # of the ranks' processes
        self._others: list[Faults] = []
        self._breaks: list[Callable[[], None]] = []
        self._releases: list[Callable[[], None]] = []
        self._closes: list[Callable[[], None]] = []
        self.closed = False
        self._cancel: Callable[[], None] | None = None  # what another thread has not yet raised
        self._lock = threading.RLock()

    def on_break(self, close: Callable[[], None]) -> None:
        """`close` is called as soon as the ring breaks: it ends waits of processes, here and on peers."""
        self._breaks.append(close)

    def on_release(self, release: Callable[[], None]) -> None:
        """`release` is called when the error is known: it ends waits of this rank's GPU."""
        self._releases.append(release)

    def on_close(self, close: Callable[[], None]) -> None:
        """`close` is called when the ring's resources are given back."""
        self._closes.append(close)

    def close(self) -> None:
        """Gives back the ring's resources. An error that ended the ring stays."""
        self.closed = True
        for close in self._closes:
            close()
        for other in self._others:
            other._others.remove(self)
        for kept in (self._closes, self._breaks, self._releases, self._others):
            kept.clear()  # they refer to what refers to this
        self.board = None

    def join(self, other: Faults) -> None:
        """Makes each break when the other does: those of two groups of ranks that this rank is in."""
        self._others.append(other)
        other._others.append(self)

    @property
    def is_whole(self) -> bool:
        """Whether nothing has gone wrong, on any rank: all ranks are told alike, if they ask at about the same time."""
        return self.error is None and not self.was_reported()

    def raise_async(self, elsewhere: Callable[[], None], cancel: Callable[[], None]) -> None:
        """Raises the error `elsewhere`, in another thread, unless one has it; until it gets there it may `cancel`."""
        with self._lock:
            if not self.delivered:
                self.delivered, self._cancel = True, cancel
                elsewhere()

    def claim(self) -> None:
        """The caller is about to raise the error: it is raised here, once, and nowhere else any more."""
        with self._lock:
            self.delivered = True
            if self._cancel is not None:
                self._cancel()
                self._cancel = None

    def release(self) -> None:
        """Lets go on whatever waits on this rank's GPU; what it computes from then on is of no use."""
        with suppress(IndexError):  # another thread may be at it
            while True:
                self._releases.pop()()

    def check(self) -> None:
        """Raises what ended this ring, if it has ended."""
        if self.error is not None:
            self.claim()
            raise _copy_of(self.error)

    def ended(self) -> list[int]:
        """Ranks on this host whose processes have ended."""
        return processes.ended(self.identities)

    def wait(self, attempt: Callable[[float], bool], hop: int | None, peers: Sequence[int] = ()) -> None:
        """Waits for messages of `peers`, all when empty.

        `attempt` waits for at most so many seconds, and says whether they came; a RuntimeError is a closed connection.

        Raises:
            PeerFailed, PeerLost, RingTimeout: they will not come.
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
        named = self.broken(verdict, hop, peers)
        self.claim()
        self.release()
        raise named from cause

    def wait_for(self, work: dist.Work) -> None:
        """`wait`, for a collective of gloo."""

        def attempt(seconds: float) -> bool:
            try:
                return work.wait(timedelta(seconds=seconds))
            except RuntimeError:  # the time is up, or it failed, or it was done just after the time was up
                return work.is_completed() and work.wait(timedelta(seconds=seconds))

        self.wait(attempt, hop=None)

    def judge(self, waited: float, peers: Sequence[int]) -> Verdict | None:
        """Whether messages of `peers`, all when empty, are not to be expected any more after `waited` seconds."""
        if waited >= self.deadline:
            return "late"
        if waited < PATIENCE:
            return None
        ended = {*self.ended()}
        return "closed" if self.was_reported() or ended & ({*peers} or ended) else None

    def look_back(self, started: float) -> None:
        """At the end of a pass: raises what the others concluded, if it took so long that they may have given up.

        A process that does not wait for messages would else go on with what a broken ring has computed.
        """
        if time.monotonic() - started >= PATIENCE and self.was_reported():
            named = self.broken("behind", None)
            self.claim()
            self.release()
            raise named

    def raised(self, error: BaseException) -> None:
        """This rank raised `error` in a ring: brings the others down too."""
        if self.error is None:
            text = "".join(traceback.format_exception(error))
            self._end(FailureReport(self._rank, "raised", None, (), f"{type(error).__name__}: {error}\n{text}"))
            self.claim()
            self.release()

    def broken(self, kind: Verdict, hop: int | None, peers: Sequence[int] = ()) -> RingflashError:
        """The error to raise where this rank waited for `peers` in vain."""
        return self._end(FailureReport(self._rank, kind, hop, tuple(peers), str(self.plan)))

    def was_reported(self) -> bool:
        """Whether a rank has said that the ring is broken."""
        if self.board is not None and not self.board.is_empty():
            return True
        with suppress(RuntimeError):
            return self.store.check([_BROKEN])
        return False

    def _end(self, word: FailureReport) -> RingflashError:
        with self._lock:  # the thread that watches GPU work may get here together with the one that posts it
            if self.error is None:
                self._report(word)
                for close in self._breaks:
                    close()
                words = [word] if word.kind == "raised" else self._collect_reports(word)
                self.error = conclude(words, self.ended(), self._world_size, self.deadline, self._rank)
        for other in self._others:
            if other.error is None:
                other.raised(self.error)
        return _copy_of(self.error)

    def _report(self, word: FailureReport) -> None:
        half = _LONGEST // 2
        text = word.text if len(word.text) <= _LONGEST else f"{word.text[:half]}\n...\n{word.text[-half:]}"
        fields = json.dumps(asdict(replace(word, text=text)), ensure_ascii=False)
        if self.board is not None:
            self.board.put(self._rank, fields)
        with suppress(RuntimeError):  # the store may have died with the rank that serves it
            self.store.set(str(self._rank), fields)
            self.store.set(_BROKEN, "")

    def _report_of(self, rank: int) -> FailureReport | None:
        """Returns the word that `rank` has left."""
        text: str | bytes | None = None if self.board is None else self.board.get(rank)
        if text is None:
            with suppress(RuntimeError):
                text = self.store.get(str(rank)) if self.store.check([str(rank)]) else None
        if text is None:
            return None
        fields = json.loads(text)
        return FailureReport(**{**fields, "peers": tuple(fields["peers"])})

    def _collect_reports(self, own: FailureReport) -> list[FailureReport]:
        """The words of all ranks in their order, once nothing more is to be expected."""
        end, words = time.monotonic() + GRACE, {own.rank: own}
        while True:
            ended = {*self.ended()}  # looked up first: who has ended since has left word before
            missing = [rank for rank in range(self._world_size) if rank not in words]
            for rank in missing:
                word = self._report_of(rank)
                if word is not None:
                    words[rank] = word
            raised = any(word.kind == "raised" for word in words.values())
            if raised or {*missing} - {*words} <= ended or time.monotonic() >= end:
                return [words[rank] for rank in sorted(words)]
            time.sleep(_POLL * (1 + self._world_size // 32))  # one process may serve the store to all of them
