"""Threads that end before the interpreter does."""

import subprocess
import sys

# Nearly always in C++: a thread that is not awaited is there when the interpreter ends, and aborts the process.
PROGRAM = """
import time
from torch.distributed import TCPStore
from ringflash.transport import watch
from ringflash.transport.faults import Faults

store = TCPStore("127.0.0.1", 0, 1, True)
watch.Watch(Faults(store, 0, 1, 60.0)).add(lambda: any(store.check(["what never comes"]) for _ in range(2000)), 0, [0])
time.sleep(0.1)
"""


def test_a_program_ends_while_messages_are_under_way() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr
