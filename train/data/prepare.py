"""Preparation of token files from text, in several processes, with resumption of an interrupted run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console

from ringflash.errors import ConfigError, DataError
from ringflash.train.data.chat import CHAT_TEMPLATE, Chat
from ringflash.train.data.sources import MAX_LINE, BadRow, Part, Skip, Source, divide, find_sources, name_row, read
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.data.tokens import (
    DATASET,
    FORMAT_VERSION,
    Header,
    Piece,
    ShardHeader,
    TokenFiles,
    read_header,
    shard_path,
    verify_shard,
    write_dataset,
    write_shard,
)

log = logging.getLogger(__name__)

SHARD_BYTES = 64 << 20
BATCH_CHARACTERS = 1 << 22  # text encoded at once, enough for all threads of a tokenizer
LOOKED_AT = 1 << 16  # bytes of a .json file in which a row is looked for
REASON = 500  # characters of the reason for which a row was skipped


@dataclass(frozen=True)
class Recipe:
    """Settings that determine the ids of a source besides its content.

    Args:
        tokenizer: tokenizer of the text.
        text_field: field of the text in JSON lines and tables.
        chat: chat template, if rows are conversations; None if they are text.
        skip_bad: whether rows that are no documents are left out, and noted beside the shard. Otherwise the first one
            is an error.
        max_line: bytes of the longest line of JSON; a longer one is a bad row.
    """

    tokenizer: Tokenizer
    text_field: str = "text"
    chat: Chat | None = None
    skip_bad: bool = False
    max_line: int = MAX_LINE

    def key(self, parts: Sequence[Part]) -> str:
        """Returns a digest of the inputs of a shard of `parts`; files are identified by path, size and time."""
        what = self.text_field if self.chat is None else f"\0{self.chat.digest}"
        if self.skip_bad:  # otherwise a line that is too long leaves no shard
            what += f"\0{self.max_line}"
        key = hashlib.sha256(f"{FORMAT_VERSION}\0{self.tokenizer.digest}\0{what}".encode())
        for part in parts:
            s = part.source
            key.update(os.fsencode(s.path) + f"\0{s.kind} {s.size} {s.modified} {part.begin} {part.end}\n".encode())
        return key.hexdigest()


def prepare(
    sources: str | Sequence[str],
    folder: Path,
    recipe: Recipe,
    *,
    processes: int = 1,
    val_fraction: float | None = None,
    shard_bytes: int = SHARD_BYTES,
    console: Console | None = None,
) -> TokenFiles:
    """Writes the documents of `sources` to `folder` as token files.

    The files do not depend on the number of processes. Existing shards with the right key and digest are kept, so an
    interrupted preparation continues where it stopped. Other processes wait while one prepares the same folder.

    Args:
        sources: see `find_sources`; files in `folder` are left out.
        folder: a new folder, or one of an earlier preparation.
        recipe: tokenizer, and field of the text or chat template.
        processes: number of processes that encode.
        val_fraction: see `Header`.
        shard_bytes: bytes of sources a shard.
        console: console for a progress bar; None shows none.

    Raises:
        DataError: no documents, only empty ones, some that cannot be read, or a folder with other files in it.
        OSError: the folder cannot be written.
    """
    if processes < 1:
        raise ConfigError("processes", expected="at least 1", got=processes, remedy="Pass the number of CPU cores.")
    if shard_bytes < 1:
        raise ConfigError("shard_bytes", expected="at least 1", got=shard_bytes, remedy=f"Try {SHARD_BYTES}.")
    if recipe.max_line < 1:
        raise ConfigError("max_line", expected="at least 1", got=recipe.max_line, remedy=f"Try {MAX_LINE}.")
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise ConfigError("val_fraction", expected="from 0 to below 1", got=val_fraction, remedy="Try 0.01.")
    found = [s for s in find_sources(sources) if not Path(s.path).is_relative_to(folder.absolute())]
    shards = divide(found, shard_bytes)
    _check_folder(folder)
    _warn_of_rows(found, recipe.text_field)
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256("".join(map(recipe.key, shards)).encode()).hexdigest()
    with _lock(folder):
        if _key_of(folder) != key:
            (folder / DATASET).unlink(missing_ok=True)  # the new shards will not match it
        headers = _shards(folder, shards, recipe, processes, console)
        for index in range(len(shards), len(shards) + sum(1 for _ in folder.glob("tokens-*"))):
            for left in (shard_path(folder, index), _skipped_path(shard_path(folder, index))):
                left.unlink(missing_ok=True)  # by an earlier preparation with more shards
        if not sum(header.num_tokens for header in headers):
            total, first = skipped_rows(folder, 1)
            got = f"{total} bad row(s) and no other, for instance {first[0]}" if total else "nothing but empty ones"
            raise DataError(
                "corpus",
                expected="text",
                got=f"{len(found)} file(s) with {got}",
                remedy="Name files with text in them.",
            )
        recipe.tokenizer.save(folder / "tokenizer")
        template = folder / "tokenizer" / CHAT_TEMPLATE
        template.unlink(missing_ok=True)
        if recipe.chat is not None:
            template.write_text(recipe.chat.template, encoding="utf-8")
        has_pairs = recipe.chat is not None and recipe.chat.has_pairs
        write_dataset(folder, Header(key, tuple(headers), val_fraction, has_pairs=has_pairs))
    return TokenFiles(folder)


def _key_of(folder: Path) -> str | None:
    try:
        return json.loads((folder / DATASET).read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_folder(folder: Path) -> None:
    """Raises DataError if a folder holds other files, so that none of them is deleted or mixed with shards."""
    if folder.is_file():
        raise DataError("--to", expected="a folder", got=f"the file {folder}", remedy="Name a new folder.")
    if not folder.is_dir():
        return
    others = [p.name for p in folder.iterdir() if p.name not in (DATASET, "tokenizer", ".lock")]
    if strange := sorted(name for name in others if not name.startswith(("tokens-", ".tokens-", f".{DATASET}"))):
        raise DataError(
            "--to",
            expected="a new folder, or one of an earlier preparation",
            got=f"{folder}, with {strange[0]} in it",
            remedy="Name a folder of its own.",
        )


def _warn_of_rows(sources: Sequence[Source], text_field: str) -> None:
    """Warns of the first .json file that holds rows: it is read as one text, with its braces and names."""
    for source in sources:
        if source.kind != "text" or Path(source.path).suffix.lower() != ".json":
            continue
        try:
            with open(source.path, "rb") as stream:
                head = stream.read(LOOKED_AT).decode("utf-8-sig", errors="replace")
            row, _ = json.JSONDecoder().raw_decode(head.lstrip("[ \t\r\n"))
        except (OSError, ValueError, RecursionError):  # `read` informs of files that cannot be read
            continue
        if isinstance(row, dict) and isinstance(row.get(text_field), str):
            remedy = "rename a file of lines to .jsonl, and write an array as lines"
            log.warning("%s holds rows with %r, but is read as one text: %s", source.path, text_field, remedy)
            return


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Waits until no other process prepares `folder`; the lock of a process that dies is released."""
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for left in (*folder.glob(".tokens-*"), *folder.glob(f".{DATASET}.*")):  # left by killed processes
            left.unlink()
        yield


