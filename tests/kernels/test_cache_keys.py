"""Keys of Triton's cache: the same in processes that use the kernels in another order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ringflash as rf

ROOT = Path(rf.__file__).parents[1]

# Two processes settle the keys in opposite orders. Both are forks of one that has imported the kernels, which takes
# seconds, and has used none of them.
KEYS = """
import json
import os
from importlib import import_module
from triton.runtime.jit import JITFunction
from ringflash.kernels.cache_keys import settle

names = ["hopper.forward", "hopper.backward", "hopper.vectors", "hopper.dq_accumulator", "triton.forward",
         "triton.backward_dq", "triton.backward_dkdv", "triton.delta", "triton.decode", "triton.decode_merge"]
modules = [import_module(f"ringflash.kernels.{name}") for name in names]
values = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
functions = {f"{value.__module__}.{value.__name__}": value for value in values}
for backwards in (False, True):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    for name in sorted(functions, reverse=backwards):
        settle(functions[name])
    print(json.dumps({name: functions[name].cache_key for name in sorted(functions)}), flush=True)
    os._exit(0)
"""


def test_keys_do_not_depend_on_the_order_of_use() -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", KEYS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    first, second = map(json.loads, run.stdout.splitlines())
    assert len(first) > 50
    assert first == second
