"""Token files: documents as ids, read from disk on demand, in a folder of shards with a header.

    FOLDER/
      dataset.json            headers of the folder; written last, so a folder without it is incomplete
      tokenizer/              tokenizer of the ids
      tokens-00000.bin        a shard: a header of 4096 bytes, the ids, the end of each document, and the learnt ids

A shard's header is JSON padded with blanks. Ids are little-endian uint16, or uint32 if the vocabulary is larger than
65536. A document of text that is not empty ends with the end-of-document id, and begins with the begin-of-document id
if its tokenizer has one. A shard holds one int64 end a document, counted in the shard's ids: the index of documents,
which is read on demand too. The ends begin at a multiple of 8 bytes. Shards of conversations also hold one bit an id,
in numpy's order of packed bits: 1 if training learns the id, 0 if it is context only.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringflash.errors import CorpusError
from ringflash.train.data.tokenizer import Tokenizer

DATASET = "dataset.json"
FORMAT_VERSION = 2
HEADER_BYTES = 4096
BLOCK = 1 << 20
MAPS = 256  # shards mapped at once; each holds a file open, and many systems allow a process 1024 files
MAX_VOCAB_SIZE = 1 << 32  # uint32 holds all its ids

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Learnt = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.int64]
Piece = tuple[Ids, bool, Learnt | None]  # ids, whether their document ends with them, and which of them are learnt


@dataclass(frozen=True)
class ShardHeader:
    """Header of a shard.

    Args:
        key: digest of the shard's sources and recipe; another key means other content.
        num_tokens: number of ids in the shard.
        num_documents: number of document ends in the shard.
        digest: SHA-256 of everything after the header.
        dtype: numpy's name of the ids' type.
        vocab_size: vocabulary size of the tokenizer.
        end_of_document: the id that ends a document.
        tokenizer: digest of the tokenizer.
        version: version of this format.
        num_learnt: number of ids that training learns; None if the shard has no bits, because all are learnt. It is
            then left out of the file.
    """

    key: str
    num_tokens: int
    num_documents: int
    digest: str
    dtype: str
    vocab_size: int
    end_of_document: int
    tokenizer: str
    version: int = FORMAT_VERSION
    num_learnt: int | None = None

    @property
    def ends_at(self) -> int:
        """Offset in bytes of the document ends in the file."""
        return -(-(HEADER_BYTES + self.num_tokens * np.dtype(self.dtype).itemsize) // 8) * 8

    @property
    def bits_at(self) -> int:
        """Offset in bytes of the bits of learnt ids in the file."""
        return self.ends_at + 8 * self.num_documents

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.bits_at + (0 if self.num_learnt is None else -(-self.num_tokens // 8))

    def written(self) -> dict[str, Any]:
        """Returns the fields as the file holds them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Header:
    """Header of a folder.

    Args:
        key: digest of the folder's sources and recipe.
        shards: headers of its shards, in order.
        val_fraction: fraction of the tokens to hold out in training; None leaves the choice to training.
        version: version of this format.
        has_pairs: whether documents 2i and 2i + 1 are the chosen and the rejected answer to one prompt. False is left
            out of the file.
    """

    key: str
    shards: tuple[ShardHeader, ...]
    val_fraction: float | None
    version: int = FORMAT_VERSION
    has_pairs: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of ids in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_learnt(self) -> int | None:
        """Number of ids in all shards that training learns; None if no shard says which it learns."""
        learnt = [shard.num_learnt for shard in self.shards if shard.num_learnt is not None]
        return sum(learnt) if learnt else None

    @property
    def num_documents(self) -> int:
        """Number of documents in all shards, including empty ones."""
        return sum(shard.num_documents for shard in self.shards)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the shards' digests; equal for the same ids in the same documents of the same tokenizer."""
        facts = "\n".join(f"{shard.tokenizer} {shard.num_tokens} {shard.digest}" for shard in self.shards)
        return hashlib.sha256(facts.encode()).hexdigest()