def _shards(
    folder: Path, shards: Sequence[tuple[Part, ...]], recipe: Recipe, processes: int, console: Console | None
) -> list[ShardHeader]:
    headers: dict[int, ShardHeader] = {}
    with _progress(console) as bar:
        sizes = [sum(part.size for part in parts) for parts in shards]
        task = bar.add_task("encoding", total=sum(sizes), tokens="0", kept="")
        tokens = kept = 0

        def note(index: int, made: tuple[ShardHeader, bool]) -> None:
            nonlocal tokens, kept
            headers[index], was_there = made
            tokens, kept = tokens + made[0].num_tokens, kept + was_there
            also = f", {kept} shards kept" if kept else ""
            bar.update(task, advance=sizes[index], tokens=f"{tokens:,}", kept=also)

        if min(processes, len(shards)) <= 1:
            for index, parts in enumerate(shards):
                note(index, make_shard(shard_path(folder, index), parts, recipe))
        else:
            for index, made in _in_processes(folder, shards, recipe, processes):
                note(index, made)
    return [headers[index] for index in range(len(shards))]


def _in_processes(
    folder: Path, shards: Sequence[tuple[Part, ...]], recipe: Recipe, processes: int
) -> Iterator[tuple[int, tuple[ShardHeader, bool]]]:
    """Makes all shards, and yields each when it is done."""
    # Spawns, because a fork would copy the locks of torch and of tokenizers without the threads that hold them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(shards)), context, initializer=_enter_worker)
    try:
        indices = {
            pool.submit(make_shard, shard_path(folder, index), parts, recipe): index
            for index, parts in enumerate(shards)
        }
        for future in as_completed(indices):
            yield indices[future], future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "processes",
            expected="processes that live until all is encoded",
            got="one that was killed, perhaps for want of memory",
            remedy="Run it again with fewer: finished shards are kept.",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def make_shard(path: Path, parts: Sequence[Part], recipe: Recipe) -> tuple[ShardHeader, bool]:
    """Returns the shard of `parts` at `path`, and whether it existed already with the right digest."""
    key = recipe.key(parts)
    if path.exists():
        try:
            header = read_header(path)
            if header.key == key and verify_shard(path, header):
                return header, True
        except DataError:
            pass  # damaged: write_shard replaces it
    with _skipping(path, recipe.skip_bad) as skip:
        documents = _encoded(parts, recipe, skip)
        return write_shard(path, documents, key, recipe.tokenizer, recipe.chat is not None), False


