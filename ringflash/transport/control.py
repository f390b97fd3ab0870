"""The control plane of a context: small CPU collectives in which ranks agree before any data moves."""

from __future__ import annotations

import struct
import traceback
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.errors import ArgumentError, PeerFailed, RankMismatch, RingflashError
from ringflash.transport.faults import Faults

Field = int | float | str
_OK, _FAILED = 0, 1
_WIDTH = 24  # every rank sends the same number of words, whatever it has to say


def _word(value: Field) -> int:
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return int(value)


def odd_ones(values: Sequence[int]) -> list[int]:
    """The ranks whose value is not the most common one."""
    common = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != common]


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


class ControlPlane:
    """Agreement between the ranks of `group` over gloo.

    Args:
        group: the ranks, and what larger tensors travel over.
        gloo: a gloo group of the same ranks in the same order, for agreement alone.
        faults: what a wait for a rank that does not come becomes.
    """

    def __init__(self, group: dist.ProcessGroup, gloo: dist.ProcessGroup, faults: Faults) -> None:
        self._data, self._group, self.faults = group, gloo, faults
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def check_alive(self) -> None:
        """The group is as it was when the context was made.

        Raises:
            ArgumentError: it has been destroyed since.
            PeerFailed, PeerLost, RingTimeout: its ring broke in an earlier call.
        """
        if not is_alive(self._data):
            remedy = "Create the context anew, after the group."
            expected, got = "a context whose process group exists", "one whose group was destroyed"
            raise ArgumentError("context", expected=expected, got=got, remedy=remedy, rank=self.rank)
        self.faults.check()

    def agree(self, fields: Mapping[str, Field], *, free: str) -> list[int]:
        """Compares `fields` over all ranks, all but the integer field `free`, and returns that field's value of each.

        Raises:
            RankMismatch: on every rank, when a field differs.
            PeerFailed: when a rank called `fail` instead.
            PeerLost, RingTimeout: when a rank is gone, or does not come within the deadline.
        """
        self.check_alive()
        words = [_OK, *(_word(value) for value in fields.values())]
        table = self._exchange(words)
        failed = [rank for rank, row in enumerate(table) if row[0] == _FAILED]
        if failed:
            raise PeerFailed(failed, [texts for texts in self._texts("") if texts], rank=self.rank)
        for column, name in enumerate(fields, start=1):
            values = [row[column] for row in table]
            if name != free and len(set(values)) > 1:
                raise RankMismatch(name, self._texts(str(fields[name])), odd_ones(values), rank=self.rank)
        column = list(fields).index(free) + 1
        return [row[column] for row in table]

    def fail(self, error: Exception) -> None:
        """Tells the ranks that are about to agree that this one raised `error`, so that they raise too."""
        with suppress(RingflashError):  # what `error` says comes first, whatever became of the others
            self.check_alive()
            table = self._exchange([_FAILED])
            if any(row[0] == _FAILED for row in table):
                trace = "".join(traceback.format_exception(error))
                self._texts(f"{type(error).__name__}: {error}\n{trace}")

    def compare(self, field: str, text: str, own: str) -> None:
        """Raises RankMismatch on every rank, with each rank's `own`, unless all have the same `text`."""
        digests = [row[1] for row in self._exchange([_OK, _word(text)])]
        if len(set(digests)) > 1:
            raise RankMismatch(field, self._texts(own), odd_ones(digests), rank=self.rank)

    def tell(self, text: str) -> list[str]:
        """All ranks' texts, in rank order."""
        self.check_alive()
        return self._texts(text)

    def gather(self, x: Tensor, rows: list[int], dim: int) -> Tensor:
        """All ranks' `x` joined along `dim` in rank order; rank r's has `rows[r]` entries there."""
        moved = x.movedim(dim, 0).contiguous()
        padded = moved.new_zeros((max(rows), *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        everyone = self.stack(padded.view(torch.uint8)).view(x.dtype)  # bytes: gloo knows few dtypes
        return torch.cat([t[:n] for t, n in zip(everyone, rows, strict=True)]).movedim(0, dim)

    def stack(self, x: Tensor) -> Tensor:
        """All ranks' `x`, contiguous and of one shape and dtype, one after another in rank order: (ranks, ...)."""
        everyone = x.new_empty((self.world_size, *x.shape))
        dist.all_gather(list(everyone.unbind(0)), x, group=self._data)
        return everyone

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._data)
        return total

    def _exchange(self, words: list[int]) -> list[list[int]]:
        assert len(words) <= _WIDTH
        mine = torch.tensor(words + [0] * (_WIDTH - len(words)), dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._gather(everyone, mine)
        return [row.tolist() for row in everyone]

    def _texts(self, text: str) -> list[str]:
        words = torch.frombuffer(bytearray(f"{text}\0".encode()), dtype=torch.uint8)
        lengths = [row[0] for row in self._exchange([len(words)])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(words)] = words
        everyone = [torch.empty_like(mine) for _ in lengths]
        self._gather(everyone, mine)
        return [bytes(row.tolist()).partition(b"\0")[0].decode() for row in everyone]

    def _gather(self, everyone: list[Tensor], mine: Tensor) -> None:
        work = dist.all_gather(everyone, mine, group=self._group, async_op=True)
        assert work is not None

        def attempt(seconds: float) -> bool:
            try:
                return work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if work.is_completed():  # else the time is up, and no more than that
                    raise
                return False

        self.faults.wait(attempt, hop=None)
