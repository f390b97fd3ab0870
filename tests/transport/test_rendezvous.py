"""Rendezvous of ranks for shared memory, although exchanges with other ranks left them with different counts."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from ringflash.transport import rendezvous
from ringflash.transport.rendezvous import OwnNumbers, Rendezvous


def exchange(store: Store, number: int, rank: int, value: str) -> None:
    """Writes a value like torch, through a C++ store that calls the Python store."""
    PrefixStore(f"memory/{number}", store).set(str(rank), value)


def read(store: Store, number: int, rank: int) -> bytes:
    keys = PrefixStore(f"memory/{number}", store)
    keys.wait([str(rank)], timedelta(seconds=1))
    return keys.get(str(rank))


def test_ranks_with_other_numbers_meet() -> None:
    shared = HashStore()
    first, second = OwnNumbers(shared), OwnNumbers(shared)
    for i in range(3):
        of_first, of_second = 7 + 2 * i, i  # the first rank has other exchanges in between
        exchange(first, of_first, 0, f"a{i}")
        exchange(second, of_second, 1, f"b{i}")
        assert read(first, of_first, 1) == b"b%d" % i
        assert read(second, of_second, 0) == b"a%d" % i
        assert read(first, of_first, 0) == b"a%d" % i


def test_who_does_not_come_is_waited_for_as_long_as_asked() -> None:
    with pytest.raises(RuntimeError, match="[Tt]imeout"):
        OwnNumbers(HashStore()).wait(["memory/0/1"], timedelta(milliseconds=20))


@pytest.mark.parametrize("behind", [0, 2])
def test_a_store_of_its_own_where_counts_differ(monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    """Checks that torch's own rendezvous is replaced only if it would wait forever."""
    names, groups = [], {}

    class Memory:
        @staticmethod
        def share(own: Any, name: str) -> None:
            names.append(name)

        @staticmethod
        def name_group(name: str, rank: int, world_size: int, store: Store) -> None:
            groups[name] = rank, world_size, type(store)

    monkeypatch.setattr(rendezvous, "torch_private", Memory)
    faults = SimpleNamespace(store=HashStore())
    control: Any = SimpleNamespace(
        rank=1, world_size=2, faults=faults, tell=lambda text: [str(int(text) - behind), text]
    )
    group: Any = SimpleNamespace(group_name="ring")
    meeting = Rendezvous(control, group)
    for _ in range(2):
        meeting.share(torch.empty(0))
    if behind:
        assert names[0] == names[1] != "ring"
        assert groups == {names[0]: (1, 2, OwnNumbers)}
    else:
        assert (names, groups) == (["ring", "ring"], {})
