"""Threads that end before the interpreter ends."""

import subprocess
import sys
import threading
import time

import pytest

from ringflash.coordination import threads
from tests.helpers.patience import PATIENCE

# The thread of this program is nearly always in C++ code. If nothing waited for it, it would still run when the
# interpreter ends, and would abort the process.
PROGRAM = """
import time
from torch.distributed import TCPStore
from ringflash.coordination import watch
from ringflash.coordination.failures import Faults

store = TCPStore("127.0.0.1", 0, 1, True)
watch.Watch(Faults(store, 0, 1, 60.0)).add(lambda: any(store.check(["what never comes"]) for _ in range(2000)), 0, [0])
time.sleep(0.1)
"""


def test_a_program_ends_while_messages_are_under_way() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr


def test_those_that_do_not_come_are_not_awaited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PATIENCE", 0.2)
    woken, let_go = threading.Event(), threading.Event()

    def wait_for(event: threading.Event) -> None:
        assert event.wait(10)

    patient = threads.start(lambda: wait_for(woken), "patient", woken.set)
    stuck = threads.start(lambda: wait_for(let_go), "stuck", lambda: None)
    start = time.monotonic()
    threads.end()
    assert time.monotonic() - start < 2
    assert (patient.is_alive(), stuck.is_alive()) == (False, True)
    assert not threads.is_ending()
    let_go.set()
    stuck.join(10)
    late = threads.start(lambda: None, "late", lambda: None)  # started after the end, as by another atexit handler
    late.join(10)
    assert not {patient, stuck, late} & threads._helpers.keys()