def dtype_of(vocab_size: int) -> str:
    """Returns numpy's name of the smallest type that holds all ids."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def shard_path(folder: Path, index: int) -> Path:
    """Returns the path of a shard."""
    return folder / f"tokens-{index:05d}.bin"


def write_shard(
    path: Path, documents: Iterable[Piece], key: str, tokenizer: Tokenizer, with_bits: bool = False
) -> ShardHeader:
    """Writes a shard under a temporary name, and renames it when it is complete.

    Args:
        path: path of the shard.
        documents: pieces of documents. The ids that begin and end a document are added to documents of text only: a
            chat template begins and ends a conversation itself.
        key: see `ShardHeader`.
        tokenizer: tokenizer of the ids.
        with_bits: whether the pieces say which ids are learnt.
    """
    dtype = np.dtype(dtype_of(tokenizer.vocab_size))
    temporary, digest, ends = path.with_name(f".{path.name}.{os.getpid()}"), hashlib.sha256(), array("q")
    opening = [] if with_bits or tokenizer.begin_of_document is None else [tokenizer.begin_of_document]
    closing = [] if with_bits else [tokenizer.end_of_document]
    bits, waiting, num_learnt = bytearray(), np.zeros(0, bool), 0  # `waiting` has less than 8 bits
    try:
        with temporary.open("wb") as stream:
            stream.write(b" " * HEADER_BYTES)

            def write(content: bytes) -> None:
                digest.update(content)
                stream.write(content)

            begin = end = 0
            for ids, last, learnt in documents:
                for part in (opening if end == begin and len(ids) else [], ids):
                    write(np.asarray(part, dtype).tobytes())
                    end += len(part)
                if learnt is not None:
                    waiting = np.concatenate([waiting, learnt])
                    whole = len(waiting) // 8 * 8
                    bits += np.packbits(waiting[:whole]).tobytes()
                    waiting, num_learnt = waiting[whole:], num_learnt + int(learnt.sum())
                if last:
                    if end > begin:
                        write(np.asarray(closing, dtype).tobytes())
                        end += len(closing)
                    ends.append(end)
                    begin = end
            write(b"\0" * (-(HEADER_BYTES + end * dtype.itemsize) % 8))
            write(np.array(ends, "<i8").tobytes())
            write(bytes(bits) + np.packbits(waiting).tobytes())
            vocabulary = tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.digest
            learnt = num_learnt if with_bits else None
            header = ShardHeader(key, end, len(ends), digest.hexdigest(), dtype_of(vocabulary[0]), *vocabulary)
            header = replace(header, num_learnt=learnt)
            stream.seek(0)
            stream.write(json.dumps(header.written()).encode())
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return header


def parse_shard_header(content: object, path: Path) -> ShardHeader:
    """Checks a shard's header from an untrusted file: a wrong dtype would turn bytes into object pointers.

    Args:
        content: the parsed JSON.
        path: path of the header's file.

    Raises:
        CorpusError: a field is missing or unknown, or has a value that no preparation writes.
    """
    content = _fields_of(ShardHeader, content, path, "header: ", optional=("num_learnt",))
    for name in ("key", "digest", "dtype", "tokenizer"):
        if not isinstance(content[name], str):
            raise damaged(path, f"{name}: expected text, got {_short(content[name])}")
    for name in ("num_tokens", "num_documents", "vocab_size", "end_of_document", "version", "num_learnt"):
        if name in content and (type(content[name]) is not int or content[name] < 0):
            raise damaged(path, f"{name}: expected a whole number of at least 0, got {_short(content[name])}")
    header = ShardHeader(**content)
    if header.vocab_size > MAX_VOCAB_SIZE:
        raise damaged(path, f"vocab_size: expected at most {MAX_VOCAB_SIZE}, got {_short(header.vocab_size)}")
    if header.end_of_document >= header.vocab_size:
        expected = f"an id below vocab_size={header.vocab_size}"
        raise damaged(path, f"end_of_document: expected {expected}, got {_short(header.end_of_document)}")
    if header.num_learnt is not None and header.num_learnt > header.num_tokens:
        raise damaged(path, f"num_learnt: expected at most {header.num_tokens}, got {_short(header.num_learnt)}")
    if header.dtype != (dtype := dtype_of(header.vocab_size)):
        expected = f"{dtype!r} for a vocabulary of {header.vocab_size}"
        raise damaged(path, f"dtype: expected {expected}, got {_short(header.dtype)}")
    return header


def read_header(path: Path) -> ShardHeader:
    """Reads and checks the header of a shard, and compares it with the size of the file.

    Raises:
        CorpusError: the file is missing, truncated, or no shard.
    """
    try:
        with path.open("rb") as stream:
            content = json.loads(stream.read(HEADER_BYTES))
            size = os.fstat(stream.fileno()).st_size
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    header = parse_shard_header(content, path)
    if size != header.size:
        raise damaged(path, f"{size} bytes instead of {header.size}")
    return header


def verify_shard(path: Path, header: ShardHeader) -> bool:
    """Returns whether the content after the header has the digest of the header."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(HEADER_BYTES)
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest() == header.digest


