"""Sources of documents: they are found, divided into parts and read."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringflash.errors import DataError
from ringflash.train.data.sources import PIECE, BadRow, Part, divide, find_sources, name_row, read
from tests.train.data.corpora import write, write_lines


def texts(source: Path | str, part_bytes: int, field: str = "text") -> list[list[str]]:
    """Returns the documents of each group of parts."""
    groups = []
    for group in divide(find_sources(str(source)), part_bytes):
        groups.append([""])
        for part in group:
            for piece, last in read(part, field):
                groups[-1][-1] += piece
                if last:
                    groups[-1].append("")
        assert groups[-1].pop() == ""
    return groups


def names(source: str | list[str]) -> list[str]:
    return [Path(s.path).name for s in find_sources(source)]


def test_globs_files_and_several_sources(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", a="a", b="b")
    (folder / "deep").mkdir()
    (folder / "deep" / "c.txt").write_text("c")
    (folder / ".hidden").write_text("h")
    (folder / "blob.bin").write_bytes(b"\0\1")
    assert set(names(f"{folder}/**/*.txt")) == {"a.txt", "b.txt", "c.txt"}
    assert names([str(folder / "a.txt"), f"{folder}/*.txt"]) == ["a.txt", "b.txt"]
    assert len(names(str(folder))) == 4


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    text = "\ufeffthe ring\r\n\ufeffturns"
    (tmp_path / "a.txt").write_bytes(text.encode())
    line = {"text": text[1:]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8-sig")
    assert texts(tmp_path / "a.txt", 100) == texts(tmp_path / "a.jsonl", 100) == [[text[1:]]]


def test_standard_library() -> None:
    sources = find_sources("stdlib")
    assert {"ast.py", "argparse.py"} <= {Path(s.path).name for s in sources}
    parts = {part for s in sources for part in Path(s.path).parts}
    assert not parts & {"site-packages", "test", "tests"}
    assert 5e6 < sum(s.size for s in sources) < 50e6


def test_standard_library_with_oddities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library"
    (library / "folder.py").mkdir(parents=True)
    (library / "dangling.py").symlink_to(tmp_path / "nowhere")
    (library / "module.py").write_text("pass\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    assert names("stdlib") == ["module.py"]


@pytest.mark.parametrize(("source", "message"), [("", "is empty"), (" ", "is empty"), ("x" * 300, "cannot be read")])
def test_sources_that_are_no_paths(tmp_path: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "text", a="a"))
    with pytest.raises(DataError, match=message):
        find_sources([source])
    with pytest.raises(DataError, match="at least one source"):
        find_sources([])


def test_text_files_are_grouped_by_size(tmp_path: Path) -> None:
    folder = write(tmp_path, a="a" * 10, b="b" * 10, c="", d="d" * 100, e="e\r\né")
    assert texts(folder, 25) == [["a" * 10, "b" * 10, ""], ["d" * 100], ["e\r\né"]]


@pytest.mark.parametrize(
    "text",
    ["line\n" * (PIECE // 2), "x" * (3 * PIECE + 1), "é" * PIECE],
    ids=["many lines", "one line", "two bytes a character"],
)
def test_a_long_text_comes_in_pieces(tmp_path: Path, text: str) -> None:
    (tmp_path / "long.txt").write_text(text)
    ((part,),) = divide(find_sources(str(tmp_path)), 10)
    *begin, (piece, last) = read(part, "text")
    assert last
    assert not any(is_last for _, is_last in begin)
    assert "".join(p for p, _ in begin) + piece == text
    assert all(p.endswith("\n") for p, _ in begin) or "\n" not in text


@pytest.mark.parametrize("part_bytes", [1, 7, 30, 31, 1000])
def test_lines_belong_to_the_part_in_which_they_begin(tmp_path: Path, part_bytes: int) -> None:
    expected = ["one", "", "thr\nee" * 20, "é", "five"]
    path = write_lines(tmp_path / "lines.jsonl", expected)
    path.write_text(path.read_text().replace("\n", "\n\n", 2).rstrip("\n"))
    groups = texts(path, part_bytes)
    assert [*chain(*groups)] == expected
    assert len(groups) == -(-path.stat().st_size // part_bytes)


def test_tables(tmp_path: Path) -> None:
    expected = [f"document {i}" for i in range(2500)]
    table = pa.table({"id": range(2500), "body": expected})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1200)
    groups = texts(tmp_path / "a.parquet", 1, "body")
    assert [len(group) for group in groups] == [1200, 1200, 100]
    assert [*chain(*groups)] == expected
    with pytest.raises(DataError, match="text_field: expected text in the field 'text' .*, of the fields body, id, in"):
        texts(tmp_path / "a.parquet", 1)
    pq.write_table(pa.table({"body": [*expected[:2000], None]}), tmp_path / "a.parquet", row_group_size=1200)
    with pytest.raises(DataError, match="got none, of the fields body, in .*a.parquet, row 2000. Name"):
        texts(tmp_path / "a.parquet", 1, "body")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="corpus: expected a Parquet file, got .*a.parquet"):
        texts(tmp_path / "a.parquet", 1)


class Rows:
    """A fake of a saved data set, with the methods that are used."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.column_names = texts, ["text"]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: slice) -> dict[str, list[str]]:
        return {"text": self.texts[rows]}


