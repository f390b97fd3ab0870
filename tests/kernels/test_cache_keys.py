"""Keys of Triton's cache: the same in processes that use the kernels in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ringflash as rf

ROOT = Path(rf.__file__).parents[1]

KEYS = """
import sys
from importlib import import_module
from triton.runtime.jit import JITFunction
from ringflash.kernels.cache_keys import settle

names = ["hopper.forward", "hopper.backward", "hopper.vectors", "hopper.dq_accumulator", "triton.forward",
         "triton.backward_dq", "triton.backward_dkdv", "triton.delta", "triton.decode", "triton.decode_merge"]
modules = [import_module(f"ringflash.kernels.{name}") for name in names]
values = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
functions = {f"{value.__module__}.{value.__name__}": value for value in values}
for name in sorted(functions, reverse=sys.argv[1] == "reversed"):
    settle(functions[name])
for name in sorted(functions):
    print(name, functions[name].cache_key)
"""


def _keys(order: str) -> list[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-c", KEYS, order]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()


def test_keys_do_not_depend_on_the_order_of_use() -> None:
    first, second = _keys("sorted"), _keys("reversed")
    assert len(first) > 50
    assert first == second