def write_dataset(folder: Path, header: Header) -> None:
    """Writes the header that completes a folder."""
    temporary = folder / f".{DATASET}.{os.getpid()}"
    content = asdict(header) | {"shards": [shard.written() for shard in header.shards]}
    if not header.has_pairs:
        del content["has_pairs"]
    temporary.write_text(json.dumps(content, indent=1))
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(folder / DATASET)


def read_dataset(file: Path) -> Header:
    """Reads and checks the header of a folder.

    Raises:
        CorpusError: it is missing or unreadable, or has a value that no preparation writes.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from error
    content = _fields_of(Header, content, file, optional=("has_pairs",))
    key, fraction, shards = content["key"], content["val_fraction"], content["shards"]
    if not isinstance(key, str):
        raise damaged(file, f"key: expected text, got {_short(key)}")
    # Checks `type`, because bool is an int. The comparison is false for NaN.
    if fraction is not None and not (type(fraction) in (int, float) and 0 <= fraction < 1):
        raise damaged(file, f"val_fraction: expected null or a number in [0, 1), got {_short(fraction)}")
    if not isinstance(shards, list):
        raise damaged(file, f"shards: expected a list, got {_short(shards)}")
    has_pairs = content.get("has_pairs", False)
    if type(has_pairs) is not bool:
        raise damaged(file, f"has_pairs: expected true or false, got {_short(has_pairs)}")
    header = Header(key, tuple(parse_shard_header(shard, file) for shard in shards), fraction, has_pairs=has_pairs)
    if has_pairs and (header.num_learnt is None or any(shard.num_documents % 2 for shard in header.shards)):
        raise damaged(file, "has_pairs: expected an even number of documents in each shard, and learnt ids")
    return header


def _fields_of(
    kind: type[Header | ShardHeader], content: object, path: Path, where: str = "", optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the parsed `content` if it is an object of this format with the fields of `kind`.

    Raises:
        CorpusError: it is anything else; the message begins with `where`.
    """
    if not isinstance(content, dict):
        raise damaged(path, f"{where}expected an object, got {_short(content)}")
    if content.get("version") != FORMAT_VERSION:
        raise damaged(path, f"of format {_short(content.get('version'))}, not {FORMAT_VERSION}")
    if odd := sorted({field.name for field in fields(kind)} ^ {*optional, *content}):
        raise damaged(path, f"{where}fields that are missing or unknown: {_short(', '.join(odd))}")
    return content


