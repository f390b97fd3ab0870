"""Folders at URLs, through fsspec: local copies of token files and checkpoints, and checkpoints that are copied there.

An object store renames nothing. A checkpoint at a URL is therefore complete when it has its manifest, which is written
last. A local copy is complete when its folder has its final name. A process holds a lock on each copy that it uses.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import torch.distributed as dist

from ringflash.errors import ArgumentError, CheckpointError
from ringflash.train.checkpoint.collective import on_every_rank
from ringflash.train.checkpoint.manifest import MANIFEST, STATE, TENSOR_INDEX, Keep, is_url

CACHE = "~/.cache/ringflash"
Failure = Callable[..., ArgumentError]  # class of the error for a folder that cannot be read or written

_used: set[Path] = set()  # copies that this process has locked


def fetch(
    url: str,
    argument: str,
    cache_dir: str | Path = CACHE,
    failure: Failure = CheckpointError,
    *,
    family: str | None = None,
) -> Path:
    """Returns a local copy of the folder at `url`, which the first process that needs it makes in `cache_dir`.

    The copy is made again when a name, size, time or tag of a file at `url` has changed. Earlier copies of the same
    family are then removed, unless a process uses them. Processes of a host may call this function together.

    Args:
        url: the folder.
        argument: name of the argument with the URL, for errors.
        cache_dir: folder of the copies.
        failure: class of the error.
        family: URL that stands for all folders of which one copy is enough; None: `url`.

    Raises:
        ArgumentError: of class `failure`: no such folder, no rights or credentials for it, no package for its protocol,
            or no room for the copy.
    """
    place = whole_url(url)
    name = f"remote-{_digest(place if family is None else whole_url(family))}"
    with _opened(argument, place, failure) as (remote, root):
        found = remote.find(root, detail=True).items()
        files = {_inside(root, file): _with_size(remote, file, entry) for file, entry in found}
        if not files:
            raise FileNotFoundError("no file there")
        listing = sorted((file, entry["size"], _tag(entry)) for file, entry in files.items())
        cache = Path(cache_dir).expanduser()
        folder = cache / f"{name}-{_digest(json.dumps([place, listing]))}"
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _copy(remote, files, cache / f".{name}.partial", folder)
            _use(folder)
            for earlier in cache.glob(f"{name}-*"):
                if earlier != folder:
                    _remove_unused(earlier)
    return folder


def _copy(remote: Any, files: dict[str, dict[str, Any]], partial: Path, folder: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for file, entry in files.items():
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            remote.get_file(entry["name"], str(partial / file))
            if (size := (partial / file).stat().st_size) != entry["size"]:
                raise OSError(f"{size} of {entry['size']} bytes of {file} arrived")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _use(copy: Path) -> None:
    """Keeps a copy from being removed until this process ends."""
    if copy not in _used:
        _used.add(copy)
        fcntl.flock(os.open(_lock_of(copy), os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)  # open until the end


def _lock_of(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.used")


def _remove_unused(copy: Path) -> None:
    """Removes a copy that no process uses."""
    lock = _lock_of(copy)
    with lock.open("w") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(copy)
        lock.unlink()


def fetched(path: str | Path, argument: str, group: dist.ProcessGroup | None = None) -> Path:
    """Returns `path`, or a local copy of the newest complete checkpoint at it if it is a URL.

    A collective of `group`, by default of all processes, where they are connected: the first rank chooses.

    Raises:
        CheckpointError: as `newest_at` and `fetch`, on all ranks.
    """
    if not is_url(path):
        return Path(path)
    url = whole_url(path)
    if not dist.is_initialized():
        return fetch(newest_at(url, argument), argument, family=url)
    newest: str = on_every_rank(lambda: newest_at(url, argument), Path(url), group)[0]
    copies = on_every_rank(lambda: fetch(newest, argument, family=url), Path(url), group)
    return copies[dist.get_rank(group)]


def newest_at(url: str, argument: str) -> str:
    """Returns the URL of the checkpoint at `url`, or of the newest complete checkpoint in that folder.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    place = whole_url(url)
    with _opened(argument, place, CheckpointError) as (remote, root):
        if _written(remote, root) is not None:
            return place
        found = _checkpoints(remote, root)
        if not found:
            raise FileNotFoundError("no complete checkpoint, and no folder with one")
        return f"{place}/{max(found)[1].rpartition('/')[2]}"


