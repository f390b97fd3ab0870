"""Compressed files and lines of bounded length."""

from __future__ import annotations

import gzip
import io
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringflash.errors import DataError
from ringflash.train.data.sources import PIECE, divide, find_sources, read
from ringflash.train.data.streams import opened, read_lines
from tests.train.data.corpora import documents, prepared, write_lines
from tests.train.data.test_sources import texts

TEXTS = [f"the ring turns {i} times" for i in range(3000)]


def compress(path: Path, suffix: str, content: bytes | None = None) -> Path:
    """Writes a compressed copy of a file, in two frames, and returns its path."""
    content = path.read_bytes() if content is None else content
    if suffix == ".gz":
        pack: Any = gzip.compress
    else:
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
    copy = path.with_name(path.name + suffix)
    copy.write_bytes(pack(content[:1000]) + pack(content[1000:]))
    return copy


@given(lines=st.lists(st.integers(0, 30), max_size=12), limit=st.integers(1, 30), ends=st.booleans())
def test_lines_longer_than_the_limit_have_no_content(lines: list[int], limit: int, ends: bool) -> None:
    content = b"\n".join(b"x" * length for length in lines) + b"\n" * ends
    found = [*read_lines(io.BytesIO(content), 7, limit)]
    whole = content.splitlines(keepends=True)
    assert [place - 7 for place, _ in found] == [sum(map(len, whole[:i])) for i in range(len(whole))]
    assert [line for _, line in found] == [line if len(line.rstrip(b"\n")) <= limit else None for line in whole]


def test_a_long_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    with (tmp_path / "long.jsonl").open("wb") as stream:
        for _ in range(60):
            stream.write(b"x" * PIECE)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"at most 1000 bytes, got more in .*long.jsonl, line 1, byte 0. Raise"):
            next(read(divide(find_sources(str(tmp_path)), 10**9)[0][0], "text", 1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * PIECE


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_give_the_same_documents(tmp_path: Path, suffix: str) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", TEXTS)
    text = tmp_path / "text.txt"
    text.write_text("é\r\n" * PIECE)
    for plain in (lines, text):
        (group,) = texts(compress(plain, suffix), 10**4)  # one part, because nothing can read the middle
        assert group == [document for group in texts(plain, 10**4) for document in group]
    assert texts(compress(lines, suffix, b""), 10) in ([], [[]])
    bad = compress(lines, suffix, lines.read_bytes() + b"{\n")
    with pytest.raises(DataError, match=r"in .*lines.jsonl.*, line 3001, byte \d+. Correct"):
        texts(bad, 10)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("case", ["truncated", "damaged", "other"])
def test_damaged_compressed_files_are_refused(tmp_path: Path, suffix: str, case: str) -> None:
    whole = compress(write_lines(tmp_path / "lines.jsonl", TEXTS), suffix)
    content = whole.read_bytes()
    changed = {"truncated": content[:-20], "damaged": content[:200] + b"\xff" * 99 + content[299:], "other": b"text\n"}
    whole.write_bytes(changed[case])
    with pytest.raises(DataError, match=rf"corpus: expected a complete {suffix} file, got .*lines.jsonl{suffix}: "):
        texts(whole, 10)


def test_a_missing_zstandard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.jsonl.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    expected = r"the library `zstandard`, to read .*lines.jsonl.zst, got none. Install ringflash\[data\]"
    with pytest.raises(DataError, match=expected), opened(str(tmp_path / "lines.jsonl.zst")):
        pass


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_give_the_same_ids(tmp_path: Path, suffix: str) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", TEXTS)
    packed = compress(lines, suffix)
    assert documents(prepared(tmp_path / "to", packed)) == documents(prepared(tmp_path / "plain", lines))
