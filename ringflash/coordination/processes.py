"""Detection of ended processes of other ranks on this host, through /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_HOST = Path("/proc/sys/kernel/random/boot_id")


def own_identity() -> str:
    """Returns host, PID namespace, process number and start time of this process; empty without /proc."""
    try:
        return f"{_HOST.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_start(os.getpid())}"
    except OSError:
        return ""


def ended(identities: Sequence[str]) -> list[int]:
    """Returns the indices of `identities` with a process that has ended; other hosts and containers are left out."""
    here = own_identity().rsplit(" ", 2)[0]
    result = []
    for index, identity in enumerate(identities):
        host, number, start = identity.rsplit(" ", 2) if identity else ("", "0", "")
        if identity and host == here and _start(int(number)) != start:
            result.append(index)
    return result


def together(identities: Sequence[str]) -> bool:
    """Returns whether all identities are known and of one host and one container, so that processes see each other."""
    return all(identities) and len({identity.rsplit(" ", 2)[0] for identity in identities}) == 1


def _start(number: int) -> str:
    """Returns the start time of process `number` in clock ticks since boot; empty if it is dead or a zombie."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
