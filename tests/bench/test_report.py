"""The tables of the benchmarks keep their figures in a narrow terminal, and show what a row lacks as a dash."""

from __future__ import annotations

import pytest

from ringflash.bench.common import report


@pytest.mark.parametrize(("form", "kept"), [("", "1.250"), ("<", "a name of")])
def test_text_makes_room_for_figures_unless_its_format_says_no(
    form: str, kept: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "WIDTH", 20)
    rows = [{"name": "a name of many words", "ms": 1.25}, {"name": "b", "failed": "no [memory]"}]
    report.print_table("Times", [("contender", "name", form), ("ms", "ms", ".3f")], rows, "{name}")
    text = capsys.readouterr().out
    assert [each for each in ("1.250", "a name of") if each in text] == [kept]
    assert "│     - │" in text or form
    assert text.endswith("  b: no [memory]\n")
