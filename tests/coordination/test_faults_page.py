"""The table of faults in docs/faults.md names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.helpers.names import ROOT, is_defined

ROW = re.compile(r"\| (\d+) \| (.+?) \| (.+?) \| (.*) \|")
ROWS = [
    match.groups()
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    if (match := ROW.fullmatch(line))
]


def test_rows_are_in_order() -> None:
    numbers = [int(number) for number, *_ in ROWS]
    assert numbers == sorted({*numbers})
    assert numbers[0] == 1
    assert len(numbers) > 30


@pytest.mark.parametrize(("number", "tests"), [pytest.param(row[0], row[3], id=row[0]) for row in ROWS])
def test_each_row_names_tests_that_exist(number: str, tests: str) -> None:
    names = re.findall(r"`(.+?)`", tests)
    assert names
    assert ", ".join(f"`{name}`" for name in names) == tests
    assert [name for name in names if not is_defined(name)] == []
