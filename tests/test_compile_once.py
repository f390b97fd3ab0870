"""Kernels are compiled once a host: who waits, who compiles, and what happens when a process dies or hangs."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import
from triton.runtime.cache import get_cache_manager

from ringflash.compile_once import Compilations, compile_once_a_host
from tests.helpers.patience import PATIENCE

KEY = "00" * 32
FILE = "kernel.json"

HOLDER = """
import sys, time
from triton import knobs
from triton.runtime.cache import get_cache_manager
from ringflash.compile_once import compile_once_a_host
knobs.cache.dir = sys.argv[1]
compile_once_a_host()
manager = get_cache_manager(sys.argv[2])
assert manager.get_group("kernel.json") is None
print("compiling", flush=True)
if sys.argv[3] == "hangs":
    time.sleep(600)
sys.stdin.readline()
manager.put_group("kernel.json", {"kernel.json": manager.put("{}", "kernel.json", binary=False)})
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


def holder(cache: Path, does: str) -> subprocess.Popen[str]:
    """Starts a process that has missed the kernel in the cache and compiles it."""
    command = [sys.executable, "-c", HOLDER, str(cache), KEY, does]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    return process


def test_others_wait_and_read_what_the_first_one_wrote(cache: Path) -> None:
    record = compile_once_a_host()
    first = holder(cache, "compiles")
    threading.Timer(0.5, lambda: first.communicate("done\n")).start()
    assert get_cache_manager(KEY).get_group(FILE) is not None
    assert record.waited >= 0.3
    assert first.wait(PATIENCE) == 0


def test_a_killed_process_leaves_its_kernel_to_the_next(cache: Path) -> None:
    compile_once_a_host()
    first = holder(cache, "hangs")
    threading.Timer(0.3, first.kill).start()
    manager = get_cache_manager(KEY)
    assert manager.get_group(FILE) is None  # this process compiles it now
    first.communicate()
    manager.put_group(FILE, {FILE: manager.put("{}", FILE, binary=False)})
    assert get_cache_manager(KEY).get_group(FILE) is not None


def test_a_process_that_hangs_is_named_and_not_waited_for(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    compile_once_a_host(wait_seconds=0.2)
    first = holder(cache, "hangs")
    try:
        with caplog.at_level(logging.WARNING, "ringflash.compilation"):
            assert get_cache_manager(KEY).get_group(FILE) is None
    finally:
        first.kill()
        first.communicate()
    assert f"still holds {cache}" in caplog.text


def test_a_compilation_that_failed_is_tried_again_at_once(cache: Path) -> None:
    compile_once_a_host()
    failed = get_cache_manager(KEY)
    assert failed.get_group(FILE) is None
    started = time.monotonic()
    assert get_cache_manager(KEY).get_group(FILE) is None  # while a traceback still refers to the first
    assert time.monotonic() - started < 10


def test_a_file_system_without_locks_compiles_in_each_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*_: object, **__: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    compile_once_a_host()
    assert get_cache_manager(KEY).get_group(FILE) is None


def test_the_users_own_manager_and_listener_stay(cache: Path) -> None:
    heard: list[bool] = []
    knobs.compilation.listener = lambda **given: heard.append(given["cache_hit"])  # pyright: ignore
    compile_once_a_host()
    own = knobs.cache.manager_class
    record = compile_once_a_host()
    assert knobs.cache.manager_class is own
    _listen("ringflash.kernels.triton.forward", cache_hit=False)
    _listen("somebody.else", cache_hit=False)
    _listen("ringflash.kernels.triton.forward", cache_hit=True)
    assert heard == [False, False, True]
    assert (record.kernels, record.loaded) == ([("triton.forward._forward_kernel", 6.0)], 1)


def _listen(module: str, *, cache_hit: bool) -> None:
    source = SimpleNamespace(fn=SimpleNamespace(module=module), name="_forward_kernel")
    listener: Any = knobs.compilation.listener
    times = SimpleNamespace(total=6_000_000)
    listener(src=source, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_the_report_names_kernels_seconds_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ringflash.compilation"):
        Compilations(loaded=3).report(1)
        assert not caplog.records
        Compilations([("triton.forward._forward_kernel", 6.0), ("triton.delta._delta_kernel", 0.5)], waited=9).report(2)
    assert "Rank 2 compiled 2 kernel(s) in 6.5 s" in caplog.text
    assert "(triton.forward._forward_kernel 6.0 s, triton.delta._delta_kernel 0.5 s), and waited 9.0 s" in caplog.text
    assert "`ringflash warmup --config FILE`" in caplog.text
