"""Token files: documents as ids, read from disk as they are used, in a folder of shards with a header.

    FOLDER/
      dataset.json            what is in it; written last, so a folder without one is not complete
      tokenizer/              that the ids are of
      tokens-00000.bin        a shard: a header of 4096 bytes, the ids, and where each document ends

A shard's header is JSON padded with blanks. Ids are little-endian uint16, or uint32 where the vocabulary is larger than
65536; each document that is not empty ends with the end-of-document id. Ends are int64, counted in the shard's ids, as
many as documents, and begin at a multiple of 8 bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringflash.errors import DataError
from ringflash.train.tokenizer import Tokenizer

DATASET = "dataset.json"
FORMAT_VERSION = 2
HEADER_BYTES = 4096
BLOCK = 1 << 20

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself.

    Args:
        key: digest of what it was made from and how; another key means other content.
        num_tokens: ids in it.
        num_documents: ends in it.
        digest: SHA-256 of all that follows the header.
        dtype: numpy's name of an id's type.
        vocab_size: of the tokenizer.
        end_of_document: the id that ends a document.
        tokenizer: digest of the tokenizer.
        version: of this format.
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

    @property
    def ends_at(self) -> int:
        """Byte of the file where the ends begin."""
        return -(-(HEADER_BYTES + self.num_tokens * np.dtype(self.dtype).itemsize) // 8) * 8

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.ends_at + 8 * self.num_documents


@dataclass(frozen=True)
class Header:
    """What a folder says about itself.

    Args:
        key: digest of what it was made from and how.
        shards: headers of its shards, in order.
        val_fraction: part of the tokens that those who train on it are to hold out; None leaves that to them.
        version: of this format.
    """

    key: str
    shards: tuple[ShardHeader, ...]
    val_fraction: float | None
    version: int = FORMAT_VERSION

    @property
    def num_tokens(self) -> int:
        """Ids in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Documents in all shards, empty ones included."""
        return sum(shard.num_documents for shard in self.shards)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the shards' digests: the same ids in the same documents of the same tokenizer."""
        facts = "\n".join(f"{shard.tokenizer} {shard.num_tokens} {shard.digest}" for shard in self.shards)
        return hashlib.sha256(facts.encode()).hexdigest()


def dtype_of(vocab_size: int) -> str:
    """numpy's name of the smallest type that holds all ids."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard lies."""
    return folder / f"tokens-{index:05d}.bin"


def write_shard(path: Path, documents: Iterable[tuple[Ids, bool]], key: str, tokenizer: Tokenizer) -> ShardHeader:
    """Writes a shard under a temporary name, and renames it when it is complete.

    Args:
        path: of the shard.
        documents: pieces of documents, and whether each is a document's last.
        key: see `ShardHeader`.
        tokenizer: whose ids they are.
    """
    dtype = dtype_of(tokenizer.vocab_size)
    partial, digest, ends = path.with_name(f".{path.name}.{os.getpid()}"), hashlib.sha256(), []
    try:
        with partial.open("wb") as stream:
            stream.write(b" " * HEADER_BYTES)

            def write(content: bytes) -> None:
                digest.update(content)
                stream.write(content)

            begin = end = 0
            for ids, last in documents:
                write(ids.astype(dtype).tobytes())
                end += len(ids)
                if last:
                    if end > begin:
                        write(np.array(tokenizer.end_of_document, dtype).tobytes())
                        end += 1
                    ends.append(end)
                    begin = end
            write(b"\0" * (-(HEADER_BYTES + end * np.dtype(dtype).itemsize) % 8))
            write(np.array(ends, "<i8").tobytes())
            vocabulary = tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.digest
            header = ShardHeader(key, end, len(ends), digest.hexdigest(), dtype, *vocabulary)
            stream.seek(0)
            stream.write(json.dumps(asdict(header)).encode())
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return header


def read_header(path: Path) -> ShardHeader:
    """The header of a shard whose file is as long as it should be.

    Raises:
        DataError: it is missing, truncated, or no shard.
    """
    try:
        with path.open("rb") as stream:
            header = ShardHeader(**json.loads(stream.read(HEADER_BYTES)))
            size = os.fstat(stream.fileno()).st_size
    except (OSError, ValueError, TypeError) as error:
        raise damaged(path, str(error)) from error
    if header.version != FORMAT_VERSION:
        raise damaged(path, f"of format {header.version}, not {FORMAT_VERSION}")
    if size != header.size:
        raise damaged(path, f"{size} bytes instead of {header.size}")
    return header


def verify_shard(path: Path, header: ShardHeader) -> bool:
    """Whether what follows the header has its digest."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(HEADER_BYTES)
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest() == header.digest


def write_dataset(folder: Path, header: Header) -> None:
    """Completes a folder."""
    partial = folder / f".{DATASET}.{os.getpid()}"
    partial.write_text(json.dumps(asdict(header), indent=1))
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(folder / DATASET)


def damaged(path: Path, what: str) -> DataError:
    """The error of token files that are not as they were written."""
    return DataError(
        "corpus",
        expected="complete token files",
        got=f"{path}: {what}",
        remedy="Run `ringflash prepare` again: it makes anew what is not as it was.",
    )


class TokenFiles:
    """The documents of a prepared folder; ids are read as they are asked for.

    Raises:
        DataError: the folder is incomplete, empty, or not as it was prepared.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / DATASET
        try:
            fields: dict[str, Any] = json.loads(file.read_text())
            if fields["version"] != FORMAT_VERSION:
                raise ValueError(f"of format {fields['version']}, not {FORMAT_VERSION}")
            shards = tuple(ShardHeader(**shard) for shard in fields.pop("shards"))
            self.header = Header(shards=shards, **fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise damaged(file, str(error)) from error
        if not self.header.num_tokens:
            raise damaged(file, "no tokens")
        lengths, starts = [], []
        for index, shard in enumerate(self.header.shards):
            path = shard_path(folder, index)
            if read_header(path) != shard:
                raise damaged(path, "a file of another preparation")
            ends = np.fromfile(path, "<i8", offset=shard.ends_at)
            starts.append(np.concatenate([np.zeros(1, np.int64), ends])[:-1])
            lengths.append(ends - starts[-1])
            if (lengths[-1] < 0).any() or (len(ends) and ends[-1] != shard.num_tokens):
                raise damaged(path, "ends of documents that do not fit its tokens")
        self.lengths: npt.NDArray[np.int64] = np.concatenate(lengths)  # of each document
        self._starts: npt.NDArray[np.int64] = np.concatenate(starts)  # of each in its shard
        self._first = np.cumsum([0, *(shard.num_documents for shard in self.header.shards)])  # document of each shard
        self._maps: dict[int, Ids] = {}

    def __len__(self) -> int:
        return self.header.num_tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That the ids are of.

        Raises:
            DataError: another lies in its place, or none.
        """
        tokenizer = Tokenizer.load(self.folder / "tokenizer")
        if tokenizer.digest != self.header.shards[0].tokenizer:
            raise damaged(self.folder / "tokenizer", "not the tokenizer that made the tokens")
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids lie below it."""
        return self.header.shards[0].vocab_size

    def read(self, document: int, begin: int, end: int) -> Ids:
        """Ids [begin, end) of a document, counted from its first.

        Raises:
            DataError: one of them is outside the vocabulary.
        """
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
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
