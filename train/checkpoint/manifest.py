"""Checkpoint folder: its manifest, and its atomic replacement, during which a complete checkpoint always exists."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringflash.errors import CheckpointCorrupt, CheckpointError, ConfigError

MANIFEST, STATE, TENSOR_INDEX = "manifest.json", "state.pt", "tensors.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Description of a complete checkpoint.

    Args:
        step: optimizer steps before the checkpoint; None if the saver gave no step.
        written: time of completion, in seconds since 1970.
        files: size in bytes and SHA-256 of each file, by name.
    """

    step: int | None
    written: float
    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Keep:
    """Rule for the earlier checkpoints to keep next to the newest, as `step-00000500` and so on.

    Args:
        newest: number of newest checkpoints to keep, including the newest itself.
        every_n_steps: keep forever the checkpoints of steps that are multiples of this; None: keep none forever.
    """

    newest: int = 1
    every_n_steps: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.newest), ("keep_every_n_steps", self.every_n_steps)):
            if value is not None and value < 1:
                raise ConfigError(name, expected="at least 1", got=value, remedy="1 keeps the newest checkpoint alone.")


def is_url(path: object) -> bool:
    """Returns whether `path` is a URL, such as s3://bucket/name; `Path` shortens it to s3:/bucket/name."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.\-]+:/", str(path)) is not None


def local_path(path: str | Path, argument: str) -> Path:
    """Returns the path of a folder on a file system.

    Raises:
        CheckpointError: `path` is a URL, such as s3://bucket/name, from which Path would make a folder named "s3:".
    """
    if is_url(path):
        raise CheckpointError(
            argument,
            expected="a folder of a file system that all ranks share",
            got=str(path),
            remedy="Save to such a folder; LastCheckpoint(remote=URL) copies each checkpoint to a URL as well.",
        )
    return Path(path)


def partial_of(path: Path) -> Path:
    """Returns the path for writing the next content of `path`; it is renamed to `path` when it is complete."""
    return path.parent / f".{path.name}.partial"


def previous_of(path: Path) -> Path:
    """Returns the path that holds the old content of `path` while the new content replaces it."""
    return path.parent / f".{path.name}.old"


def locate(path: Path) -> Path:
    """Returns `path`, or the path of its previous content if a save was killed between its two renames."""
    previous = previous_of(path)
    return previous if not path.exists() and (previous / MANIFEST).is_file() else path


def complete_in(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in `folder`, newest first, without the remains of a killed save."""
    if not folder.is_dir():
        return []
    names = {re.sub(r"^\.(.+)\.old$", r"\1", path.name) for path in folder.iterdir()}
    paths = [locate(folder / name) for name in names if not name.startswith(".")]
    found = [(manifest, path) for path in paths if (manifest := _peek(path))]
    return [path for _, path in sorted(found, key=lambda pair: (pair[0].written, pair[0].step or 0), reverse=True)]


def prepare(path: Path) -> Path:
    """Makes an empty folder next to `path` that `publish` will rename to `path`.

    Raises:
        CheckpointError: `path` holds something other than a checkpoint, which saving would delete.
    """
    if (path.exists() or path.is_symlink()) and _peek(path) is None:
        raise CheckpointError(
            str(path),
            expected="a new name, or a checkpoint to replace",
            got="a folder that is no checkpoint" if path.is_dir() else "a file",
            remedy="Save to a folder of its own, such as checkpoints/last; nothing was deleted.",
        )
    partial = partial_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(partial)
    partial.mkdir()
    return partial


