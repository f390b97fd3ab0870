"""The control plane of a context: small exchanges between CPUs in which ranks agree before any data moves."""

from __future__ import annotations

import struct
import traceback
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.coordination import processes
from ringflash.coordination.failures import Faults
from ringflash.coordination.words import GlooWords, Rows, Words, shared
from ringflash.errors import ArgumentError, PeerFailed, RankMismatch, RingflashError

Field = int | float | str
T = TypeVar("T")
_OK, _FAILED, _AHEAD = range(3)  # that a rank waits for the others' words, has raised, or goes on meanwhile
_KEPT = 256  # calls that are remembered


def _word(value: Field) -> int:
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return int(value)


def outlier_ranks(values: Sequence[int]) -> list[int]:
    """The ranks whose value is not the most common one."""
    common = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != common]


def stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The `x` of all ranks of `group`, contiguous and of one shape and dtype, in rank order: (ranks, ...)."""
    everyone = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(everyone.unbind(0)), x, group=group)
    return everyone


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


@dataclass(eq=False)
class _Call:
    """What a rank says of a call, the same in every one like it.

    Args:
        fields: as `agree` is given them.
        free: likewise.
        words: a number for each field.
        agreed: what all ranks said of it when they last agreed, and what follows.
    """

    fields: Mapping[str, Field]
    free: str
    words: tuple[int, ...]
    agreed: _Agreed | None = None


@dataclass(frozen=True)
class _Agreed:
    """What all ranks said of a call, and what follows.

    Args:
        table: their words.
        digest: of all values of the free field, for who goes on with them without waiting.
        result: what these come to.
    """

    table: Rows
    digest: int
    result: Any


class ControlPlane:
    """Agreement between the ranks of `group`.

    Args:
        group: the ranks, and what larger tensors travel over.
        gloo: a gloo group of the same ranks in the same order, for agreement alone; words travel over it until
            `share_words`, texts always.
        faults: what a wait for a rank that does not come becomes.
        optimistic: a call that ranks agreed on before goes on without waiting, as if all said the same as then; that is
            looked at in the next one. For messages that GPUs wait for: launches would else wait for the network.
    """

    def __init__(
        self, group: dist.ProcessGroup, gloo: dist.ProcessGroup, faults: Faults, *, optimistic: bool = False
    ) -> None:
        self._data, self.faults, self._runs_ahead = group, faults, optimistic
        self._calls: dict[Hashable, _Call] = {}
        self._unsettled: tuple[_Call, Callable[[], Rows], Callable[[list[int]], Any]] | None = None
        self._over_gloo = GlooWords(gloo, faults)
        self._words: Words = self._over_gloo
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def share_words(self) -> None:
        """Has words pass through memory from now on, if all ranks are on one host; a collective.

        Only where the end of each process is seen by the others: over memory nobody's connection closes with it.
        """
        if self.world_size > 1 and processes.together(self.faults.identities):
            self._words = shared(self.tell, self.rank, self.world_size, self.faults) or self._words

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
        return self.agree_on((free, *fields, *fields.values()), lambda: fields, free=free, then=lambda values: values)

    def values(self, fields: Mapping[str, Field], *, free: str) -> list[int]:
        """Does what `agree` does, and always waits for the other ranks: the free field may change at any call."""
        self.check_alive()
        self._settle()
        call = _Call(fields, free, tuple(_word(value) for value in fields.values()))
        return self._checked(call, self._words.post((_OK, *call.words)), lambda values: values)

    def agree_on(
        self, kind: Hashable, fields: Callable[[], Mapping[str, Field]], *, free: str, then: Callable[[list[int]], T]
    ) -> T:
        """As `agree`, of calls of which most are like one before: `then` of what it returns.

        Args:
            kind: all that `fields` and `then` depend on; neither is called again for what is known.
            fields: gives the fields.
            free: as in `agree`.
            then: of the free field's values; what it raises comes on every call that finds these. It is not kept.
        """
        self.check_alive()
        self._settle()
        call = self._calls.get(kind)
        if call is None:
            call = self._called(kind, fields(), free)
        if self._runs_ahead and call.agreed is not None:
            self._unsettled = call, self._words.post((_AHEAD, *call.words, call.agreed.digest)), then
            return call.agreed.result
        return self._checked(call, self._words.post((_OK, *call.words)), then)

    def forget(self) -> None:
        """Waits for the others' agreement in the next call of each kind."""
        self._calls.clear()  # entries, not their `agreed`: settling the call under way would fill it again

    def _called(self, kind: Hashable, fields: Mapping[str, Field], free: str) -> _Call:
        """A call of a new kind."""
        if len(self._calls) == _KEPT:
            self._calls.clear()
        call = self._calls[kind] = _Call(fields, free, tuple(_word(value) for value in fields.values()))
        return call

    def _settle(self) -> None:
        """Looks at the agreement on the last call, which went on without."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            self._checked(*unsettled)

    def _checked(self, call: _Call, everyone: Callable[[], Rows], then: Callable[[list[int]], Any]) -> Any:
        """What `agree_on` returns, once all ranks have said their words."""
        table = everyone()
        if call.agreed is None or table != call.agreed.table:
            values = self._compared(call, table)
            call.agreed = _Agreed(table, _word(str(values)), then(values))
        return call.agreed.result

    def _compared(self, call: _Call, table: Rows) -> list[int]:
        """What `agree` returns, of all ranks' words."""
        ahead = any(row[0] == _AHEAD for row in table)  # such a rank hears of it in its next call, or from its watch
        failed = [rank for rank, row in enumerate(table) if row[0] == _FAILED]
        if failed and ahead:
            raise self.faults.broken("closed", None, failed)
        if failed:
            raise PeerFailed(failed, [texts for texts in self._texts("") if texts], rank=self.rank)
        for column, (name, value) in enumerate(call.fields.items(), start=1):
            values = [row[column] for row in table]
            if name == call.free or len(set(values)) == 1:
                continue
            own = values[self.rank]
            texts = [str(value) if x == own else "another" for x in values] if ahead else self._texts(str(value))
            error = RankMismatch(name, texts, outlier_ranks(values), rank=self.rank)
            if ahead:
                self.faults.raised(error)
            raise error
        column = list(call.fields).index(call.free) + 1
        result = [row[column] for row in table]
        wrong = [
            r for r, row in enumerate(table) if row[0] == _AHEAD and row[len(call.fields) + 1] != _word(str(result))
        ]
        if wrong:
            texts = [f"{value}{', of another whole' * (r in wrong)}" for r, value in enumerate(result)]
            error = RankMismatch(call.free, texts, wrong, rank=self.rank)
            self.faults.raised(error)
            raise error
        return result

    def fail(self, error: Exception) -> None:
        """Tells the ranks that are about to agree that this one raised `error`, so that they raise too."""
        with suppress(RingflashError):  # what `error` says comes first, whatever became of the others
            self.check_alive()
            table = self._exchange([_FAILED])
            if any(row[0] == _AHEAD for row in table):
                self.faults.raised(error)
            else:
                trace = "".join(traceback.format_exception(error))
                self._texts(f"{type(error).__name__}: {error}\n{trace}")

    def compare(self, field: str, text: str, own: str) -> None:
        """Raises RankMismatch on every rank, with each rank's `own`, unless all have the same `text`."""
        digests = [row[1] for row in self._exchange([_OK, _word(text)])]
        if len(set(digests)) > 1:
            raise RankMismatch(field, self._texts(own), outlier_ranks(digests), rank=self.rank)

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
        """Returns all ranks' `x`, contiguous and of one shape and dtype, in rank order: (ranks, ...).

        Tensors of the CPU travel over the ring's own group, so that a failure of a peer ends the wait.

        Raises:
            PeerFailed, PeerLost, RingTimeout: a rank did not come.
        """
        if x.device.type != "cpu":
            return self._stack_on_device(x)
        everyone = self._over_gloo.post_tensor(x.reshape(-1).view(torch.uint8))()  # bytes: gloo knows few dtypes
        return everyone.view(x.dtype).view(self.world_size, *x.shape)

    def _stack_on_device(self, x: Tensor) -> Tensor:
        return stacked(x, self._data)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._data)
        return total

    def _exchange(self, words: Sequence[int]) -> Rows:
        return self._words.post(words)()

    def _texts(self, text: str) -> list[str]:
        words = torch.frombuffer(bytearray(f"{text}\0".encode()), dtype=torch.uint8)
        lengths = [row[0] for row in self._exchange([len(words)])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        mine[: len(words)] = words
        everyone = self._over_gloo.post_tensor(mine)()
        return [bytes(row).partition(b"\0")[0].decode() for row in everyone.tolist()]
