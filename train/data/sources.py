"""Documents of text files, JSON lines, Parquet files and saved `datasets` folders, found, divided and read."""

from __future__ import annotations

import glob
import importlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from ringflash.errors import DataError
from ringflash.train.data.streams import COMPRESSED, is_compressed, opened, read_lines, skip_line

STDLIB = "stdlib"
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
PIECE = 1 << 20  # characters of a text file in memory, and encoded, at once
SAVED_DATASET = ("state.json", "dataset_dict.json")  # a folder of datasets' save_to_disk has one of these
ROWS = 1000  # rows of a table in memory at once
MAX_LINE = 64 << 20  # bytes of the longest line of JSON

Kind = Literal["text", "lines", "parquet", "saved"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Source:
    """A file, or a folder of a saved data set.

    Args:
        path: path of the source.
        kind: "text" is one document, "lines" one a line of JSON, "parquet" and "saved" one a row.
        size: size in bytes.
        modified: time of the last change in nanoseconds since 1970.
    """

    path: str
    kind: Kind
    size: int
    modified: int


@dataclass(frozen=True)
class Part:
    """Some documents of a source.

    Args:
        source: the source.
        begin: first byte of a text or lines, row group of a Parquet file, or row of a saved data set. A line belongs to
            the part that contains its first byte.
        end: one past the last.
        size: approximate size in bytes.
    """

    source: Source
    begin: int
    end: int
    size: int


class BadRow(Exception):
    """A row that is no document; its reader adds the file and the number of the row."""

    def __init__(self, argument: str, expected: str, got: str, remedy: str) -> None:
        super().__init__(got)
        self.argument, self.expected, self.got, self.remedy = argument, expected, got, remedy


Skip = Callable[[Part, int, BadRow], None]  # takes note of a row that is left out, and of its place


def find_sources(sources: str | Sequence[str]) -> list[Source]:
    """Finds the sources that `sources` name, sorted by name.

    Args:
        sources: files, folders (all files below, except hidden ones), globs, or "stdlib", the sources of the running
            Python's standard library without its tests. .jsonl, .ndjson and .parquet files are read by their suffix. A
            folder of datasets' save_to_disk is one source. Any other file is a document of text. Text and lines may
            be compressed, with .gz or .zst as a further suffix.

    Raises:
        DataError: a source names no file, or cannot be read.
    """
    found: dict[str, Path] = {}
    for source in [sources] if isinstance(sources, str) else sources:
        try:
            root, files = _files(source)
            problem = "" if files else "holds no file" if Path(source).is_dir() else "does not exist"
        except OSError as error:
            root, files, problem = Path(), [], f"cannot be read: {error.strerror}"
        if not source.strip():  # pathlib would use the working directory
            files, problem = [], "is empty"
        if not files:
            raise DataError(
                "corpus",
                expected=f'a text file, a folder or glob with text files, or "{STDLIB}"',
                got=f"{source!r}, which {problem}",
                remedy=f"Check the path; relative ones start at {Path.cwd()}.",
            )
        # Sorts by name below the source, so that the order does not depend on the source's location.
        found |= {f"{source}\0{file.relative_to(root).as_posix()}": file for file in files}
    if not found:
        raise DataError("corpus", expected="at least one source", got="none", remedy=f'Name files, or "{STDLIB}".')
    return [_source(path) for path in dict.fromkeys(found[name] for name in sorted(found))]


def divide(sources: Iterable[Source], part_bytes: int) -> list[tuple[Part, ...]]:
    """Divides the sources' documents, in order, into groups of about `part_bytes`, one group a shard.

    The result is a pure function of the sources, so every process makes the same shards.
    """
    groups: list[list[Part]] = [[]]
    size = 0
    for part in (part for source in sources for part in _parts(source, part_bytes)):
        if groups[-1] and size + part.size > part_bytes:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size
    return [tuple(group) for group in groups if group]


def read(part: Part, text_field: str, max_line: int = MAX_LINE, skip: Skip | None = None) -> Iterator[tuple[str, bool]]:
    """Yields pieces of the documents of a part, each with a flag for the last piece of its document.

    A byte-order mark at the start of a file is no text.

    Args:
        part: the part.
        text_field: field of the text in rows.
        max_line: see `read_rows`.
        skip: see `read_rows`.

    Raises:
        DataError: a source cannot be read, is not UTF-8 text, or has no such field.
    """

    def text_of(row: Any) -> str:
        text = row.get(text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            got = f"{'none' if text is None else type(text).__name__}, of the fields {field_names(row)},"
            remedy = "Name the field that holds the text with --text-field, or leave out rows without text."
            raise BadRow("text_field", f"text in the field {text_field!r} of every row", got, remedy)
        return text

    if part.source.kind == "text":
        path = part.source.path
        with (
            _readable(path),
            opened(path) as stream,
            io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text,
        ):
            for piece, last in _pieces(text):
                if "\0" in piece:
                    raise _not_text(path)
                yield piece, last
        return
    for text in read_rows(part, [text_field], text_of, max_line, skip):
        # A tokenizer needs many times the memory of the text that it encodes at once.
        yield from _pieces(io.StringIO(text, newline="")) if len(text) > PIECE else [(text, True)]


def read_rows(
    part: Part,
    names: Sequence[str],
    convert: Callable[[Any], Result],
    max_line: int = MAX_LINE,
    skip: Skip | None = None,
) -> Iterator[Result]:
    """Yields what `convert` makes of each row of a part of lines or a table.

    A row of a table has those fields of `names` that the table has, or all fields if it has none of them. A line gives
    its JSON, which may be no object.

    Args:
        part: the part.
        names: fields to read.
        convert: function of a row. It raises BadRow for a row that is no document.
        max_line: bytes of the longest line; a longer one is a bad row.
        skip: takes note of each bad row, which is then left out; None raises an error for the first one.

    Raises:
        DataError: a source cannot be read, or a row is bad and there is no `skip`.
    """
    with _readable(part.source.path):
        rows = {
            "lines": lambda: _read_lines(part, max_line),
            "parquet": lambda: _read_parquet(part, names),
            "saved": lambda: _read_saved(part, names),
        }[part.source.kind]()
        for row, place in rows:
            try:
                result = convert(_parsed(row, max_line) if part.source.kind == "lines" else row)
            except BadRow as bad:
                if skip is None:
                    got = f"{bad.got} in {name_row(part.source.path, part.source.kind, place)}"
                    raise DataError(bad.argument, expected=bad.expected, got=got, remedy=bad.remedy) from bad
                skip(part, place, bad)
                continue
            yield result


def name_row(path: str, kind: str, place: int) -> str:
    """Returns the file and the number of a row: lines count from 1, as in editors, and rows of tables from 0."""
    if kind != "lines":
        return f"{path}, row {place}"
    with opened(path) as stream:
        blocks = (stream.read(min(PIECE, place - begin)) for begin in range(0, place, PIECE))
        line = 1 + sum(block.count(b"\n") for block in blocks)
    return f"{path}, line {line}, byte {place}"


def field_names(row: Any) -> str:
    """Returns the names of a row's fields, for messages."""
    return ", ".join(sorted(row if isinstance(row, dict) else ())) or "none"


def _files(source: str) -> tuple[Path, list[Path]]:
    """Returns the files of one source, and the folder that their names are relative to."""
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not STDLIB_SKIPPED & {*f.relative_to(root).parts}]
        return root, [f for f in files if _is_text_file(f)]
    path = Path(os.path.expanduser(source)).absolute()  # Path.expanduser would raise for an unknown user
    if path.is_file() or _is_saved(path):
        return path.parent, [path]
    if path.is_dir():
        visible = (f for f in path.rglob("*") if not any(p.startswith(".") for p in f.relative_to(path).parts))
        return path, [f for f in visible if f.is_file()]
    return Path("/"), [f for name in glob.glob(str(path), recursive=True) if (f := Path(name)).is_file()]


def _is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in SAVED_DATASET)


