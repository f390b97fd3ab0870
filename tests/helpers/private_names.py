"""Private names of a package, found by reading the source of the files that import them."""

from __future__ import annotations

import ast


def is_private(name: str) -> bool:
    """Returns whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_imports(tree: ast.AST, package: str) -> set[str]:
    """Returns the private modules and names that a file imports from `package`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] == package:
                found |= {name for alias in aliases if is_private(name := f"{module}.{alias.name}")}
            case ast.Import(names=aliases):
                found |= {a.name for a in aliases if a.name.split(".")[0] == package and is_private(a.name)}
            case _:
                pass
    return found