def check_remote(url: str, *, fresh: bool) -> None:
    """Checks that checkpoints can be copied to `url`, by writing and removing a small file.

    Args:
        url: folder of the run's checkpoints.
        fresh: whether the run begins at its first step, so that it must not replace another run's checkpoints.

    Raises:
        CheckpointError: the folder cannot be written, or a fresh run finds checkpoints there.
    """
    place = whole_url(url)
    with _opened("remote", place, CheckpointError) as (remote, root):
        remote.makedirs(root, exist_ok=True)
        if fresh and (found := _checkpoints(remote, root)):
            raise CheckpointError(
                "remote",
                expected=f"a folder without checkpoints for a new run, at {place}",
                got=max(found)[1].rpartition("/")[2],
                remedy=f"Resume with --ckpt_path={place}, or name another folder.",
            )
        remote.pipe_file(f"{root}/.ringflash", b"written by a run that can copy its checkpoints here")
        remote.rm_file(f"{root}/.ringflash")


class RemoteCopy:
    """Copy of one checkpoint at a URL, as `step-00000500` in the folder `url`. Ranks may write parts of it.

    Args:
        url: folder of the run's checkpoints.
        step: optimizer steps before the checkpoint.
    """

    def __init__(self, url: str, step: int) -> None:
        self.url, self._name = whole_url(url), f"step-{step:08d}"

    def begin(self) -> None:
        """Removes what an earlier run has left there, its manifest first."""
        with self._opened() as (remote, root):
            _remove(remote, f"{root}/{self._name}")

    def add(self, file: Path, folder: str = ".") -> None:
        """Copies a file to the checkpoint, or to a folder in it; the manifest comes last."""
        with self._opened() as (remote, root):
            target = PurePosixPath(root, self._name, folder)
            remote.makedirs(str(target), exist_ok=True)
            remote.put_file(str(file), str(target / file.name))

    def retire(self, keep: Keep | None) -> None:
        """Removes the earlier checkpoints that `keep` excludes; None removes none."""
        if keep is None:
            return
        with self._opened() as (remote, root):
            found = sorted(_checkpoints(remote, root), reverse=True)
            steps = [folder for _, folder in found if re.fullmatch(r".*/step-\d{8,}", folder)]
            for folder in steps[keep.newest :]:
                step = int(folder.rpartition("step-")[2])
                if keep.every_n_steps is None or step % keep.every_n_steps:
                    _remove(remote, folder)

    def _opened(self) -> Any:
        return _opened("remote", self.url, CheckpointError)


@contextmanager
def _opened(argument: str, url: str, failure: Failure) -> Iterator[tuple[Any, str]]:
    """Yields the file system and the path of `url`.

    Any error is raised as one of class `failure`, because each kind of file system has exceptions of its own.
    """
    remedy = "Install the package that fsspec names for this protocol, such as s3fs, or use a local folder."
    try:
        remote, root = fsspec.url_to_fs(url)
        remedy = "Check the name, and the rights, credentials and network of this host; a local folder works too."
        remote.invalidate_cache()
        yield remote, root.rstrip("/")
    except ArgumentError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise failure(argument, expected=f"a folder at {url}", got=text, remedy=remedy) from error


def _checkpoints(remote: Any, root: str) -> list[tuple[float, str]]:
    """Returns the time and the path of each complete checkpoint in a folder."""
    try:
        entries = remote.ls(root, detail=True)
    except FileNotFoundError:  # an empty folder of an object store is none
        return []
    folders = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
    found = [(_written(remote, folder), folder) for folder in folders]
    return [(written, folder) for written, folder in found if written is not None]


def _written(remote: Any, folder: str) -> float | None:
    """Returns when a checkpoint was written; None where there is none, or none that ringflash has completed."""
    try:
        manifest = json.loads(remote.cat_file(f"{folder}/{MANIFEST}"))
        return float(manifest["written"]) if {STATE, TENSOR_INDEX} <= manifest["files"].keys() else None
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):  # none, or another program's
        return None


def _remove(remote: Any, folder: str) -> None:
    """Removes a checkpoint, its manifest first. Names are taken literally; `rm` would read them as patterns."""
    if not remote.exists(folder):
        return
    for file in sorted(remote.find(folder), key=lambda file: not file.endswith(f"/{MANIFEST}")):
        remote.rm_file(file)
    remote.invalidate_cache()
    with suppress(FileNotFoundError):  # a folder of an object store is gone with its files
        for place in sorted([folder, *remote.find(folder, withdirs=True)], key=len, reverse=True):
            with suppress(OSError, ValueError):
                remote.rmdir(place)


def whole_url(url: object) -> str:
    """Returns a URL without a slash at its end, and with both after its scheme, which `Path` makes one."""
    text = str(url).rstrip("/")
    if "://" in text:
        return text
    scheme, _, rest = text.partition(":/")
    return f"{scheme}://{'/' if scheme in ('file', 'local') else ''}{rest}"


def _with_size(remote: Any, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a listing with its size, which some file systems tell for single files alone."""
    if entry.get("size") is None:
        entry = {**entry, **remote.info(name)}
    if entry.get("size") is None:
        raise OSError(f"the file system does not tell the size of {name}")
    return entry


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
