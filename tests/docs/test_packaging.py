"""The wheel and the source distribution hold what they should, and a wheel is built twice with the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import ringflash
from tests.helpers.patience import PATIENCE

ROOT = Path(ringflash.__file__).parents[1]
SKIPPED = ("__pycache__", "*.pyc", ".git", ".venv", "build", "dist", "*.egg-info", "runs", ".*_cache", ".hypothesis")
FOLDERS = (".ci", "configs", "docs", "kernels", "ringflash", "tests", "train")
FILES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
)


def build(kind: str, folder: Path) -> Path:
    """Builds a distribution from a copy of the sources, because building writes beside them."""
    sources, built = folder / "sources", folder / "built"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
    for name in (*FILES, ".gitignore"):
        shutil.copy(ROOT / name, sources)
    built.mkdir()
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(built)!r})"
    command, environment = [sys.executable, "-c", program], {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, cwd=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = built.iterdir()
    return path


def files_of(folder: Path) -> set[str]:
    """Returns the files below a folder of the checkout, links followed, except what tools leave there."""
    paths = [Path(top) / name for top, _, names in os.walk(ROOT / folder, followlinks=True) for name in names]
    left = [path.relative_to(ROOT) for path in paths]
    return {str(path) for path in left if not any(Path(part).match(skip) for part in path.parts for skip in SKIPPED)}


def test_the_source_distribution_is_complete(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    expected = {*FILES}.union(*(files_of(Path(folder)) for folder in FOLDERS))
    assert len(expected) > 500
    assert not expected - names


def test_the_wheel_is_complete_and_reproducible(tmp_path: Path) -> None:
    wheels = [build("wheel", tmp_path / name) for name in ("first", "second")]
    first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels)
    assert first == second
    with zipfile.ZipFile(wheels[0]) as file:
        names = {*file.namelist()}
    assert not files_of(Path("ringflash")) - names
