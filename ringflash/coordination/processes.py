"""Whether the processes of other ranks on this host still live, asked of the kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_HOST = Path("/proc/sys/kernel/random/boot_id")


def own_identity() -> str:
    """Host, process number and start of this process; empty where the system has no /proc."""
    try:
        return f"{_HOST.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_start(os.getpid())}"
    except OSError:
        return ""


def ended(identities: Sequence[str]) -> list[int]:
    """Indices of those `identities` on this host whose process has ended; of other hosts nothing is known."""
    here = own_identity().rsplit(" ", 2)[0]
    result = []
    for index, identity in enumerate(identities):
        host, number, start = identity.rsplit(" ", 2) if identity else ("", "0", "")
        if identity and host == here and _start(int(number)) != start:
            result.append(index)
    return result


def together(identities: Sequence[str]) -> bool:
    """Whether all are known, and each of the processes sees the others: those of one host and one container."""
    return all(identities) and len({identity.rsplit(" ", 2)[0] for identity in identities}) == 1


def _start(number: int) -> str:
    """When process `number` started, in clock ticks since boot; empty for one that is dead, though not yet buried."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
