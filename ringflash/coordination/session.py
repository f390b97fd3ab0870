"""The control plane of a connection: ranks agree through small exchanges between CPUs before any data moves.

Every rank posts a row of integers that describes its call, and compares the rows of all ranks. If they differ, every
rank raises RankMismatch, and none waits for messages that never come. `coordination.words` carries the integers, and
`coordination.failures` ends the wait for a rank that does not answer. Attention calls `agree_on` through
`ContextParallel.agree_on`. "The ring" is the connection of these ranks (`transport/connect.py`), which contexts share.
"""

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

Field = int | float | str | None  # None agrees with every value: this rank has none to compare
T = TypeVar("T")
# A row is one rank's integers ("words"), and a table holds the rows of all ranks. The first integer of a call's row
# says that the rank waits for the other ranks, has raised, or continues without waiting. A row is (_WAITING, *fields),
# (_FAILED,) or (_AHEAD, *fields, digest); `Words.post` pads all rows with zeros to one length. Before ranks exchange
# texts, a row holds only the length of the rank's text (`_gather_texts`).
_WAITING, _FAILED, _AHEAD = range(3)
_ANY = -(2**63)  # the integer of None
_MAX_CALLS = 256  # calls that are cached


def _as_int(value: Field) -> int:
    # The integer that stands for a field in a row: the checksum of a text, or the bits of a float. `hash` would not do:
    # it differs between processes.
    if value is None:
        return _ANY
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return int(value)


def outlier_ranks(values: Sequence[int]) -> list[int]:
    """Returns the ranks with a value other than the most common one."""
    common = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != common]


def stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns all ranks' `x`, contiguous and of one shape and dtype, in rank order: (ranks, ...), over `group`."""
    everyone = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(everyone.unbind(0)), x, group=group)
    return everyone


