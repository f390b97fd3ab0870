"""Registry of contexts by name, and of their connections, which it closes when no context uses them any more."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ringflash.errors import ArgumentError
from ringflash.transport.connect import Connection, MeshConnection
from ringflash.transport.groups import all_have

if TYPE_CHECKING:
    from ringflash.context import ContextParallel

C = TypeVar("C", Connection, MeshConnection)


class Registry:
    """Registry of living contexts. Custom ops take no objects, so they look contexts up here by name.

    Contexts stay as long as something refers to them. The registry refers to the newest context of virtual ranks of
    each name, because it has no resources. Contexts of one name are equal, but a closed one serves no calls.
    """

    def __init__(self) -> None:
        self._virtual: dict[str, ContextParallel] = {}
        self._contexts: dict[str, list[weakref.ref[ContextParallel]]] = {}
        self._users: dict[Connection | MeshConnection, int] = {}

    def add(
        self, context: ContextParallel, connections: Sequence[Connection | MeshConnection]
    ) -> weakref.finalize[..., Any]:
        """Adds a context that uses `connections`. Calling the returned finalizer removes the context."""
        if not connections:
            self._virtual[context.name] = context
        self._contexts.setdefault(context.name, []).append(weakref.ref(context))
        for connection in connections:
            self._users[connection] = self._users.get(connection, 0) + 1
        left = weakref.finalize(context, self._leave, context.name, tuple(connections))
        left.atexit = False
        return left

    def by_name(self, name: str) -> ContextParallel:
        """Returns the newest open context of this name, or the newest if all are closed.

        Raises:
            ArgumentError: no context of this name is alive.
        """
        references = self._contexts.get(name, [])
        newest = references[-1]() if references else None
        if newest is not None and not newest.is_closed:
            return newest
        living = [each for reference in reversed(references) if (each := reference()) is not None]
        if not living:
            remedy = "Keep a reference until the last backward of its calls; a copy from another process does not work."
            got = f"{name}, which is gone or was never made in this process"
            raise ArgumentError("context", expected="one that lives here", got=got, remedy=remedy)
        return next((each for each in living if not each.is_closed), living[0])

    def passes(self, ranks: tuple[int, ...]) -> int:
        """Returns the passes of attention so far over living contexts of `ranks`."""
        return sum(context.own_passes for context in self._living(ranks))

    def other_cut(self, context: ContextParallel, rows: int) -> ContextParallel | None:
        """Returns a context of the ranks of `context` that has cut `rows` rows a rank as `context` would not."""
        seqlen = rows * context.world_size
        for other in self._living(context.ranks):
            if other.cut_rows != rows or "balanced" in (context.layout, other.layout):
                continue
            if not torch.equal(other.positions(seqlen), context.positions(seqlen)):
                return other
        return None

    def _living(self, ranks: tuple[int, ...]) -> list[ContextParallel]:
        references = [each for named in list(self._contexts.values()) for each in named]  # any thread may remove some
        living = [context for reference in references if (context := reference()) is not None]
        return [context for context in living if context.ranks == ranks]

    def connections(self, kind: type[C]) -> list[C]:
        """Returns the open connections of one kind, newest first."""
        return [each for each in reversed(self._users) if isinstance(each, kind)]

    def shared(self, found: C | None, groups: Sequence[dist.ProcessGroup]) -> C | None:
        """Returns `found` if all ranks of the groups found the same connection, else None; a collective.

        Ranks collect garbage at different times, so one rank may have closed a connection that other ranks still have.
        """
        return found if all_have(0 if found is None else found.number, groups) else None

    def close_unused(self) -> None:
        """Closes connections that no context uses, broken connections, and connections of a destroyed group."""
        for connection, users in list(self._users.items()):
            if not users or connection.is_dead:
                del self._users[connection]
                connection.close()

    def _leave(self, name: str, connections: Sequence[Connection | MeshConnection]) -> None:
        """Removes a context. Garbage collection may run this in any thread, so it closes nothing."""
        living = [each for each in self._contexts.pop(name, []) if each() is not None]
        if living:
            self._contexts[name] = living
        for connection in connections:
            if connection in self._users:
                self._users[connection] -= 1


class Closed:
    """Stands in for the control plane of a context that was closed: every use of it raises ArgumentError."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def fail(self, error: BaseException) -> None:
        """Announces nothing: the ranks are not connected any more."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raises ArgumentError."""
        remedy = "Create a new ContextParallel of the same group, on all of its ranks."
        raise ArgumentError("context", expected="an open one", got="one after close()", remedy=remedy, rank=self._rank)
