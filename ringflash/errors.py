"""Exceptions of the library; each message names the expected value, the value received and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class RingflashError(Exception):
    """Base class of all exceptions that ringflash raises on purpose. They can be sent between processes."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns a form without the constructor's arguments, which differ from the `args` of the exception."""
        return _restore, (type(self), self.args, vars(self))


def _restore(kind: type[RingflashError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RingflashError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class ArgumentError(RingflashError, ValueError):
    """An argument that cannot be honoured.

    Args:
        argument: name of the argument in the caller's code.
        expected: description of the accepted values.
        got: the value received.
        remedy: instruction for the caller.
        rank: the rank that detected the error, if it matters.
    """

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str, rank: int | None = None) -> None:
        self.argument, self.expected, self.got, self.remedy, self.rank = argument, expected, got, remedy, rank
        where = "" if rank is None else f" on rank {rank}"
        super().__init__(f"{argument}: expected {expected}, got {got}{where}. {remedy}")

    def __reduce__(self) -> tuple[Callable[..., ArgumentError], tuple[str]]:
        """Returns a form that can be sent between processes; `got` becomes text, because it may be any object."""
        rest = {"expected": self.expected, "got": str(self.got), "remedy": self.remedy, "rank": self.rank}
        return partial(_rebuild, type(self), **rest), (self.argument,)


def _rebuild(kind: type[ArgumentError], argument: str, **rest: Any) -> ArgumentError:
    """Rebuilds an error of class `kind` without its constructor, which may take other arguments in a subclass."""
    error = kind.__new__(kind)
    ArgumentError.__init__(error, argument, **rest)
    return error


class ConfigError(ArgumentError):
    """A configuration key or value that no component understands."""


class StateError(ArgumentError, RuntimeError):
    """A call that an object does not allow yet, or not any more; `argument` names the object."""


class DataError(ArgumentError):
    """A corpus that is missing, empty or too short."""


class CorpusError(DataError):
    """A token file with a header, offsets or ids that `ringflash prepare` does not write."""


class CheckpointError(ArgumentError):
    """A checkpoint that is missing, incomplete or of another model, or that could not be saved."""


class CheckpointCorrupt(CheckpointError):
    """A file of a checkpoint, named by `argument`, that differs from the saved one."""


FIRST_TOKENS = "first token ids (checksum)"  # a field of agreements, see `coordination.first_tokens`
_REMEDIES = {
    FIRST_TOKENS: "All ranks of a context must cut the same sequences, in calls of the same order. Give the loader's "
    "sampler the rank and the number of ranks of the data-parallel dimension, not those of the world, and make the "
    "context again.",
    "dropout": "Call with the same dropout on all ranks of the context. Ranks draw the same seed only if they are "
    "seeded alike, and RingAttentionStrategy seeds them differently: pass rf.Dropout(p, seed=number), with another "
    "number in each step.",
}


class RankMismatch(RingflashError, ValueError):
    """Ranks called one collective with different arguments; raised on every rank before any data moves.

    Args:
        field: the first field that differs.
        values: the field's value on each rank, in rank order.
        odd_ranks: the ranks that differ from the rest.
        rank: the rank that raises.
        remedy: instruction for the caller; None: to call with the same field on all ranks.
    """

    def __init__(
        self, field: str, values: Sequence[object], odd_ranks: list[int], *, rank: int, remedy: str | None = None
    ) -> None:
        self.field, self.values, self.odd_ranks, self.rank = field, values, odd_ranks, rank
        table = "\n".join(f"  rank {r}: {v}{'   <-- differs' if r in odd_ranks else ''}" for r, v in enumerate(values))
        super().__init__(
            f"ranks disagree on {field}: rank{'s' if len(odd_ranks) > 1 else ''} {', '.join(map(str, odd_ranks))} "
            f"against the rest (seen on rank {rank}).\n{table}\n"
            + (remedy or _REMEDIES.get(field) or f"Call with the same {field} on all ranks of the context.")
        )


class PeerFailed(RingflashError, RuntimeError):
    """Another rank raised while all were in a call; raised on every other rank of the context.

    Args:
        ranks: the ranks that raised.
        texts: the error of each of these ranks, with its traceback.
        rank: the rank that raises this error.
    """

    def __init__(self, ranks: list[int], texts: list[str], *, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        table = "\n".join(f"  rank {r}: {text.rstrip()}" for r, text in zip(ranks, texts, strict=True))
        super().__init__(f"ranks {ranks} raised (seen on rank {rank}):\n{table}")


class RingTimeout(RingflashError, TimeoutError):
    """A rank did not do its part within the ring's deadline; raised on every rank that waited.

    Args:
        peers: the late ranks: if there are any, ranks that were waited for and sent no failure report.
        hop: the hop of the message that did not arrive; None in the agreement before the first hop.
        deadline: seconds that a rank waits for a message.
        reports: the failure report of each rank, in rank order.
        rank: the rank that raises.
    """

    def __init__(self, peers: list[int], hop: int | None, deadline: float, reports: list[str], *, rank: int) -> None:
        self.peers, self.hop, self.deadline, self.rank = peers, hop, deadline, rank
        super().__init__(
            f"waited {deadline:g} s for {_ranks(peers)} at {_place(hop)} (seen on rank {rank}).\n{_table(reports)}\n"
            "See what these ranks do meanwhile, or give the context a longer timeout, and its group one longer still."
        )


class PeerLost(RingflashError, ConnectionError):
    """A rank's process is gone; raised on every rank that is left.

    Args:
        peers: the ranks that are gone.
        hop: the hop at which the loss was noticed; None in the agreement before the first hop.
        reports: the failure report of each rank, in rank order.
        rank: the rank that raises.
    """

    def __init__(self, peers: list[int], hop: int | None, reports: list[str], *, rank: int) -> None:
        self.peers, self.hop, self.rank = peers, hop, rank
        super().__init__(
            f"lost {_ranks(peers)} at {_place(hop)} (seen on rank {rank}).\n{_table(reports)}\n"
            "Its own output says why it ended, or the system's log if it was killed."
        )


class GroupFailed(RingflashError, ConnectionError):
    """The failure of a collective of the program's own process group, outside of a ring; torch's error is the cause.

    Args:
        action: the joint action of the ranks, as text.
        text: the message of torch's error.
        rank: the global rank that raises.
    """

    def __init__(self, action: str, text: str, rank: int) -> None:
        self.action, self.text, self.rank = action, text, rank
        super().__init__(
            f"the process group failed while its ranks {action} (seen on rank {rank}): {text}\n"
            "See the output of the other ranks: one has ended, or did not come until the group's timeout."
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _place(hop: int | None) -> str:
    return "the agreement before hop 0" if hop is None else f"hop {hop}"


def _table(reports: list[str]) -> str:
    return "\n".join(f"  rank {rank}: {report}" for rank, report in enumerate(reports))