def publish(path: Path, files: dict[str, dict[str, Any]], *, step: int | None = None, keep: Keep | None = None) -> None:
    """Completes the folder of `prepare` with a manifest of `files`, and renames it to `path`.

    There is always a complete checkpoint that `locate` finds: at `path`, or next to it between two renames. The old
    content of `path` is removed, or renamed if `keep` is given. Checkpoints that `keep` excludes are removed.
    """
    partial, previous = partial_of(path), previous_of(path)
    manifest = {"format": FORMAT_VERSION, "step": step, "written": time.time(), "files": dict(sorted(files.items()))}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in (*partial.iterdir(), partial):
        sync(file)
    if path.exists():
        _retire(path, keep)  # a killed save may have left it; without `path` it would be the only checkpoint
        path.rename(previous)
    partial.rename(path)
    sync(path.parent)
    _retire(path, keep)


def verify(path: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """Compares the folder with its manifest: presence and size of every file, and the digest of every `parts`-th file.

    Raises:
        CheckpointError: there is no checkpoint, or no complete one.
        CheckpointCorrupt: a file is missing, truncated or changed; the error names it.
    """
    manifest = read_manifest(path)
    for index, (name, (size, digest)) in enumerate(sorted(manifest.files.items())):
        file = path / name
        if name != Path(name).name or not file.is_file():
            raise damaged(file, "missing")
        if file.stat().st_size != size:
            raise damaged(file, f"{file.stat().st_size} bytes instead of {size}")
        if index % parts == part and entry_of(file)["sha256"] != digest:
            raise damaged(file, "other content")
    for name in (STATE, TENSOR_INDEX):
        if name not in manifest.files:
            raise damaged(path / MANIFEST, f"no entry for {name}")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint `path`; raises as `verify` does."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            str(path),
            expected="a complete checkpoint folder",
            got="no such folder" if not path.exists() else f"no {MANIFEST} in it",
            remedy="Pass a folder that training has finished writing.",
        )
    try:
        content: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
        version, step, written = content.get("format", FORMAT_VERSION), content.get("step"), content.get("written", 0)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(
                str(path),
                expected=f"a checkpoint of format {FORMAT_VERSION}",
                got=f"format {version}, of a newer ringflash",
                remedy="Update ringflash, or pass a checkpoint that this version has saved.",
            )
        if version != FORMAT_VERSION:
            raise ValueError(f"format {version!r}")
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        if not math.isfinite(written):
            raise ValueError(f"written {written}")
        return Manifest(None if step is None else int(step), float(written), files)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise damaged(path / MANIFEST, f"unreadable: {error}") from error


def entry_of(file: Path) -> dict[str, Any]:
    """Returns the manifest entry of `file`: its size in bytes and SHA-256."""
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def damaged(file: Path, what: str) -> CheckpointCorrupt:
    """Makes the error for a file that differs from the saved file."""
    return CheckpointCorrupt(
        str(file),
        expected="the file that was saved",
        got=what,
        remedy="Use another checkpoint; this one is damaged. The folder it lies in stands for the newest that is not.",
    )


def _retire(path: Path, keep: Keep | None) -> None:
    """Renames the previous content of `path` if `keep` keeps it, and removes the checkpoints that `keep` excludes."""
    previous = previous_of(path)
    if keep is not None and (manifest := _peek(previous)) and manifest.step is not None:
        kept = path.parent / f"step-{manifest.step:08d}"
        _remove(kept)  # an earlier run may have reached the same step
        previous.rename(kept)
    _remove(previous)
    if keep is None:
        return
    earlier = [other for other in complete_in(path.parent) if re.fullmatch(r"step-\d{8,}", other.name)]
    for old in earlier[keep.newest - 1 :]:
        if keep.every_n_steps is None or int(old.name[5:]) % keep.every_n_steps:
            old.rename(previous)  # a half-removed folder must not look like a checkpoint
            _remove(previous)


def _peek(path: Path) -> Manifest | None:
    """Returns the manifest if ringflash wrote it; other programs use manifest.json too. Checks no other file."""
    try:
        manifest = read_manifest(path)
    except (OSError, CheckpointError):
        return None
    return manifest if {STATE, TENSOR_INDEX} <= manifest.files.keys() else None


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
