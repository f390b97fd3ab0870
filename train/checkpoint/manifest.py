"""The folder of a checkpoint: its manifest, and its replacement with never a moment without a complete one."""

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
    """What a complete checkpoint says of itself.

    Args:
        step: optimizer steps before it; None where the saver named none.
        written: when it was completed, in seconds since 1970.
        files: size in bytes and SHA-256 of each, by name.
    """

    step: int | None
    written: float
    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Keep:
    """Which earlier checkpoints stay beside the newest, as `step-00000500` and so on.

    Args:
        newest: how many of the newest stay, the newest itself counted.
        every_n_steps: those of steps that are multiples of this stay for good; None: none does.
    """

    newest: int = 1
    every_n_steps: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.newest), ("keep_every_n_steps", self.every_n_steps)):
            if value is not None and value < 1:
                raise ConfigError(name, expected="at least 1", got=value, remedy="1 keeps the newest checkpoint alone.")


def local_path(path: str | Path, argument: str) -> Path:
    """The path of a folder on a file system.

    Raises:
        CheckpointError: it is a URL, such as s3://bucket/name, of which Path would make a folder named "s3:".
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.\-]+:/", str(path)):
        raise CheckpointError(
            argument,
            expected="a folder of a file system that all ranks share",
            got=str(path),
            remedy="Save to such a folder and copy the checkpoint when it is complete, or mount the remote storage.",
        )
    return Path(path)


def partial_of(path: Path) -> Path:
    """Where the next content of `path` is written; it becomes `path` when it is complete."""
    return path.parent / f".{path.name}.partial"


def previous_of(path: Path) -> Path:
    """Where the content of `path` is while the next one takes its place."""
    return path.parent / f".{path.name}.old"


def locate(path: Path) -> Path:
    """`path`, or the previous content of it when a save was killed as it put the next one in place."""
    previous = previous_of(path)
    return previous if not path.exists() and (previous / MANIFEST).is_file() else path


def complete_in(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the newest first; what a killed save has left is not among them."""
    if not folder.is_dir():
        return []
    names = {re.sub(r"^\.(.+)\.old$", r"\1", path.name) for path in folder.iterdir()}
    paths = [locate(folder / name) for name in names if not name.startswith(".")]
    found = [(manifest, path) for path in paths if (manifest := _peek(path))]
    return [path for _, path in sorted(found, key=lambda pair: (pair[0].written, pair[0].step or 0), reverse=True)]


def prepare(path: Path) -> Path:
    """Makes the empty folder beside `path` that `publish` will move there.

    Raises:
        CheckpointError: `path` holds something that is not a checkpoint, and that saving would delete.
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
    """Completes the folder that `prepare` made with a manifest of `files`, and moves it to `path`.

    There is always a complete checkpoint, which `locate` finds: at `path`, or beside it between two renames. What was
    at `path` before is removed, or with `keep` gets a name of its own, and what that does not keep is removed.
    """
    partial, previous = partial_of(path), previous_of(path)
    manifest = {"format": FORMAT_VERSION, "step": step, "written": time.time(), "files": dict(sorted(files.items()))}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in (*partial.iterdir(), partial):
        sync(file)
    if path.exists():
        _retire(path, keep)  # left by a kill after the renames; without `path` it would be all there is
        path.rename(previous)
    partial.rename(path)
    sync(path.parent)
    _retire(path, keep)


def verify(path: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """Compares the folder with its manifest: every file there, of the right size, and every `parts`-th digest.

    Raises:
        CheckpointError: there is no checkpoint, or none that is complete.
        CheckpointCorrupt: naming the file that is missing, truncated or changed.
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
    """The manifest of the checkpoint `path`; raises as `verify`."""
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
    """Size in bytes and SHA-256 of `file`, as the manifest has them."""
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def damaged(file: Path, what: str) -> CheckpointCorrupt:
    """The error of a file that is not as it was saved."""
    return CheckpointCorrupt(
        str(file),
        expected="the file that was saved",
        got=what,
        remedy="Use another checkpoint; this one is damaged. The folder it lies in stands for the newest that is not.",
    )


def _retire(path: Path, keep: Keep | None) -> None:
    """Gives the previous content of `path` a name of its own where it is to be kept, and removes what is not."""
    previous = previous_of(path)
    if keep is not None and (manifest := _peek(previous)) and manifest.step is not None:
        kept = path.parent / f"step-{manifest.step:08d}"
        _remove(kept)  # of an earlier run that came as far
        previous.rename(kept)
    _remove(previous)
    if keep is None:
        return
    earlier = [other for other in complete_in(path.parent) if re.fullmatch(r"step-\d{8,}", other.name)]
    for old in earlier[keep.newest - 1 :]:
        if keep.every_n_steps is None or int(old.name[5:]) % keep.every_n_steps:
            old.rename(previous)  # half removed it must not look like a checkpoint
            _remove(previous)


def _peek(path: Path) -> Manifest | None:
    """The manifest, if it is one of ours: other programs have a manifest.json too. The files are not looked at."""
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