def skipped_rows(folder: Path, most: int) -> tuple[int, list[str]]:
    """Returns the number of rows that the preparation of a folder skipped, and file, line and reason of the first.

    Args:
        folder: the prepared folder.
        most: rows to describe, at most.
    """
    total, rows = 0, []
    for path in sorted(folder.glob("tokens-*.skipped.jsonl")):
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                total += 1
                if len(rows) < most:
                    row = json.loads(line)
                    # Counts lines only here, because this reads the file up to the row.
                    rows.append(f"{name_row(row['file'], row['kind'], row['place'])}: {row['reason']}")
    return total, rows


def _skipped_path(shard: Path) -> Path:
    return shard.with_suffix(".skipped.jsonl")


@contextmanager
def _skipping(shard: Path, skip_bad: bool) -> Iterator[Skip | None]:
    """Gives a function that notes skipped rows beside a shard, or None; no rows leave no file."""
    path = _skipped_path(shard)
    path.unlink(missing_ok=True)
    if not skip_bad:
        yield None
        return
    with path.open("w", encoding="utf-8", buffering=1) as stream:  # complete when the shard gets its name

        def skip(part: Part, place: int, bad: BadRow) -> None:
            reason = f"{bad.argument}: expected {bad.expected}, got {bad.got}"[:REASON]
            row = {"file": part.source.path, "kind": part.source.kind, "place": place, "reason": reason}
            stream.write(json.dumps(row) + "\n")

        yield skip
    if not path.stat().st_size:
        path.unlink()


def _encoded(parts: Sequence[Part], recipe: Recipe, skip: Skip | None) -> Iterator[Piece]:
    """Yields pieces of documents as ids, many encoded at once."""
    tokenizer, chat = recipe.tokenizer, recipe.chat
    texts: list[str] = []
    marks: list[Any] = []  # whether each text ends its document; the spans of a conversation that are learnt
    characters = 0

    def encode() -> Iterator[Piece]:
        if chat is not None:
            return ((ids, True, learnt) for ids, learnt in tokenizer.encode_spans(texts, marks))
        return zip(tokenizer.encode_batch(texts), marks, repeat(None))

    for part in parts:
        rules = recipe.max_line, skip
        for text, mark in read(part, recipe.text_field, *rules) if chat is None else chat.read(part, *rules):
            texts.append(text)
            marks.append(mark)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                yield from encode()
                texts, marks, characters = [], [], 0
    yield from encode()


def _enter_worker() -> None:
    # An interrupt ends a worker silently, because the first process prints a message. `leave` notices its death.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Uses one thread a process, because the caller sets the number of processes. The library has no other switch.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def leave() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def _progress(console: Console | None) -> progress.Progress:
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TextColumn("{task.fields[tokens]} tokens{task.fields[kept]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=console or Console(quiet=True), disable=console is None)
