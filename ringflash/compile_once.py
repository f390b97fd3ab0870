"""Compilation of Triton kernels once a host: processes that need the same kernel wait for the first one's file.

Triton keeps compiled kernels in a folder, but compiles again in every process that looks before the first one has
written. Here a process that misses a kernel there locks the kernel's folder until it has written, and the others wait.
It uses what Triton offers for this: its cache manager and its compilation listener. Checked with Triton 3.6 to 3.9.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import
from triton.runtime.cache import FileCacheManager

log = logging.getLogger("ringflash.compilation")

WAIT_SECONDS = 600.0  # the slowest kernel takes under a minute; a process that was stopped would hold its lock for ever
POLL_SECONDS = 0.05
LOCK = "ringflash.lock"
KERNELS = "ringflash.kernels."


@dataclass
class Compilations:
    """Kernels of this library that a process compiled, and its waits for those of others.

    Args:
        kernels: name and seconds of each kernel that this process compiled.
        loaded: number of kernels that it read from the cache.
        waited: seconds of waiting for other processes, in all.
    """

    kernels: list[tuple[str, float]] = field(default_factory=list)
    loaded: int = 0
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of compilation in all."""
        return sum(seconds for _, seconds in self.kernels)

    def report(self, rank: int) -> None:
        """Logs what `rank` has compiled so far and how to compile it ahead of time; nothing if all was in the cache."""
        if not self.kernels:
            return
        each = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.kernels)
        log.info(
            "Rank %d compiled %d kernel(s) in %.1f s by the end of the first step (%s), and waited %.1f s for other "
            "ranks' kernels. `ringflash warmup --config FILE` compiles them before a run, in parallel.",
            rank,
            len(self.kernels),
            self.seconds,
            each,
            self.waited,
        )


def compile_once_a_host(wait_seconds: float = WAIT_SECONDS) -> Compilations:
    """Makes this process share compilations with the others of its host, and returns a record of them.

    A cache manager that the user chose, by TRITON_CACHE_MANAGER for instance, stays; then kernels are only recorded.

    Args:
        wait_seconds: how long to wait for another process before compiling as well. A lock ends with its process.
    """
    record = Compilations()
    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, times: Any, **rest: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, times=times, **rest)
        module = getattr(getattr(src, "fn", None), "module", "")
        if module.startswith(KERNELS) and cache_hit:
            record.loaded += 1
        elif module.startswith(KERNELS):
            record.kernels.append((kernel_name(module, src.name), times.total / 1e6))

    knobs.compilation.listener = listen
    if knobs.cache.manager_class is None:

        class OnceAHost(_LockedWhileCompiling):
            compilations, limit = record, wait_seconds

        knobs.cache.manager_class = OnceAHost
    return record


def kernel_name(module: str, name: str) -> str:
    """Returns a kernel's name with that of its file, such as "triton.forward._forward_kernel"."""
    return f"{module.removeprefix(KERNELS)}.{name}"


class _LockedWhileCompiling(FileCacheManager):
    """Files of one kernel, locked from a look-up that finds nothing until the kernel is written."""

    compilations: Compilations
    limit: float

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._lock: FileLock | None = None
        self._is_cache = not (override or dump)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Returns the kernel's files. Without any, returns None and holds the lock: the caller compiles the kernel."""
        group = super().get_group(filename)
        if group or not self._is_cache or knobs.compilation.always_compile:
            return group
        self._acquire(Path(self.cache_dir) / LOCK)
        group = super().get_group(filename)  # another process may have written it meanwhile
        if group:
            self._release()
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Writes the list of the kernel's files, and lets the others go on."""
        try:
            return super().put_group(filename, group)
        finally:
            self._release()

    def _acquire(self, path: Path) -> None:
        # One lock a path in a process, so that a kernel that failed here does not wait for its own lock when it is
        # compiled again. A lock whose compilation failed is released with this object.
        started = time.monotonic()
        try:
            self._lock = FileLock(path, thread_local=False, is_singleton=True)
            self._lock.acquire(timeout=self.limit, poll_interval=POLL_SECONDS)
        except Timeout:
            self._lock = None
            log.warning(
                "Expected another process to compile a kernel within %.0f s, but it still holds %s. This process "
                "compiles it too; end the other one if it hangs.",
                self.limit,
                path,
            )
        except (OSError, NotImplementedError) as error:  # a file system without locks
            self._lock = None
            log.debug("Kernels are compiled in each process: %s cannot be locked: %s", path, error)
        self.compilations.waited += time.monotonic() - started

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
