"""Text files as one memory-mapped stream of byte-level tokens."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ringflash.errors import ConfigError, DataError

END_OF_DOCUMENT = 256  # after the 256 values of a byte
VOCAB_SIZE = 257
STDLIB = "stdlib"
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
FORMAT_VERSION = 1
MAGIC = b"ringflash tokens\n"
ALIGNMENT = 64


@dataclass(frozen=True)
class CorpusHeader:
    """What a token file says about itself, as JSON before the tokens.

    Args:
        num_tokens: tokens that follow, END_OF_DOCUMENT after each document included.
        offsets: first token of each document.
        digest: SHA-256 of the tokens.
        dtype: numpy's name of a token's type.
        version: of this format.
    """

    num_tokens: int
    offsets: tuple[int, ...]
    digest: str
    dtype: str = "<u2"
    version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Corpus:
    """A token file and its tokens, (num_tokens,) uint16, read from disk as they are used."""

    path: Path
    header: CorpusHeader
    tokens: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return self.header.num_tokens


def encode(text: str) -> list[int]:
    """UTF-8 bytes of `text`."""
    return list(text.encode())


def decode(tokens: Sequence[int] | Tensor) -> str:
    """Text of the bytes before the first END_OF_DOCUMENT; what is no byte, or not UTF-8, becomes U+FFFD."""
    values: list[int] = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    end = values.index(END_OF_DOCUMENT) if END_OF_DOCUMENT in values else len(values)
    never_utf8 = 0xFF
    return bytes(v if 0 <= v < END_OF_DOCUMENT else never_utf8 for v in values[:end]).decode(errors="replace")


def find_documents(sources: str | Sequence[str], seed: int) -> list[Path]:
    """The files that `sources` name, one document each: sorted, then shuffled by `seed`.

    Args:
        sources: files, folders (all files below, except hidden ones), globs, or "stdlib", the sources of the running
            Python's standard library without its tests.
        seed: of the shuffle.

    Raises:
        DataError: a source that names no file, or cannot be looked at.
    """
    found: dict[str, Path] = {}
    for source in [sources] if isinstance(sources, str) else sources:
        try:
            root, files = _files(source)
            problem = "" if files else "holds no file" if Path(source).is_dir() else "does not exist"
        except OSError as error:
            root, files, problem = Path(), [], f"cannot be read: {error.strerror}"
        if not source.strip():  # to pathlib the working directory
            files, problem = [], "is empty"
        if not files:
            raise DataError(
                "corpus",
                expected=f'a text file, a folder or glob with text files, or "{STDLIB}"',
                got=f"{source!r}, which {problem}",
                remedy=f"Check the path; relative ones start at {Path.cwd()}.",
            )
        # By name below the source, so that the order does not depend on where the source lies.
        found |= {f"{source}\0{file.relative_to(root).as_posix()}": file for file in files}
    if not found:
        raise DataError("corpus", expected="at least one source", got="none", remedy=f'Name files, or "{STDLIB}".')
    unique = list(dict.fromkeys(found[name] for name in sorted(found)))
    return [unique[i] for i in np.random.Generator(np.random.PCG64(seed)).permutation(len(unique))]


def load_corpus(sources: str | Sequence[str], cache_dir: str | Path, seed: int = 0) -> Corpus:
    """The corpus of `find_documents(sources, seed)`, written to `cache_dir` by the first process that needs it.

    The file's name follows from the documents' paths, sizes and times, and it appears under that name complete, so
    processes that start together may all call this.

    Raises:
        DataError: no documents, only empty ones, one that cannot be read or is not UTF-8 text, or a cache that cannot
            be written.
    """
    documents = find_documents(sources, seed)
    key = hashlib.sha256(f"{FORMAT_VERSION}".encode())
    for document in documents:
        try:
            status = document.stat()
        except OSError as error:
            raise _unreadable(document, error) from error
        key.update(os.fsencode(document) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    try:
        path = Path(cache_dir).expanduser() / f"tokens-{key.hexdigest()[:20]}.bin"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(documents, path)
        return _open(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        raise DataError(
            "cache_dir",
            expected="a folder for token files with room in it",
            got=str(error),
            remedy="Pass another cache_dir.",
        ) from error


def _files(source: str) -> tuple[Path, list[Path]]:
    """The files of one source, and the folder that their names are taken relative to."""
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not STDLIB_SKIPPED & {*f.relative_to(root).parts}]
        return root, [f for f in files if _is_text_file(f)]
    path = Path(os.path.expanduser(source)).absolute()  # pathlib's own raises for a user that is not known
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        visible = (f for f in path.rglob("*") if not any(p.startswith(".") for p in f.relative_to(path).parts))
        return path, [f for f in visible if f.is_file()]
    return Path("/"), [f for name in glob.glob(str(path), recursive=True) if (f := Path(name)).is_file()]


def _is_text_file(path: Path) -> bool:
    """False also for folders, links to nothing and files of others, which installations of Python may contain."""
    try:
        return _is_text(path.read_bytes())
    except OSError:
        return False


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _tokens(document: Path) -> npt.NDArray[np.uint16]:
    """Bytes and END_OF_DOCUMENT; nothing for an empty document."""
    try:
        content = document.read_bytes()
    except OSError as error:
        raise _unreadable(document, error) from error
    if not content:
        return np.empty(0, np.uint16)
    if not _is_text(content):
        raise DataError(
            "corpus",
            expected="UTF-8 text",
            got=f"{document}, which is not",
            remedy='Leave it out, for instance with a glob: "folder/**/*.txt".',
        )
    return np.append(np.frombuffer(content, np.uint8), np.uint16(END_OF_DOCUMENT)).astype("<u2")


def _unreadable(document: Path, error: OSError) -> DataError:
    return DataError(
        "corpus",
        expected="files that can be read",
        got=f"{document}: {error.strerror}",
        remedy="Leave it out, or look at its rights.",
    )


def _write(documents: list[Path], path: Path) -> None:
    """Writes the token file under a temporary name and renames it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tokens-") as folder:
        body, digest, offsets, end = Path(folder) / "body", hashlib.sha256(), [], 0
        with body.open("wb") as stream:
            for document in documents:
                tokens = _tokens(document)
                if len(tokens):
                    offsets.append(end)
                    end += len(tokens)
                    digest.update(tokens.tobytes())
                    stream.write(tokens.tobytes())
        if not end:
            raise DataError(
                "corpus",
                expected="text",
                got=f"{len(documents)} file(s), all of them empty",
                remedy="Name files with text in them.",
            )
        header = json.dumps(asdict(CorpusHeader(end, tuple(offsets), digest.hexdigest()))).encode()
        whole = Path(folder) / "whole"
        with whole.open("wb") as stream, body.open("rb") as tokens_written:
            stream.write(MAGIC + len(header).to_bytes(8, "little") + header)
            stream.write(b"\0" * (-stream.tell() % ALIGNMENT))
            while block := tokens_written.read(1 << 20):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        whole.replace(path)