def test_saved_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text("{}" * 50)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="the library `datasets`, to read .*saved, got none. Install datasets"):
        texts(folder, 1)
    splits = {"train": Rows([f"t{i}" for i in range(20)]), "test": Rows(["e"])}
    loaded: Any = splits["train"]

    def joined(parts: list[Rows]) -> Rows:
        return Rows([text for part in parts for text in part.texts])

    library = SimpleNamespace(load_from_disk=lambda path: loaded, concatenate_datasets=joined)
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert [len(group) for group in texts(folder, 40)] == [8, 8, 4]
    loaded = splits
    assert [*chain(*texts(folder, 40))] == ["e", *splits["train"].texts]
    with pytest.raises(DataError, match="of the fields text, in"):
        texts(folder, 40, "body")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": "a"}\n{"text": 3}\n',
            "expected text in the field 'text' .* got int, of the fields text, in .*bad.jsonl, line 2, byte 14",
        ),
        (b'{"body": "a"}\n', "got none, of the fields body, in .*byte 0. Name the field .* with --text-field"),
        (b'["a"]\n', "got none, of the fields none, in"),
        (b'{"text": "a"\n', "expected a JSON object a line, got Expecting .* in .*byte 0"),
        (b'{"text": "\xe9"}\n', "expected UTF-8 text, got bytes that are not in .*bad.jsonl, line 1, byte 0"),
    ],
)
def test_lines_that_are_no_documents(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "bad.jsonl", 1000)


BAD_LINES = [
    (b'{"text": 3}', "text_field: expected text in the field 'text' of every row, got int, of the fields text,"),
    (b"[" * 5000, "corpus: expected a JSON object a line, got "),  # too deep before Python 3.13, else unfinished
    (b'{"text": "\xe9"}', "corpus: expected UTF-8 text, got bytes that are not"),
    (b'{"text": "' + b"x" * 9000 + b'"}', "corpus: expected lines of at most 8000 bytes, got more"),
    (b"null", "text_field: expected text in the field 'text' of every row, got none, of the fields none,"),
]


@pytest.mark.parametrize("part_bytes", [13, 1000, 10**6])
def test_bad_lines_are_skipped_and_noted(tmp_path: Path, part_bytes: int) -> None:
    good = [json.dumps({"text": f"good {i}"}).encode() for i in range(len(BAD_LINES) + 1)]
    lines = [good[0], *(line for i, (bad, _) in enumerate(BAD_LINES) for line in (bad, good[i + 1]))]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join(lines))
    noted: list[tuple[str, str]] = []

    def skip(part: Part, place: int, bad: BadRow) -> None:
        reason = f"{bad.argument}: expected {bad.expected}, got {bad.got}"
        noted.append((name_row(part.source.path, part.source.kind, place), reason))

    parts = [part for group in divide(find_sources(str(path)), part_bytes) for part in group]
    found = [text for part in parts for text, _ in read(part, "text", 8000, skip)]
    assert found == [f"good {i}" for i in range(len(good))]
    assert len(noted) == len(BAD_LINES)
    for number, ((place, reason), (_, expected)) in enumerate(zip(noted, BAD_LINES, strict=True)):
        assert place.startswith(f"{path}, line {2 * number + 2}, byte ")
        assert reason.startswith(expected)


def test_a_long_text_of_a_row_comes_in_pieces(tmp_path: Path) -> None:
    text = "line é\r\n" * PIECE
    path = write_lines(tmp_path / "long.jsonl", [text, "short"])
    pieces = [piece for (part,) in divide(find_sources(str(path)), 10**9) for piece in read(part, "text")]
    assert [last for _, last in pieces].count(True) == 2
    assert all(len(piece) < 2.1 * PIECE and piece.endswith("\n") for piece, _ in pieces[:-1])
    assert "".join(piece for piece, _ in pieces) == text + "short"


@pytest.mark.parametrize("replacement", ["nothing", "folder"])
def test_document_that_goes_away(tmp_path: Path, replacement: str) -> None:
    document = write(tmp_path / "text", a="a") / "a.txt"
    ((part,),) = divide(find_sources(str(document)), 10)
    document.unlink()
    if replacement == "folder":
        document.mkdir()
    with pytest.raises(DataError, match="a.txt: (No such file|Is a directory)"):
        list(read(part, "text"))