def _is_text_file(path: Path) -> bool:
    """Returns whether the file is text.

    False also for folders, broken links and files without permission, which installations of Python may contain.
    """
    try:
        return "\0" not in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _source(path: Path) -> Source:
    try:
        if _is_saved(path):
            status = [file.stat() for file in sorted(path.rglob("*")) if file.is_file()]
            size, modified = sum(s.st_size for s in status), max(s.st_mtime_ns for s in status)
            return Source(str(path), "saved", size, modified)
        status = path.stat()
    except OSError as error:
        raise _unreadable(str(path), error) from error
    kinds: dict[str, Kind] = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:  # a compressed Parquet file cannot be read in part
        suffix = path.with_suffix("").suffix.lower().replace(".parquet", "")
    return Source(str(path), kinds.get(suffix, "text"), status.st_size, status.st_mtime_ns)


def _parts(source: Source, part_bytes: int) -> list[Part]:
    if source.kind == "text" or (is_compressed(source.path) and source.kind == "lines" and source.size):
        return [Part(source, 0, source.size, source.size)]  # decompression cannot start in the middle
    if source.kind == "lines":
        edges = [*range(0, source.size, part_bytes), source.size]
        return [Part(source, begin, end, end - begin) for begin, end in pairwise(edges)]
    if source.kind == "parquet":
        with _parquet(source.path) as file:
            groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
        return [Part(source, i, i + 1, size) for i, size in enumerate(groups)]
    rows = len(_saved(source.path))
    step = max(part_bytes * rows // max(source.size, 1), 1)
    edges = [*range(0, rows, step), rows]
    return [Part(source, begin, end, source.size * (end - begin) // rows) for begin, end in pairwise(edges)]


def _pieces(stream: TextIO) -> Iterator[tuple[str, bool]]:
    """Yields pieces of about `PIECE` characters that end with a line, each with a flag for the last one."""
    piece = stream.read(PIECE)
    while True:
        piece += stream.readline(PIECE)
        following = stream.read(PIECE)
        yield piece, not following
        if not following:
            return
        piece = following


def _read_lines(part: Part, max_line: int) -> Iterator[tuple[bytes | None, int]]:
    path = part.source.path
    with opened(path) as stream:
        start = part.begin
        if start:
            stream.seek(start - 1)
            start += skip_line(stream) - 1  # the rest of a line belongs to the previous part
        for place, line in read_lines(stream, start, max_line):
            if place >= part.end and not is_compressed(path):
                return
            if line is None or line.strip():
                yield line, place


def _parsed(line: bytes | None, max_line: int) -> Any:
    if line is None:
        remedy = "Raise --max-line-mib if the memory allows it, or leave the line out, for instance with --skip-bad."
        raise BadRow("corpus", f"lines of at most {max_line} bytes", "more", remedy)
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRow("corpus", "UTF-8 text", "bytes that are not", "Correct the line or leave it out.") from error
    except (ValueError, RecursionError) as error:
        raise BadRow("corpus", "a JSON object a line", str(error), "Correct the line or leave it out.") from error


def _read_parquet(part: Part, names: Sequence[str]) -> Iterator[tuple[Any, int]]:
    with _parquet(part.source.path) as file:
        known: list[str] = file.schema_arrow.names
        place = sum(file.metadata.row_group(i).num_rows for i in range(part.begin))
        columns = [name for name in names if name in known] or known
        for batch in file.iter_batches(ROWS, row_groups=list(range(part.begin, part.end)), columns=columns):
            for row in batch.to_pylist():
                yield row, place
                place += 1


def _read_saved(part: Part, names: Sequence[str]) -> Iterator[tuple[Any, int]]:
    rows = _saved(part.source.path)
    columns = [name for name in names if name in rows.column_names] or rows.column_names
    for begin in range(part.begin, part.end, ROWS):
        batch = rows[begin : min(begin + ROWS, part.end)]
        for place, values in enumerate(zip(*(batch[name] for name in columns), strict=True), begin):
            yield dict(zip(columns, values, strict=True)), place


def _parquet(path: str) -> Any:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise _missing("pyarrow", path) from error
    try:
        return parquet.ParquetFile(path)
    except OSError:
        raise
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise DataError(
            "corpus", expected="a Parquet file", got=f"{path}: {error}", remedy="Leave it out, or write it again."
        ) from error


def _saved(path: str) -> Any:
    """Loads the rows of a folder of datasets' save_to_disk; several splits are concatenated."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise _missing("datasets", path) from error
    loaded = datasets.load_from_disk(path)
    return (
        datasets.concatenate_datasets([loaded[name] for name in sorted(loaded)]) if isinstance(loaded, dict) else loaded
    )


def _missing(library: str, path: str) -> DataError:
    remedy = "Install ringflash[data]." if library == "pyarrow" else f"Install {library}, or save it as Parquet files."
    return DataError("corpus", expected=f"the library `{library}`, to read {path}", got="none", remedy=remedy)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise _not_text(path) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _not_text(path: str) -> DataError:
    remedy = 'Leave it out, for instance with a glob: "folder/**/*.txt".'
    return DataError("corpus", expected="UTF-8 text", got=f"{path}, which is not", remedy=remedy)


def _unreadable(path: str, error: OSError) -> DataError:
    remedy = "Leave it out, or look at its rights."
    got = f"{path}: {error.strerror or error}"
    return DataError("corpus", expected="files that can be read", got=got, remedy=remedy)
