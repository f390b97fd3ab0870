"""Rendezvous of ranks for symmetric memory, which works after any number of earlier exchanges.

torch exchanges memory handles through the store of a group, under keys that each process numbers by itself. Ranks may
have made different numbers of exchanges, in rings of some of these ranks. They would then wait for keys that no rank
writes, so they get a store that numbers the exchanges of their group alone.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage] - torch documents them

from ringflash import torch_private
from ringflash.coordination.session import ControlPlane

if TYPE_CHECKING:
    from ringflash.torch_private import SymmetricMemory

_EXCHANGES = itertools.count()  # exchanges of this process, which torch counts too


class OwnNumbers(Store):
    """A store that numbers exchanges from 0 on, in the order of their first use; keys are prefix/number/rank."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        """See `Store.set`."""
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self._store.get(self._own(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See `Store.wait`."""
        own = list(map(self._own, keys))
        if timeout is None:
            self._store.wait(own)
        else:
            self._store.wait(own, timeout)

    def _own(self, key: str) -> str:
        exchange, rank = key.rsplit("/", 1)
        return f"{self._numbers.setdefault(exchange, len(self._numbers))}/{rank}"


class Rendezvous:
    """Shares memory between the ranks of `group`; `control` connects the same ranks."""

    def __init__(self, control: ControlPlane, group: dist.ProcessGroup) -> None:
        self._control, self._group = control, group
        # Kept alive, since torch keeps neither the group of a name nor the Python part of a store.
        self._own: tuple[str, Store, dist.ProcessGroup] | None = None

    def share(self, own: Tensor) -> SymmetricMemory:
        """Returns the memory of all ranks; each rank passes `own` of the same size. A collective."""
        even = len(set(self._control.tell(str(next(_EXCHANGES))))) == 1
        return torch_private.share(own, self._group.group_name if even else self._name())

    def _name(self) -> str:
        """Returns the name under which torch finds these ranks with a store of their own."""
        if self._own is None:
            control = self._control
            name, store = uuid4().hex, OwnNumbers(PrefixStore("memory", control.faults.store))
            group = torch_private.name_group(name, control.rank, control.world_size, store)
            self._own = name, store, group
        return self._own[0]
