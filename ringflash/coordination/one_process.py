"""Copying of objects with connections: a copy is the object itself; in a file of its own, since contexts are long."""

from __future__ import annotations

from typing import Any, Self, SupportsIndex

from ringflash.errors import ArgumentError


class OneProcess:
    """Base of contexts: modules that hold one are copied, for instance by AveragedModel, and share it then."""

    @property
    def is_virtual(self) -> bool:
        """Returns whether the object has no connections."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Returns what pickle needs, which only virtual ranks have.

        Raises:
            ArgumentError: the object has connections, which exist in this process alone.
        """
        if self.is_virtual:
            return super().__reduce_ex__(protocol)
        remedy = "Save module.state_dict() in place of the module, or make a context in the other process."
        got = "one of processes in pickle, torch.save or a process that is spawned"
        raise ArgumentError("context", expected="one that stays in its process", got=got, remedy=remedy)
