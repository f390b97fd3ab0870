"""The library's exceptions: each says what was expected, what came, and what to do."""

from __future__ import annotations


class RingflashError(Exception):
    """Base of everything ringflash raises on purpose."""


class ArgumentError(RingflashError, ValueError):
    """An argument that cannot be honoured.

    Args:
        argument: name of the argument, as the caller knows it.
        expected: what would have been accepted.
        got: what came.
        remedy: what to do about it.
        rank: the rank that noticed, when it matters.
    """

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str, rank: int | None = None) -> None:
        self.argument, self.expected, self.got, self.remedy, self.rank = argument, expected, got, remedy, rank
        where = "" if rank is None else f" on rank {rank}"
        super().__init__(f"{argument}: expected {expected}, got {got}{where}. {remedy}")


class ConfigError(ArgumentError):
    """A configuration key or value that no component understands."""


class DataError(ArgumentError):
    """A corpus that is missing, empty or too short."""


class CheckpointError(ArgumentError):
    """A checkpoint that is missing, incomplete, or of another model."""


class RankMismatch(RingflashError, ValueError):
    """Ranks that called one collective with different arguments; raised on every rank before any data moves.

    Args:
        field: the first field that differs.
        values: its value on each rank, in rank order.
        odd_ranks: the ranks that differ from the rest.
        rank: the rank that raises.
    """

    def __init__(self, field: str, values: list[object], odd_ranks: list[int], *, rank: int) -> None:
        self.field, self.values, self.odd_ranks, self.rank = field, values, odd_ranks, rank
        table = "\n".join(f"  rank {r}: {v}{'   <-- differs' if r in odd_ranks else ''}" for r, v in enumerate(values))
        super().__init__(
            f"ranks disagree on {field}: rank{'s' if len(odd_ranks) > 1 else ''} {', '.join(map(str, odd_ranks))} "
            f"against the rest (seen on rank {rank}).\n{table}\nCall with the same {field} on all ranks of the context."
        )


class PeerFailed(RingflashError, RuntimeError):
    """Another rank raised before an exchange that needs all ranks; raised on every other rank of the context.

    Args:
        ranks: the ranks that raised.
        texts: what each of them raised.
        rank: the rank that raises.
    """

    def __init__(self, ranks: list[int], texts: list[str], *, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        table = "\n".join(f"  rank {r}: {text}" for r, text in zip(ranks, texts, strict=True))
        super().__init__(f"ranks {ranks} raised before the exchange (seen on rank {rank}):\n{table}")
