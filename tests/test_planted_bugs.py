"""Planted bugs stay valid: their texts occur in the sources, and the tests that must notice them exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.names import ROOT, is_defined
from tests.planted_bugs import PLANTS, Plant, failures, main

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ring.test_schedule" name="test_accuracy[a-1]"><failure message="no" /></testcase>
<testcase classname="tests.ring.test_schedule" name="test_accuracy[b-1]" />
<testcase classname="tests.train.commands.test_train" name="test_version"><error message="no" /></testcase>
<testcase classname="tests.test_state" name="test_merge"><skipped message="no" /></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("plant", PLANTS, ids=[plant.name for plant in PLANTS])
def test_the_text_to_replace_occurs_once_and_the_tests_exist(plant: Plant) -> None:
    assert (ROOT / plant.path).read_text(encoding="utf-8").count(plant.old) == 1
    assert plant.old != plant.new
    assert plant.tests
    assert [test for test in plant.tests if not is_defined(test)] == []


def test_names_are_unique() -> None:
    assert len({plant.name for plant in PLANTS}) == len(PLANTS)


@pytest.mark.parametrize("text", ["a = 2\n", "a = 1\na = 1\n"])
def test_a_text_that_is_gone_or_not_unique_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(text)
    with pytest.raises(ValueError, match=r"one: expected its text once in code.py, found it [02] times: a = 1"):
        Plant("one", "nowhere", "code.py", "a = 1", "a = 3", ()).apply(tmp_path)
    assert (tmp_path / "code.py").read_text() == text


def test_failed_tests_are_read_from_the_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    red = ["tests/ring/test_schedule.py::test_accuracy[a-1]", "tests/ring/test_schedule.py::test_accuracy"]
    red.append("tests/train/commands/test_train.py::test_version")
    green = ["tests/ring/test_schedule.py::test_accuracy[b-1]", "tests/test_state.py::test_merge"]
    assert failures(tmp_path / "report.xml", [*red, *green]) == dict.fromkeys(red, "no")
    assert failures(tmp_path / "nothing.xml", red) == {}


def test_the_list_names_every_plant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(f"{plant.name}: {plant.origin}" in text for plant in PLANTS)


@pytest.mark.parametrize(
    ("test", "defined"),
    [
        ("tests/test_planted_bugs.py::test_names_are_unique", True),
        ("tests/test_planted_bugs.py::test_names_of_tests[a-True]", True),
        ("tests/test_planted_bugs.py::test_no_such_name", False),
        ("tests/test_planted_bugs.py", False),
        ("tests/test_no_such_file.py::test_names_are_unique", False),
    ],
)
def test_names_of_tests(test: str, defined: bool) -> None:
    assert is_defined(test) == defined
