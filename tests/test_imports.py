"""Imports run one way, and heavy modules are imported late."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringflash

ROOT = Path(ringflash.__file__).parent

# The parts that each folder or file of ringflash/ may import; a part may always import itself and `torch_private`.
ALLOWED = {
    "torch_private": set(),
    "checkout": set(),
    "errors": set(),
    "compile_once": set(),
    "state": set(),
    "recent_calls": set(),
    "checks": {"errors"},
    "dropout": {"errors"},
    "layouts": {"checks", "errors"},
    "masks": {"checks", "errors"},
    "reference": {"dropout", "masks"},
    "kernels": {"compile_once", "dropout", "errors", "layouts", "masks", "state"},
    "coordination": {"context", "errors", "transport"},  # context only for its type
    "transport": {"coordination", "errors"},
    "ring": {"errors", "kernels", "layouts", "masks", "state", "transport"},
    "token_mean": {"errors"},
    "groups": {"coordination", "errors", "layouts"},
    "context": {
        "checks",
        "coordination",
        "errors",
        "groups",
        "layouts",
        "masks",
        "recent_calls",
        "ring",
        "token_mean",
        "transport",
    },
    "ops": {
        "checks",
        "context",
        "dropout",
        "errors",
        "kernels",
        "layouts",
        "masks",
        "recent_calls",
        "ring",
        "state",
        "transport",
    },
    "extras": {"errors"},
    "integrations": {"context", "dropout", "errors", "extras", "masks", "ops", "reference"},
}


# Internal modules that an application may import, because it explains them.
EXPLAINED = {
    "tiles.py": ("ringflash.kernels.triton.config", "ringflash.kernels.hopper", "ringflash.kernels.fallback"),
    "hops.py": ("ringflash.kernels", "ringflash.layouts.layout", "ringflash.masks"),
    "merging.py": ("ringflash.masks", "ringflash.ops"),  # the backward of a hop with lse of the whole ring
}


def _library_imports(path: Path, besides: tuple[str, ...] = ()) -> set[str]:
    """Returns the parts of the library that a file imports, except for the modules `besides`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    inside = {name for name in names if name.startswith("ringflash.")}
    leaves_out = tuple(f"{module}." for module in besides)
    return {name.split(".")[1] for name in inside if not f"{name}.".startswith(leaves_out)}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_run_one_way(part: str) -> None:
    folder = ROOT / part
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{part}.py"]:
        assert _library_imports(path) <= ALLOWED[part] | {part, "torch_private"}, (
            f"{path.name} imports what is above it"
        )


@pytest.mark.parametrize("part", ["train", "bench"])
def test_applications_import_public_names_only(part: str) -> None:
    private = set(ALLOWED) - {"compile_once", "errors", "extras", "reference", "torch_private"}
    for path in sorted((ROOT / part).rglob("*.py")):
        assert not _library_imports(path, EXPLAINED.get(path.name, ())) & private, (
            f"{path.name} imports the library's inside"
        )


def test_each_public_name_of_the_trainer_is_declared_where_a_type_checker_finds_it() -> None:
    declared = {
        alias.name
        for node in ast.walk(ast.parse((ROOT / "train" / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringflash.train.")
        for alias in node.names
    }
    assert declared == {*ringflash.train.__all__}
    assert {*ringflash.train.__all__} <= {*dir(ringflash.train)}
    for name in ringflash.train.__all__:
        assert getattr(ringflash.train, name).__name__ == name
    with pytest.raises(AttributeError, match="'ringflash.train' has no attribute 'Nothing'"):
        _ = ringflash.train.Nothing  # pyright: ignore[reportAttributeAccessIssue] - the point of the test


def test_importing_the_library_is_light() -> None:
    code = (
        "import sys, ringflash; print([m for m in ('lightning', 'triton.language', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("link", ["kernels", "train"])
def test_a_checkout_without_symbolic_links_names_the_remedy(link: str, as_text: bool, tmp_path: Path) -> None:
    copy = tmp_path / "ringflash"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(link, "configs", "__pycache__"))
    if as_text:  # git writes such a file without core.symlinks
        (copy / link).write_text(f"../{link}")
    code = (  # the finder stands for another installed copy: setuptools adds one for an editable install
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Installed:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(ROOT)!r}]) if name.startswith('ringflash.') else None\n"
        "sys.meta_path.append(Installed)\n"
        "import ringflash\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {copy / link}: expected a folder, got {'a file' if as_text else 'nothing'}.")
    assert "git config core.symlinks true" in error
    assert "pip install ringflash" in error
