"""The folder of a checkpoint: its manifest, and its replacement with never a moment without a complete one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ringflash.errors import CheckpointError

MANIFEST, STATE, TENSOR_INDEX = "manifest.json", "state.pt", ".metadata"
FORMAT_VERSION = 1


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


def prepare(path: Path) -> Path:
    """Makes the empty folder beside `path` that `publish` will move there.

    Raises:
        CheckpointError: `path` holds something that is not a checkpoint, and that saving would delete.
    """
    if (path.exists() or path.is_symlink()) and not _is_checkpoint(path):
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


def publish(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Completes the folder that `prepare` made with a manifest of `files`, and moves it to `path`.

    There is always a complete checkpoint, which `locate` finds: at `path`, or beside it between two renames.
    """
    partial, previous = partial_of(path), previous_of(path)
    manifest = {"format": FORMAT_VERSION, "files": dict(sorted(files.items()))}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in (*partial.iterdir(), partial):
        _sync(file)
    if path.exists():
        _remove(previous)  # left by a kill after the renames; without `path` it would be all there is
        path.rename(previous)
    partial.rename(path)
    _sync(path.parent)
    _remove(previous)


def verify(path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Compares the folder with its manifest: every file there, of the right size, and every `parts`-th digest.

    Raises:
        CheckpointError: naming the file that is missing, truncated or changed.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            str(path),
            expected="a complete checkpoint folder",
            got="no such folder" if not path.exists() else f"no {MANIFEST} in it",
            remedy="Pass a folder that training has finished writing.",
        )
    try:
        files: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_bytes())["files"]
        expected = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path / MANIFEST, f"unreadable: {error}") from error
    for index, (name, (size, digest)) in enumerate(sorted(expected.items())):
        file = path / name
        if name != Path(name).name or not file.is_file():
            raise damaged(file, "missing")
        if file.stat().st_size != size:
            raise damaged(file, f"{file.stat().st_size} bytes instead of {size}")
        if index % parts == part and entry_of(file)["sha256"] != digest:
            raise damaged(file, "other content")
    for name in (STATE, TENSOR_INDEX):
        if name not in expected:
            raise damaged(path / MANIFEST, f"no entry for {name}")


def entry_of(file: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of `file`, as the manifest has them."""
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def damaged(file: Path, what: str) -> CheckpointError:
    """The error of a file that is not as it was saved."""
    return CheckpointError(
        str(file), expected="the file that was saved", got=what, remedy="Use another checkpoint; this one is damaged."
    )


def _is_checkpoint(path: Path) -> bool:
    # Other programs have a manifest.json too, so it must be one of ours; whether the files fit it does not matter.
    try:
        return {STATE, TENSOR_INDEX} <= json.loads((path / MANIFEST).read_bytes())["files"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