def is_alive(group: dist.ProcessGroup) -> bool:
    """Returns whether `group` has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


@dataclass(eq=False)
class _CallRecord:
    """A rank's description of a call, the same for every call of one kind.

    Args:
        fields: the fields, as in `agree`.
        free: the name of the free field, as in `agree`.
        words: an integer for each field.
        agreed: the last agreement of all ranks on this call; None before the first agreement.
    """

    fields: Mapping[str, Field]
    free: str
    words: tuple[int, ...]
    agreed: _Agreed | None = None

    @staticmethod
    def of(fields: Mapping[str, Field], free: str) -> _CallRecord:
        """Returns the record of a call on which no rank has agreed yet."""
        return _CallRecord(fields, free, tuple(_as_int(value) for value in fields.values()))


@dataclass(frozen=True)
class _Agreed:
    """An agreement of all ranks on a call.

    Args:
        table: the integers of all ranks.
        digest: checksum of all values of the free field. A rank that continues without waiting posts it.
        result: the result that `then` computed from these values.
    """

    table: Rows
    digest: int
    result: Any


class ControlPlane:
    """Agreement between the ranks of `group`.

    Args:
        group: the data group of the ranks: it carries device tensors, and all tensors of `sum`.
        gloo: a gloo group of the same ranks in the same order, which the ring owns. Texts and the CPU tensors of
            `stack` and `gather` always travel over it, and integers until `share_words`.
        faults: ends a wait with an error if a rank does not answer.
        optimistic: a repeated call returns its earlier result at once, and does not wait for the other ranks. It
            assumes that they pass the same values as before, and this rank's next call checks that. Without it the
            CPU waits for the network before it launches kernels. `ContextParallel(fixed_lengths=True)` asks for
            it.
    """

    def __init__(
        self, group: dist.ProcessGroup, gloo: dist.ProcessGroup, faults: Faults, *, optimistic: bool = False
    ) -> None:
        self._data, self.faults, self._optimistic = group, faults, optimistic
        self._calls: dict[Hashable, _CallRecord] = {}
        # The last call if it continued without waiting, as the arguments of `_checked`.
        self._unchecked: tuple[_CallRecord, Callable[[], Rows], Callable[[list[int]], Any]] | None = None
        self._over_gloo = GlooWords(gloo, faults)
        self._words: Words = self._over_gloo
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def share_words(self) -> None:
        """Exchanges integers through shared memory from now on, if all ranks are in one container; a collective.

        Otherwise, or if a rank cannot map the memory, gloo stays in use. Shared memory has no connection that closes,
        but in one container each process can see that another one has exited. `faults.identities` must be set before.
        """
        if self.world_size > 1 and processes.together(self.faults.identities):
            self._words = shared(self.tell, self.rank, self.world_size, self.faults) or self._words

    def check_alive(self) -> None:
        """Checks that the group still exists and its ring has not broken.

        Raises:
            ArgumentError: the group has been destroyed since the context was made.
            PeerFailed, PeerLost, RingTimeout: the ring broke in an earlier call.
        """
        if not is_alive(self._data):
            remedy = "Create the context anew, after the group."
            expected, got = "a context whose process group exists", "one whose group was destroyed"
            raise ArgumentError("context", expected=expected, got=got, remedy=remedy, rank=self.rank)
        self.faults.check()

    def agree(self, fields: Mapping[str, Field], *, free: str) -> list[int]:
        """Checks that all ranks pass the same `fields`, and returns each rank's value of the free field.

        The free field is the one integer field that may differ between ranks; `free` is its name. For example,
        `agree({"nheads": 8, "seqlen": rows}, free="seqlen")` returns [100, 99] on both of two ranks if `rows` is 100 on
        rank 0 and 99 on rank 1. Calls with the same fields are cached, as in `agree_on`. With `optimistic` a repeated
        call returns the earlier values without waiting. A row holds at most 22 fields. Decoding and connecting use it.

        Raises:
            RankMismatch: on every rank, when a field differs.
            PeerFailed: when a rank called `fail` instead.
            PeerLost, RingTimeout: when a rank is gone, or does not answer within the deadline.
        """
        return self.agree_on((free, *fields, *fields.values()), lambda: fields, free=free, then=lambda values: values)

    def agree_now(self, fields: Mapping[str, Field], *, free: str) -> list[int]:
        """Like `agree`, but always waits, also with `optimistic`: the free field may change at any call.

        `ContextParallel.largest` uses it. The backward of `ContextParallel.unshard` calls it before `sum`.
        """
        self.check_alive()
        self._check_previous()
        call = _CallRecord.of(fields, free)
        return self._checked(call, self._words.post((_WAITING, *call.words)), lambda values: values)

    def agree_on(
        self, kind: Hashable, fields: Callable[[], Mapping[str, Field]], *, free: str, then: Callable[[list[int]], T]
    ) -> T:
        """Like `agree`, but the caller gives the cache key and the result: calls of one `kind` reuse `then(values)`.

        Args:
            kind: key of the call. Calls with equal keys must have equal fields and an equivalent `then`.
            fields: returns the fields.
            free: name of the free field, as in `agree`.
            then: computes the result from each rank's value of the free field. With `optimistic` it runs again for the
                same values at the second call, because rows then begin with `_AHEAD` and have a digest. Its errors are
                not cached: every later call with these values raises again.

        Returns:
            The result of `then`. Later calls may return the same object, so callers must not change it.

        Raises:
            RankMismatch, PeerFailed, PeerLost, RingTimeout: as `agree`.
        """
        self.check_alive()
        self._check_previous()
        call = self._calls.get(kind)
        if call is None:
            call = self._new_call(kind, fields(), free)
        if self._optimistic and call.agreed is not None:
            self._unchecked = call, self._words.post((_AHEAD, *call.words, call.agreed.digest)), then
            return call.agreed.result
        return self._checked(call, self._words.post((_WAITING, *call.words)), then)

    def forget(self) -> None:
        """Makes the next call of each kind wait for the agreement of the other ranks.

        `ContextParallel.forget_lengths` calls it before sequences of another length.
        """
        self._calls.clear()  # to clear `agreed` alone would not do: `_check_previous` would set it again

    def _new_call(self, kind: Hashable, fields: Mapping[str, Field], free: str) -> _CallRecord:
        """Makes the `_CallRecord` of a new kind and caches it; a full cache is emptied first."""
        if len(self._calls) == _MAX_CALLS:
            self._calls.clear()
        call = self._calls[kind] = _CallRecord.of(fields, free)
        return call

    def _check_previous(self) -> None:
        """Checks the agreement on the last call, if that call continued without waiting."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None:
            self._checked(*unchecked)

    def _checked(self, call: _CallRecord, wait_for_rows: Callable[[], Rows], then: Callable[[list[int]], Any]) -> Any:
        """Returns the result of `agree_on`, once all ranks have posted their integers.

        Args:
            call: this rank's call.
            wait_for_rows: waits for the integers of all ranks and returns them.
            then: as in `agree_on`.
        """
        table = wait_for_rows()
        if call.agreed is None or table != call.agreed.table:
            values = self._compared(call, table)
            call.agreed = _Agreed(table, _as_int(str(values)), then(values))
        return call.agreed.result

    def _compared(self, call: _CallRecord, table: Rows) -> list[int]:
        """Compares the integers of all ranks and returns the result of `agree`."""
        # A rank that continued without waiting takes no part in an exchange of texts. Errors then go through `faults`,
        # which ends the ring. That rank learns of an error in its next call, or from the thread that watches its GPU
        # (`coordination.watch`). A rank that raised has broken the ring too (`fail`): `give_up` finds its report, and
        # returns a PeerFailed.
        ahead = any(row[0] == _AHEAD for row in table)
        failed = [rank for rank, row in enumerate(table) if row[0] == _FAILED]
        if failed and ahead:
            raise self.faults.give_up("closed", None, failed)
        if failed:
            raise PeerFailed(failed, [text for text in self._gather_texts("") if text], rank=self.rank)
        for column, (name, value) in enumerate(call.fields.items(), start=1):
            values = [row[column] for row in table]
            known = [x for x in values if x != _ANY]
            if name == call.free or len(set(known)) <= 1:
                continue
            own = values[self.rank]
            texts = [str(value) if x == own else "another" for x in values] if ahead else self._gather_texts(str(value))
            common = max(known, key=known.count)
            odd = outlier_ranks([common if x == _ANY else x for x in values])
            error = RankMismatch(name, texts, odd, rank=self.rank)
            if ahead:
                self.faults.raised(error)
            raise error
        column = list(call.fields).index(call.free) + 1
        result = [row[column] for row in table]
        wrong = [
            r for r, row in enumerate(table) if row[0] == _AHEAD and row[len(call.fields) + 1] != _as_int(str(result))
        ]
        if wrong:  # these ranks continued with a result for other values of the free field
            texts = [
                f"{value}, for outdated values of other ranks" if r in wrong else str(value)
                for r, value in enumerate(result)
            ]
            error = RankMismatch(call.free, texts, wrong, rank=self.rank)
            self.faults.raised(error)
            raise error
        return result

    def fail(self, error: Exception) -> None:
        """Announces to the other ranks that this rank raised `error`, so that they raise too.

        `ContextParallel.announce_failure` calls it. Call it only where the next exchange of the other ranks is an
        agreement: this post takes the place of the rank's own post there. If a rank has continued without waiting, the
        ring breaks.
        """
        with suppress(RingflashError):  # `error` takes precedence over failures of other ranks
            self.check_alive()
            table = self._exchange([_FAILED])
            if any(row[0] == _AHEAD for row in table):
                self.faults.raised(error)
            else:
                trace = "".join(traceback.format_exception(error))
                self._gather_texts(f"{type(error).__name__}: {error}\n{trace}")

    def compare(self, field: str, text: str, own: str) -> None:
        """Raises RankMismatch on every rank unless all ranks pass the same `text`.

        Debug mode compares the plans of all ranks with it before each pass.

        Args:
            field: name of the compared value, for the error.
            text: the compared value.
            own: text that the error shows for this rank; `text` may be longer, and is not shown.
        """
        digests = [row[1] for row in self._exchange([_WAITING, _as_int(text)])]
        if len(set(digests)) > 1:
            raise RankMismatch(field, self._gather_texts(own), outlier_ranks(digests), rank=self.rank)

    def tell(self, text: str) -> list[str]:
        """Exchanges texts without NUL characters: returns those of all ranks, in rank order; a collective.

        Ranks use it while they connect.
        """
        self.check_alive()
        return self._gather_texts(text)

    def gather(self, x: Tensor, rows: list[int], dim: int) -> Tensor:
        """Returns all ranks' `x` joined along `dim` in rank order; `x` of rank r has `rows[r]` entries along `dim`.

        `ContextParallel.unshard` calls it.
        """
        moved = x.movedim(dim, 0).contiguous()
        padded = moved.new_zeros((max(rows), *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        everyone = self.stack(padded.view(torch.uint8)).view(x.dtype)  # bytes: backends support few dtypes
        return torch.cat([t[:n] for t, n in zip(everyone, rows, strict=True)]).movedim(0, dim)

    def stack(self, x: Tensor) -> Tensor:
        """Returns all ranks' `x`, contiguous and of one shape and dtype, in rank order: (ranks, ...).

        Decoding gathers the states of all ranks with it, and `gather` uses it. CPU tensors travel over the ring's own
        gloo group, so that a failure of a peer ends the wait.

        Raises:
            PeerFailed, PeerLost, RingTimeout: a rank did not answer.
        """
        if x.device.type != "cpu":
            return self._stack_on_device(x)
        everyone = self._over_gloo.post_tensor(x.reshape(-1).view(torch.uint8))()  # bytes: gloo supports few dtypes
        return everyone.view(x.dtype).view(self.world_size, *x.shape)

    def _stack_on_device(self, x: Tensor) -> Tensor:
        # A method of its own, because `MeshControlPlane` gathers along one dimension after the other.
        return stacked(x, self._data)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over all ranks; CPU tensors also use the data group here.

        The backward of `ContextParallel.unshard` calls it; token means are summed elsewhere (`token_mean.py`). A failed
        peer does not end this wait, so the caller calls `agree_now` before.
        """
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._data)
        return total

    def _exchange(self, words: Sequence[int]) -> Rows:
        # The exchange of an unchecked call may still be pending; each `post` has its own function that waits.
        return self._words.post(words)()

    def _gather_texts(self, text: str) -> list[str]:
        encoded = torch.frombuffer(bytearray(f"{text}\0".encode()), dtype=torch.uint8)
        lengths = [row[0] for row in self._exchange([len(encoded)])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        mine[: len(encoded)] = encoded
        everyone = self._over_gloo.post_tensor(mine)()
        return [bytes(row).partition(b"\0")[0].decode() for row in everyone.tolist()]
