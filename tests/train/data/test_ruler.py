"""RULER's tasks: texts fit their lengths, hold their answers, and follow from the seed; scores are RULER's."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from itertools import takewhile
from random import Random
from typing import Any

import pytest

from ringflash.errors import ArgumentError
from ringflash.train.data.ruler import NOISE, TASKS, check_names, make_sample, score
from ringflash.train.data.tokenizer import Tokenizer

BYTES = Tokenizer()
LENGTHS = (3000, 8000)  # common words extraction repeats its words more often from 4096 tokens on
LONGEST_LINE = 130  # a needle with two uuids, in bytes


def encode(question: str, beginning: str) -> list[int]:
    return BYTES.encode(question + beginning)


def text_of(name: str, length: int, seed: int = 0, number: int = 0) -> tuple[str, tuple[str, ...]]:
    sample = make_sample(name, length, encode, seed, number)
    return BYTES.decode(sample.prompt), sample.answers


def test_the_tasks_are_those_of_the_paper_that_need_no_download() -> None:
    needles = [name.removeprefix("niah_") for name in TASKS if name.startswith("niah_")]
    assert needles == [*("single_1", "single_3"), *(f"multikey_{i}" for i in (1, 2, 3)), "multivalue", "multiquery"]
    assert [*TASKS][-3:] == ["vt", "cwe", "fwe"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answer_fill_the_length(name: str, length: int) -> None:
    for number in range(3):
        sample = make_sample(name, length, encode, number=number)
        assert sample.new_tokens == TASKS[name].new_tokens
        assert length - LONGEST_LINE < len(sample.prompt) + sample.new_tokens <= length


@pytest.mark.parametrize("name", ["niah_multikey_2", "cwe", "fwe"])
def test_the_largest_context_that_fits_is_found(name: str) -> None:
    """Compares the search with all sizes, for a tokenizer that counts words."""

    def words(question: str, beginning: str) -> list[int]:
        return [0] * len((question + beginning).split())

    task, length = TASKS[name], 1500
    texts = (task.make(Random(f"0/{name}/{length}/0"), size, length) for size in range(task.least, length))
    counts = (len(words(text.question, text.beginning)) for text in texts)
    fitting = [*takewhile(lambda count: count <= length - task.new_tokens, counts)]
    assert len(make_sample(name, length, words).prompt) == fitting[-1]


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah_")])
def test_the_text_has_each_asked_needle_once(name: str) -> None:
    for number in range(5):
        text, answers = text_of(name, 4000, number=number)
        assert len(answers) == (4 if name in ("niah_multivalue", "niah_multiquery") else 1)
        keys = re.split(r", and |, ", re.findall(r"for (\S.*?) mentioned", text)[-1])
        assert len(keys) == (4 if name == "niah_multiquery" else 1)
        kind = "uuids" if name in ("niah_single_3", "niah_multikey_3") else "numbers"
        for index, answer in enumerate(answers):
            assert text.count(answer) == 1
            key = keys[index if len(keys) > 1 else 0]
            assert f"\nOne of the special magic {kind} for {key} is: {answer}.\n" in text
        needles = text.count("\nOne of the special magic")
        if name in ("niah_multikey_2", "niah_multikey_3"):
            assert NOISE not in text
            assert needles > 20
        else:
            expected = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
            assert needles == expected.get(name, 1)


def test_the_wording_of_one_needle() -> None:
    made = TASKS["niah_single_1"].make(Random(1), 2, 4096)
    match = re.fullmatch(
        r"A special magic number is hidden within the following text\. Make sure to memorize it\. I will quiz you "
        r"about the number afterwards\.\n(.*)\nWhat is the special magic number for (\S+) mentioned in the provided "
        r"text\?",
        made.question,
        re.DOTALL,
    )
    assert match is not None
    (answer,) = made.answers
    lines, key = match[1].split("\n"), match[2]
    assert sorted(lines) == sorted([NOISE, NOISE, f"One of the special magic numbers for {key} is: {answer}."])
    assert made.beginning == f" The special magic number for {key} mentioned in the provided text is"


def test_the_wording_of_several_needles() -> None:
    made = TASKS["niah_multivalue"].make(Random(1), 4, 4096)
    assert made.question.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    assert re.search(
        r"\nWhat are all the special magic numbers for \S+ mentioned in the provided text\?$", made.question
    )
    assert re.fullmatch(r" The special magic numbers for \S+ mentioned in the provided text are", made.beginning)


def test_a_chain_leads_from_the_value_to_every_answer() -> None:
    for number in range(5):
        text, answers = text_of("vt", 4000, number=number)
        value = re.findall(r"assigned the value (\d+)", text)[-1]
        values: dict[str, Any] = {}
        for name, given in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text):
            values[name] = values.get(given, given)
        assert [name for name, held in values.items() if held == value] == [*answers]
        assert len(answers) == 5
        assert text.count("Memorize and track") == 2  # a solved example comes first
        assert score(text.split("\n\nMemorize")[0], answers) == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_common_words_occur_most_often(length: int) -> None:
    text, answers = text_of("cwe", length)
    listed = text.split("Memorize the ones that appear most often.\n")[2].split("\nQuestion:")[0]
    words = re.findall(r"\d+\. (\w+)", listed)
    often, seldom = (6, 1) if length < 4096 else (30, 3)
    assert re.findall(r"(\d+)\.", listed) == [str(i + 1) for i in range(len(words))]
    counts = Counter(words)
    assert {word for word, count in counts.items() if count == often} == {*answers}
    assert {count for word, count in counts.items() if word not in answers} == {seldom}


@pytest.mark.parametrize("length", [900, 8000])
def test_frequent_words_come_after_the_noise(length: int) -> None:
    text, answers = text_of("fwe", length)
    words = text.split("appeared coded words. ")[1].split("\nQuestion:")[0].split()
    ranked = Counter(words).most_common(5)
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == [*answers]
    assert ranked[3][1] > ranked[4][1]


def test_scores() -> None:
    assert score("they are 12 and ABC.", ("abc", "12")) == 1
    assert score("they are 12", ("abc", "12")) == 0.5
    assert score("", ("abc", "12")) == 0
    for name in TASKS:
        text, answers = text_of(name, 8000)
        beginning = re.split(r"[?.] (?=The special|Answer:)", text)[-1]
        assert score(", ".join(answers), answers) == 1
        assert score(beginning, answers) == 0
        assert score(" ".join(text_of(name, 8000, seed=1)[1]), answers) == 0


@pytest.mark.parametrize("name", TASKS)
def test_a_text_follows_from_seed_and_number(name: str) -> None:
    first = text_of(name, 8000)
    assert text_of(name, 8000) == first
    assert text_of(name, 8000, seed=1) != first
    assert text_of(name, 8000, number=1) != first


def test_a_fixed_text() -> None:
    """Texts of the same seed must stay the same, or scores of different releases could not be compared."""
    assert text_of("niah_multivalue", 3000)[1] == ("4585142", "8319657", "9140689", "8327239")
    assert text_of("vt", 3000)[1] == ("RGCXH", "RRYPP", "NOEYA", "SYNYK", "GDNKB")
    texts = "".join(text_of(name, 8000)[0] for name in TASKS)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "592de276169be74a"


@pytest.mark.parametrize("name", TASKS)
def test_a_length_below_the_smallest_text(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"--seqlens: expected at least \d+ tokens for {name}, got 200\. Raise"):
        make_sample(name, 200, encode)
    with pytest.raises(ArgumentError) as error:
        make_sample(name, 3000 if name != "cwe" else 2900, lambda a, b: encode(a, b) * 9)
    least = re.search(r"at least (\d+)", str(error.value))
    assert least is not None
    assert int(least[1]) > 3000


def test_an_unknown_task() -> None:
    check_names([*TASKS])
    with pytest.raises(ArgumentError, match=r"got 'niah_multi_key_1'\. Did you mean niah_multikey_1\?"):
        check_names(["vt", "niah_multi_key_1"])
    with pytest.raises(
        ArgumentError, match="--tasks: expected names among niah_single_1, .*got 'qqq'. Leave --tasks out"
    ):
        check_names(["qqq"])
