"""Folders at URLs, through fsspec: local copies of token files and checkpoints, and checkpoints that are copied there.

An object store renames nothing. A checkpoint at a URL is therefore complete when it has its manifest, which is written
last. A local copy is complete when its folder has its final name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from ringflash.errors import ArgumentError, CheckpointError
from ringflash.train.checkpoint.manifest import MANIFEST, Keep, is_url

CACHE = "~/.cache/ringflash"
Failure = Callable[..., ArgumentError]  # class of the error for a folder that cannot be read or written


def fetch(url: object, argument: str, cache_dir: str | Path = CACHE, failure: Failure = CheckpointError) -> Path:
    """Returns a local copy of the folder at `url`, which the first process that needs it makes in `cache_dir`.

    The copy is made again when a name, size, time or tag of a file at `url` has changed, and the earlier copy is
    removed. Processes of a host may call this function together.

    Args:
        url: the folder.
        argument: name of the argument with the URL, for errors.
        cache_dir: folder of the copies.
        failure: class of the error.

    Raises:
        ArgumentError: of class `failure`: no such folder, no rights or credentials for it, no package for its protocol,
            or no room for the copy.
    """
    place = _whole(url)
    with _named_errors(argument, place, failure):
        remote, root = fsspec.url_to_fs(place)
        files = {_inside(root, name): entry for name, entry in remote.find(root, detail=True).items()}
        if not files:
            raise FileNotFoundError("no file there")
        listing = sorted((name, entry["size"], _tag(entry)) for name, entry in files.items())
        name = f"remote-{_digest(place)}"
        cache = Path(cache_dir).expanduser()
        folder = cache / f"{name}-{_digest(json.dumps(listing))}"
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                partial = cache / f".{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    for file, entry in files.items():
                        (partial / file).parent.mkdir(parents=True, exist_ok=True)
                        remote.get_file(entry["name"], str(partial / file))
                        if (size := (partial / file).stat().st_size) != entry["size"]:
                            raise OSError(f"{size} of {entry['size']} bytes of {file} arrived")
                    for earlier in cache.glob(f"{name}-*"):
                        shutil.rmtree(earlier)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return folder


def fetched(path: str | Path, argument: str) -> Path:
    """Returns `path`, or a local copy of the checkpoint at it if it is a URL; see `newest_at` and `fetch`."""
    return fetch(newest_at(path, argument), argument) if is_url(path) else Path(path)


def newest_at(url: object, argument: str) -> str:
    """Returns the URL of the checkpoint at `url`, or of the newest complete checkpoint in that folder.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    place = _whole(url)
    with _named_errors(argument, place, CheckpointError):
        remote, root = fsspec.url_to_fs(place)
        if remote.exists(f"{root}/{MANIFEST}"):
            return place
        found = [(_written(remote, folder), folder) for folder in _checkpoints(remote, root)]
        if not found:
            raise FileNotFoundError(f"no {MANIFEST} in it, or in a folder of it")
        return f"{place}/{max(found)[1].rpartition('/')[2]}"


class RemoteCopy:
    """Copy of one checkpoint at a URL, as `step-00000500` in the folder `url`. Ranks may write parts of it.

    Args:
        url: folder of the run's checkpoints.
        step: optimizer steps before the checkpoint.
    """

    def __init__(self, url: str, step: int) -> None:
        self.url, self._name = _whole(url), f"step-{step:08d}"

    def begin(self) -> None:
        """Removes the manifest that an earlier run may have left there."""
        with self._opened() as (remote, root):
            if remote.exists(manifest := f"{root}/{self._name}/{MANIFEST}"):
                remote.rm_file(manifest)

    def add(self, file: Path, folder: str = ".") -> None:
        """Copies a file to the checkpoint, or to a folder in it; the manifest comes last."""
        with self._opened() as (remote, root):
            target = PurePosixPath(root, self._name, folder)
            remote.makedirs(str(target), exist_ok=True)
            remote.put_file(str(file), str(target / file.name))

    def retire(self, keep: Keep | None) -> None:
        """Removes the earlier checkpoints that `keep` excludes, each from its manifest on; None removes none."""
        if keep is None:
            return
        with self._opened() as (remote, root):
            steps = [folder for folder in _checkpoints(remote, root) if re.fullmatch(r".*/step-\d{8,}", folder)]
            steps.sort(key=lambda folder: (_written(remote, folder), folder), reverse=True)
            for folder in steps[keep.newest :]:
                step = int(folder.rpartition("step-")[2])
                if keep.every_n_steps is None or step % keep.every_n_steps:
                    remote.rm_file(f"{folder}/{MANIFEST}")
                    if remote.exists(folder):  # an empty folder of an object store is none
                        remote.rm(folder, recursive=True)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        with _named_errors("remote", self.url, CheckpointError):
            yield fsspec.url_to_fs(self.url)


@contextmanager
def _named_errors(argument: str, url: str, failure: Failure) -> Iterator[None]:
    """Raises an error of class `failure` for any error of a file system; each kind has exceptions of its own."""
    try:
        yield
    except ArgumentError:
        raise
    except Exception as error:
        missing = isinstance(error, ImportError | ValueError) and "://" in url
        remedy = "Check the name, and the rights, credentials and network of this host; a local folder works too."
        if missing:
            remedy = "Install the package that fsspec names for this protocol, such as s3fs, or use a local folder."
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise failure(argument, expected=f"a folder at {url}", got=text, remedy=remedy) from error


def _checkpoints(remote: Any, root: str) -> list[str]:
    """Returns the paths of the complete checkpoints in a folder."""
    remote.invalidate_cache()
    folders = [entry["name"].rstrip("/") for entry in remote.ls(root, detail=True) if entry["type"] == "directory"]
    return [folder for folder in folders if remote.exists(f"{folder}/{MANIFEST}")]


def _written(remote: Any, folder: str) -> float:
    return float(json.loads(remote.cat_file(f"{folder}/{MANIFEST}")).get("written", 0))


def _whole(url: object) -> str:
    """Returns a URL with both slashes after its scheme, which `Path` takes for one, and without a slash at its end."""
    scheme, _, rest = str(url).partition(":/")
    return f"{scheme}://{'/' if scheme in ('file', 'local') else ''}{rest.strip('/')}"


def _inside(root: str, name: str) -> str:
    """Returns the name of a file below `root`, from which no path leads out of the copy."""
    relative = PurePosixPath(name).relative_to(PurePosixPath(root))
    if ".." in relative.parts:
        raise PermissionError(f"{name} leads out of the folder")
    return str(relative)


def _tag(entry: dict[str, Any]) -> str:
    """Returns what changes with a file's content, as far as its file system says so."""
    return str([entry.get(key) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
