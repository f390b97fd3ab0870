"""How ranks find each other's symmetric memory, whatever each of them has shared with others before.

torch exchanges handles of memory through a group's store, under keys that it numbers by process: ranks that have made
different numbers of exchanges, in rings of some of them, would wait for keys that nobody writes. They then get a store
that numbers the exchanges of their group alone.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _SymmetricMemory

from ringflash.coordination.session import ControlPlane

_EXCHANGES = itertools.count()  # of this process, as torch counts them too


class OwnNumbers(Store):
    """A store in which exchanges are numbered from 0 on, in their order here: keys are prefix/number/rank."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        """As of any store."""
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        """As of any store."""
        return self._store.get(self._own(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As of any store."""
        own = list(map(self._own, keys))
        if timeout is None:
            self._store.wait(own)
        else:
            self._store.wait(own, timeout)

    def _own(self, key: str) -> str:
        exchange, rank = key.rsplit("/", 1)
        return f"{self._numbers.setdefault(exchange, len(self._numbers))}/{rank}"


class Rendezvous:
    """Where the ranks of `group` share memory; `control` joins the same ranks."""

    def __init__(self, control: ControlPlane, group: dist.ProcessGroup) -> None:
        self._control, self._group = control, group
        self._own: tuple[str, Store] | None = None  # kept, as torch would not keep what Python adds to a store

    def share(self, own: Tensor) -> _SymmetricMemory:
        """The memory of all ranks, each with as much as `own`; a collective."""
        even = len(set(self._control.tell(str(next(_EXCHANGES))))) == 1
        return _SymmetricMemory.rendezvous(own, self._group.group_name if even else self._name())

    def _name(self) -> str:
        """By which torch knows these ranks with a store of their own."""
        if self._own is None:
            control = self._control
            self._own = uuid4().hex, OwnNumbers(PrefixStore("memory", control.faults.store))
            _SymmetricMemory.set_group_info(self._own[0], control.rank, control.world_size, self._own[1])
        return self._own[0]
