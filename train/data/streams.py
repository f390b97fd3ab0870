"""Byte streams of plain, gzip and Zstandard files, and lines of at most a given length."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from ringflash.errors import DataError

COMPRESSED = (".gz", ".zst")
BLOCK = 1 << 20
ZSTD_BLOCK = 1 << 12  # a block of a few bytes can expand to 128 KiB, so that more would not bound the memory


def is_compressed(path: str) -> bool:
    """Returns whether a file is read through a decompressor, by its suffix."""
    return path.lower().endswith(COMPRESSED)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Opens a file as a stream of bytes, decompressed if its suffix says so.

    Raises:
        DataError: a compressed file is damaged or truncated, or the library `zstandard` is missing.
        OSError: the file cannot be opened or read.
    """
    suffix = Path(path).suffix.lower()
    damaged: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
    if suffix == ".zst":
        zstandard = _zstandard(path)
        damaged += (zstandard.ZstdError,)
    try:
        with open(path, "rb") as file:
            if suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as stream:
                    yield cast(BinaryIO, stream)
            elif suffix == ".zst":
                with io.BufferedReader(_ZstdStream(file, _zstandard(path)), BLOCK) as stream:
                    yield stream
            else:
                yield file
    except damaged as error:
        remedy = "Download or compress it again, or leave it out."
        expected = f"a complete {suffix} file"
        raise DataError("corpus", expected=expected, got=f"{path}: {error}", remedy=remedy) from error


def read_lines(stream: BinaryIO, place: int, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields the place of the first byte of each line, and the line, or None if it has more than `limit` bytes.

    A longer line is read over in blocks, so that memory does not grow with its length.

    Args:
        stream: stream at `place`.
        place: byte at which the first line starts.
        limit: bytes of the longest line, without its newline.
    """
    while line := stream.readline(limit + 1):
        size = len(line)
        if size > limit and not line.endswith(b"\n"):
            yield place, None
            size += skip_line(stream)
        else:
            yield place, line
        place += size


def skip_line(stream: BinaryIO) -> int:
    """Reads to the start of the next line, and returns the number of bytes read."""
    size = 0
    while block := stream.readline(BLOCK):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


class _ZstdStream(io.RawIOBase):
    """Bytes of all frames of a Zstandard file; the library's own stream ends silently where a file is truncated."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file, self._library = file, zstandard
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer in part or whole, and returns the number of bytes; 0 at the end of the file."""
        while not self._output:
            self._input = self._input or self._file.read(ZSTD_BLOCK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._output, self._input = memoryview(self._frame.decompress(self._input)), b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size


def _zstandard(path: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        expected, remedy = (
            f"the library `zstandard`, to read {path}",
            "Install ringflash[data], or decompress the file.",
        )
        raise DataError("corpus", expected=expected, got="none", remedy=remedy) from error
