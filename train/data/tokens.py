"""Token files: documents as ids, read from disk on demand, in a folder of shards with a header.

    FOLDER/
      dataset.json            headers of the folder; written last, so a folder without it is incomplete
      tokenizer/              tokenizer of the ids
      tokens-00000.bin        a shard: a header of 4096 bytes, the ids, the end of each document, and the learnt ids

A shard's header is JSON padded with blanks. Ids are little-endian uint16, or uint32 if the vocabulary is larger than
65536. A document of text that is not empty ends with the end-of-document id. A shard holds one int64 end a document,
counted in the shard's ids. The ends begin at a multiple of 8 bytes. Shards of conversations also hold one bit an id, in
numpy's order of packed bits: 1 if training learns the id, 0 if it is context only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
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
    """

    key: str
    shards: tuple[ShardHeader, ...]
    val_fraction: float | None
    version: int = FORMAT_VERSION

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
        documents: pieces of documents. The end-of-document id is added to documents of text only: a chat template ends
            a conversation itself.
        key: see `ShardHeader`.
        tokenizer: tokenizer of the ids.
        with_bits: whether the pieces say which ids are learnt.
    """
    dtype = dtype_of(tokenizer.vocab_size)
    partial, digest, ends = path.with_name(f".{path.name}.{os.getpid()}"), hashlib.sha256(), []
    bits = [np.zeros(0, bool)]
    try:
        with partial.open("wb") as stream:
            stream.write(b" " * HEADER_BYTES)

            def write(content: bytes) -> None:
                digest.update(content)
                stream.write(content)

            begin = end = 0
            for ids, last, learnt in documents:
                write(ids.astype(dtype).tobytes())
                end += len(ids)
                if learnt is not None:
                    bits.append(learnt)
                if last:
                    if end > begin and not with_bits:
                        write(np.array(tokenizer.end_of_document, dtype).tobytes())
                        end += 1
                    ends.append(end)
                    begin = end
            write(b"\0" * (-(HEADER_BYTES + end * np.dtype(dtype).itemsize) % 8))
            write(np.array(ends, "<i8").tobytes())
            learnt = np.concatenate(bits)
            write(np.packbits(learnt).tobytes())
            num_learnt = int(learnt.sum()) if with_bits else None
            vocabulary = tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.digest
            header = ShardHeader(key, end, len(ends), digest.hexdigest(), dtype, *vocabulary, num_learnt=num_learnt)
            stream.seek(0)
            stream.write(json.dumps(header.written()).encode())
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
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
    partial = folder / f".{DATASET}.{os.getpid()}"
    content = asdict(header) | {"shards": [shard.written() for shard in header.shards]}
    partial.write_text(json.dumps(content, indent=1))
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(folder / DATASET)


def read_dataset(file: Path) -> Header:
    """Reads and checks the header of a folder.

    Raises:
        CorpusError: it is missing or unreadable, or has a value that no preparation writes.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from error
    content = _fields_of(Header, content, file)
    key, fraction, shards = content["key"], content["val_fraction"], content["shards"]
    if not isinstance(key, str):
        raise damaged(file, f"key: expected text, got {_short(key)}")
    # Checks `type`, because bool is an int. The comparison is false for NaN.
    if fraction is not None and not (type(fraction) in (int, float) and 0 <= fraction < 1):
        raise damaged(file, f"val_fraction: expected null or a number in [0, 1), got {_short(fraction)}")
    if not isinstance(shards, list):
        raise damaged(file, f"shards: expected a list, got {_short(shards)}")
    return Header(key, tuple(parse_shard_header(shard, file) for shard in shards), fraction)


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
        lengths, starts = [], []
        for index, shard in enumerate(self.header.shards):
            path = shard_path(folder, index)
            if read_header(path) != shard:
                raise damaged(path, "a file of another preparation")
            if (shard.num_learnt is None) != (self.header.num_learnt is None):
                raise damaged(path, "num_learnt: expected it in all shards or in none")
            ends = np.fromfile(path, "<i8", shard.num_documents, offset=shard.ends_at)
            bounds = np.concatenate([np.zeros(1, np.int64), ends])
            # Compares neighbours instead of subtracting them, because a difference of 64-bit numbers may overflow.
            if (bounds[1:] < bounds[:-1]).any() or bounds[-1] != shard.num_tokens:
                raise damaged(path, "ends of documents that do not fit its tokens")
            starts.append(bounds[:-1])
            lengths.append(np.diff(bounds))
        self.lengths: npt.NDArray[np.int64] = np.concatenate(lengths)  # length of each document
        self._starts: npt.NDArray[np.int64] = np.concatenate(starts)  # start of each document in its shard
        # First document of each shard.
        self._first = np.cumsum([0, *(shard.num_documents for shard in self.header.shards)])
        self._maps: dict[int, Ids] = {}
        self._bits: dict[int, npt.NDArray[np.uint8]] = {}

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
        shard = self._shard_of(document)
        if shard not in self._maps:
            header = self.header.shards[shard]
            shape = (header.num_tokens,)
            self._maps[shard] = np.memmap(shard_path(self.folder, shard), header.dtype, "r", HEADER_BYTES, shape)
        start = self._starts[document]
        ids = self._maps[shard][start + begin : start + end]
        if len(ids) and int(ids.max()) >= self.vocab_size:
            what = f"token id {int(ids.max())}, which is outside its vocabulary of {self.vocab_size}"
            raise damaged(shard_path(self.folder, shard), what)
        return ids

    def learnt(self, document: int, begin: int, end: int) -> Learnt | None:
        """Returns which of the ids [begin, end) of a document training learns; None if all documents are learnt."""
        if self.header.num_learnt is None:
            return None
        first = int(self._starts[document]) + begin
        bits = self._bits_of(self._shard_of(document))[first // 8 : -(-(first + end - begin) // 8)]
        return np.unpackbits(bits)[first % 8 :][: end - begin].astype(bool)

    def learnt_runs(self) -> tuple[Vector, Vector, Vector]:
        """Returns the document, begin and end of each run of learnt ids, counted from the document's first id.

        First ids of documents count as not learnt, because no id before them predicts them.
        """
        runs = [np.zeros((3, 0), np.int64)]
        for shard, header in enumerate(self.header.shards):
            documents = slice(*self._first[shard : shard + 2])
            starts = self._starts[documents]
            bits = np.unpackbits(self._bits_of(shard), count=header.num_tokens)
            bits[starts[self.lengths[documents] > 0]] = 0
            edges = np.flatnonzero(np.diff(bits, prepend=0, append=0))
            # Several documents may start at one place; the last of them is not empty, and the others are.
            inside = np.searchsorted(starts, edges[::2], side="right") - 1
            runs.append(np.stack([inside + documents.start, edges[::2] - starts[inside], edges[1::2] - starts[inside]]))
        document, begin, end = np.concatenate(runs, axis=1)
        return document, begin, end

    def _shard_of(self, document: int) -> int:
        return int(np.searchsorted(self._first, document, side="right")) - 1

    def _bits_of(self, shard: int) -> npt.NDArray[np.uint8]:
        if shard not in self._bits:
            header, path = self.header.shards[shard], shard_path(self.folder, shard)
            shape = (-(-header.num_tokens // 8),)
            # An empty file cannot be mapped.
            self._bits[shard] = np.memmap(path, np.uint8, "r", header.bits_at, shape) if shape[0] else np.zeros(0, "u1")
        return self._bits[shard]
