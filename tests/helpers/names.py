"""Finds the tests that other files name, by reading the source: nothing is imported or run."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def names_in(path: str) -> frozenset[str]:
    """Returns the names of the test functions of a file; `path` is relative to the repository's root."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def is_defined(test: str) -> bool:
    """Returns whether `tests/file.py::test_name`, with or without parameters in brackets, names a test."""
    path, _, name = test.partition("::")
    return name.partition("[")[0] in names_in(path)
