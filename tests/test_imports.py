"""Imports run one way, and what is heavy is imported late."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ringflash

ROOT = Path(ringflash.__file__).parent

# What each part may import from the library; a part may always import itself.
ALLOWED = {
    "errors": set(),
    "state": set(),
    "layout": {"errors"},
    "masks": {"errors", "layout"},
    "plan": {"layout", "masks"},
    "reference": {"masks"},
    "transport": {"errors"},
    "kernels": {"errors", "layout", "masks", "state"},
    "ring": {"kernels", "plan", "state", "transport"},
    "context": {"errors", "layout", "masks", "plan", "transport"},
    "autograd": {"context", "kernels", "masks", "plan", "ring", "transport"},
    "attention": {"autograd", "context", "errors", "kernels", "masks"},
}


def _library_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ringflash":
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ringflash.")}
    return names


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_run_one_way(part: str) -> None:
    folder = ROOT / part
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{part}.py"]:
        assert _library_imports(path) <= ALLOWED[part] | {part}, f"{path.name} imports what is above it"


@pytest.mark.parametrize("part", ["train", "bench"])
def test_applications_import_public_names_only(part: str) -> None:
    private = set(ALLOWED) - {"errors", "reference"}
    for path in sorted((ROOT / part).rglob("*.py")):
        assert not _library_imports(path) & private, f"{path.name} imports the library's inside"


def test_importing_the_library_is_light() -> None:
    code = (
        "import sys, ringflash; print([m for m in ('lightning', 'triton.language', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