def _short(value: object) -> str:
    """Returns at most 80 characters of a value that may have millions."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    text = "a huge number" if isinstance(value, int) and abs(value) >= 1 << 200 else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def damaged(path: Path, what: str) -> CorpusError:
    """Makes the error for token files that differ from the written ones."""
    return CorpusError(
        "corpus",
        expected="complete token files",
        got=f"{path}: {what}",
        remedy="Run `ringflash prepare` again: it makes anew what is not as it was.",
    )


class TokenFiles:
    """Documents of a prepared folder; ids are read on demand.

    Raises:
        CorpusError: the folder is incomplete, empty, or differs from its preparation.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / DATASET
        self.header = read_dataset(file)
        if not self.header.num_tokens:
            raise damaged(file, "no tokens")
        for index, shard in enumerate(self.header.shards):
            path = shard_path(folder, index)
            if read_header(path) != shard:
                raise damaged(path, "a file of another preparation")
            if (shard.num_learnt is None) != (self.header.num_learnt is None):
                raise damaged(path, "num_learnt: expected it in all shards or in none")
            last = 0
            for begin in range(0, shard.num_documents, BLOCK):
                ends = _read_ends(path, shard, begin, min(begin + BLOCK, shard.num_documents))
                # Compares neighbours instead of subtracting them: a difference of 64-bit numbers may overflow.
                if ends[0] < last or (ends[1:] < ends[:-1]).any():
                    last = -1
                    break
                last = int(ends[-1])
            if last != shard.num_tokens:
                raise damaged(path, "ends of documents that do not fit its tokens")
        # First document of each shard.
        self._first = np.cumsum([0, *(shard.num_documents for shard in self.header.shards)])
        self._map = lru_cache(MAPS)(partial(_map_shard, folder, self.header))

    def __len__(self) -> int:
        return self.header.num_tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the ids.

        Raises:
            CorpusError: the folder holds another tokenizer, or none.
        """
        tokenizer = Tokenizer.load(self.folder / "tokenizer")
        if tokenizer.digest != self.header.shards[0].tokenizer:
            raise damaged(self.folder / "tokenizer", "not the tokenizer that made the tokens")
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; all ids are below it."""
        return self.header.shards[0].vocab_size

    def read(self, document: int, begin: int, end: int) -> Ids:
        """Returns the ids [begin, end) of a document, counted from its first id.

        Raises:
            CorpusError: one of them is outside the vocabulary.
        """
        shard, start = self._locate(document)
        ids = self._map(shard).ids[start + begin : start + end]
        if len(ids) and int(ids.max()) >= self.vocab_size:
            what = f"token id {int(ids.max())}, which is outside its vocabulary of {self.vocab_size}"
            raise damaged(shard_path(self.folder, shard), what)
        return ids

    def learnt(self, document: int, begin: int, end: int) -> Learnt | None:
        """Returns which of the ids [begin, end) of a document training learns; None if all documents are learnt."""
        if self.header.num_learnt is None:
            return None
        shard, start = self._locate(document)
        first = start + begin
        bits = self._map(shard).bits[first // 8 : -(-(first + end - begin) // 8)]
        return np.unpackbits(bits)[first % 8 :][: end - begin].astype(bool)

    def lengths(self, begin: int = 0, end: int | None = None) -> Vector:
        """Returns the lengths of the documents [begin, end), read from the files one after another."""
        end, parts = self.header.num_documents if end is None else end, [np.zeros(0, np.int64)]
        for shard in range(self._shard_of(begin), len(self.header.shards)):
            first, after = self._first[shard : shard + 2].tolist()
            if first >= end:
                break
            inside = max(begin - first, 0), min(end, after) - first
            if inside[0] < inside[1]:
                one_more = max(inside[0] - 1, 0), inside[1]
                ends = _read_ends(shard_path(self.folder, shard), self.header.shards[shard], *one_more)
                parts.append(np.diff(ends) if inside[0] else np.diff(ends, prepend=0))
        return np.concatenate(parts)

    def lengths_of(self, documents: Vector) -> Vector:
        """Returns the lengths of any documents, from the mapped index."""
        shards = np.searchsorted(self._first, documents, side="right") - 1
        lengths = np.empty(len(documents), np.int64)
        by_shard = np.argsort(shards, kind="stable")
        for these in np.split(by_shard, np.flatnonzero(np.diff(shards[by_shard])) + 1):
            if len(these):
                shard = int(shards[these[0]])
                local, ends = documents[these] - self._first[shard], self._map(shard).ends
                lengths[these] = ends[local] - np.where(local > 0, ends[local - 1], 0)
        return lengths

    def _locate(self, document: int) -> tuple[int, int]:
        """Returns the shard of a document, and its start there."""
        shard = self._shard_of(document)
        local = document - int(self._first[shard])
        return shard, int(self._map(shard).ends[local - 1]) if local else 0

    def _shard_of(self, document: int) -> int:
        return int(np.searchsorted(self._first, document, side="right")) - 1


@dataclass(frozen=True)
class _Map:
    """Parts of a mapped shard: its ids, the ends of its documents, and the bits of its learnt ids."""

    ids: Ids
    ends: Vector
    bits: npt.NDArray[np.uint8]


def _map_shard(folder: Path, header: Header, index: int) -> _Map:
    shard = header.shards[index]
    with shard_path(folder, index).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Documents are looked up in random order, and reading ahead would read many times the index.
    page = shard.ends_at // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_RANDOM, page, shard.size - page)
    content = np.frombuffer(mapped, np.uint8)
    ids = content[HEADER_BYTES:][: shard.num_tokens * np.dtype(shard.dtype).itemsize].view(shard.dtype)
    return _Map(ids, content[shard.ends_at : shard.bits_at].view("<i8"), content[shard.bits_at :])


def _read_ends(path: Path, shard: ShardHeader, begin: int, end: int) -> Vector:
    """Reads the ends of documents [begin, end) of a shard; a mapped file would count as memory of the process."""
    return np.fromfile(path, "<i8", end - begin, offset=shard.ends_at + 8 * begin)