def _open(path: Path) -> Corpus:
    """Maps a token file.

    Raises:
        DataError: the file is not as `_write` left it.
    """
    with path.open("rb") as stream:
        try:
            if stream.read(len(MAGIC)) != MAGIC:
                raise ValueError("not a token file")
            fields = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            header = CorpusHeader(**(fields | {"offsets": tuple(fields["offsets"])}))
            start = -(-stream.tell() // ALIGNMENT) * ALIGNMENT
            if path.stat().st_size != start + 2 * header.num_tokens:
                raise ValueError("truncated")
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                "cache_dir", expected="a complete token file", got=f"{path}: {error}", remedy="Delete the file."
            ) from error
    return Corpus(path, header, np.memmap(path, header.dtype, "r", start, (header.num_tokens,)))


class TokenSamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples `first` to `last` of a corpus, each `seqlen` inputs and their labels.

    Sample i holds tokens [i * seqlen, (i + 1) * seqlen] as {"input_ids", "labels"}, (seqlen,) int64 each, labels[p]
    being the token after input_ids[p]. A list of indices gives a batch (len(list), seqlen), in which index -1 is a
    row that counts for nothing: all its labels are -100.
    """

    def __init__(self, corpus: Corpus, seqlen: int, first: int, last: int) -> None:
        self.corpus, self.seqlen, self.first, self.last = corpus, seqlen, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int | list[int]) -> dict[str, Tensor]:
        if isinstance(index, list):
            rows = [self._row(i) for i in index]
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return self._row(index)

    def _row(self, index: int) -> dict[str, Tensor]:
        if index < 0:
            return {name: torch.full((self.seqlen,), value) for name, value in (("input_ids", 0), ("labels", -100))}
        if index >= len(self):
            raise IndexError(index)
        start = (self.first + index) * self.seqlen
        window = torch.from_numpy(self.corpus.tokens[start : start + self.seqlen + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


def num_samples(corpus: Corpus, seqlen: int, *, at_least: int = 1) -> int:
    """Samples of `seqlen` inputs that fit; neighbours share one token, the last label and the next first input.

    Raises:
        DataError: fewer than `at_least`.
        ConfigError: `seqlen` is not positive.
    """
    if seqlen < 1:
        raise ConfigError("context_length", expected="at least 1", got=seqlen, remedy="Try 4096.")
    total = (len(corpus) - 1) // seqlen
    if total < at_least:
        raise DataError(
            "corpus",
            expected=f"more than {at_least * seqlen} tokens: {at_least} sample(s) of the context length",
            got=f"{len(corpus)} tokens",
            remedy="Add text, or lower the context length.",
        )
    return total
