"""Synthetic tasks of RULER: texts of a length in tokens, made from a seed, and the score of an answer.

Source: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?"; the wording is
that of github.com/NVIDIA/RULER.
"""

from __future__ import annotations

import difflib
import math
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

from ringflash.errors import ArgumentError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HOPS = 4  # assignments of a chain after its first
EXAMPLE_NOISE = 10  # noise lines in the solved example of variable tracking
COMMON = 10  # words that common words extraction asks for
LONG = 4096  # from this length on, words are repeated more often
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]

Encode = Callable[[str, str], list[int]]  # (question, beginning of the answer) -> token ids of the prompt


@dataclass(frozen=True)
class Text:
    """Text of a sample.

    Args:
        question: context and question.
        beginning: beginning of the answer, which the model continues.
        answers: strings that a right answer contains.
    """

    question: str
    beginning: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """Generator of a task's texts.

    Args:
        make: returns the text of (random numbers, size, length in tokens); the context grows with the size.
        least: smallest size.
        new_tokens: number of tokens in which the model answers.
    """

    make: Callable[[Random, int, int], Text]
    least: int
    new_tokens: int


@dataclass(frozen=True)
class Sample:
    """Prompt in token ids, and the strings that a right answer of at most `new_tokens` contains."""

    prompt: list[int]
    answers: tuple[str, ...]
    new_tokens: int


def check_names(names: Sequence[str]) -> None:
    """Raises ArgumentError, with the nearest name, if there is no task of one of these names."""
    for name in names:
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Leave --tasks out for all of them."
            raise ArgumentError("--tasks", expected=f"names among {', '.join(TASKS)}", got=repr(name), remedy=remedy)


def make_sample(name: str, length: int, encode: Encode, seed: int = 0, number: int = 0) -> Sample:
    """Returns a sample with the largest context for which prompt and answer have at most `length` tokens.

    Args:
        name: name of the task.
        length: number of tokens of the prompt and the answer.
        encode: function from a question and the beginning of its answer to the prompt's token ids.
        seed: seed of the texts.
        number: number of the sample; each has another text.

    Raises:
        ArgumentError: the task's smallest text is longer.
    """
    task = TASKS[name]

    def make(size: int) -> Sample:
        # Every size begins with the same random numbers, so that the search compares versions of one text.
        text = task.make(Random(f"{seed}/{name}/{length}/{number}"), size, length)
        return Sample(encode(text.question, text.beginning), text.answers, task.new_tokens)

    low, best = task.least, make(task.least)
    budget = length - task.new_tokens
    if len(best.prompt) > budget:
        needed = len(best.prompt) + task.new_tokens
        remedy = "Raise the length, or leave the task out."
        raise ArgumentError("--seqlens", expected=f"at least {needed} tokens for {name}", got=length, remedy=remedy)
    high, other, at_other = None, 0, 0  # the secant through sizes `low` and `other` leads to the next size
    # The number of tokens is about linear in the size, so this needs fewer encodings than bisection.
    while high is None or high - low > 1:
        used = len(best.prompt)
        step = (budget - used) * (low - other) // ((used - at_other) or 1)
        size = low + max(step, 1) if high is None else min(low + max(step, 1), high - 1)
        sample = make(size)
        if len(sample.prompt) > budget:
            high = other = size
            at_other = len(sample.prompt)
        else:
            if high is None:
                other, at_other = low, used
            low, best = size, sample
    return best


def score(text: str, answers: Sequence[str]) -> float:
    """Returns the share of `answers` that `text` contains in any case of letters, RULER's `string_match_all`."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def _number(random: Random) -> str:
    return str(random.randint(10**6, 10**7 - 1))


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def _letters(random: Random, alphabet: str, count: int) -> str:
    return "".join(random.choices(alphabet, k=count))


def _word(random: Random) -> str:
    # Words of one length, because then no word contains another, and the score finds the right ones only.
    return "".join(random.choices(SYLLABLES, k=3))


def _key(random: Random) -> str:
    return f"{_word(random)}-{_word(random)}"


def _distinct(draw: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _needles(
    random: Random,
    size: int,
    length: int,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key: Callable[[Random], str] = _key,
    kind: str = "numbers",
    distractors: bool = False,
) -> Text:
    """Makes a text with `keys` x `values` needles among `size` noise lines, or among needles of other keys."""
    planted, others = keys * values, size if distractors else 0
    names = _distinct(partial(key, random), keys + others)
    drawn = _distinct(partial(_uuid if kind == "uuids" else _number, random), planted + others)
    owners = [i // values for i in range(planted)] + [keys + i for i in range(others)]
    lines = [NEEDLE.format(kind=kind, key=names[i], value=x) for i, x in zip(owners, drawn, strict=True)]
    needles, lines = lines[:planted], lines[planted:] if distractors else [NOISE] * size
    random.shuffle(needles)
    for place, needle in zip(sorted(random.sample(range(size), planted), reverse=True), needles, strict=True):
        lines.insert(place, needle)
    asked = random.sample(range(keys), queries)
    answers = tuple(x for i in asked for x in drawn[i * values : (i + 1) * values])
    *first, last = (names[i] for i in asked)
    query = f"{', '.join(first)}, and {last}" if first else last
    some, verb, these = ("Some", "are", "are all") if len(answers) > 1 else ("A", "is", "is")
    kind = kind if len(answers) > 1 else kind.removesuffix("s")
    question = (
        f"{some} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n" + "\n".join(lines) + "\n"
        f"What {these} the special magic {kind} for {query} mentioned in the provided text?"
    )
    return Text(question, f" The special magic {kind} for {query} mentioned in the provided text {verb}", answers)


def _chain(random: Random, size: int, letters: int) -> Text:
    """Makes a text with a chain of assignments, in order, among `size` noise lines."""
    names = _distinct(partial(_letters, random, string.ascii_uppercase, letters), HOPS + 1)
    value, lines = random.randint(10000, 99998), [NOISE] * size
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]
    for i, place in enumerate(sorted(random.sample(range(size), len(chain)))):
        lines.insert(place + i, chain[i])
    question = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n" + "\n".join(lines)
        + f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    )  # fmt: skip
    beginning = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: "
    )
    return Text(question, beginning, tuple(names))


def _variable_tracking(random: Random, size: int, length: int) -> Text:
    """Makes a solved example, then a chain of assignments among `size` noise lines."""
    example, text = _chain(random, EXAMPLE_NOISE, 3), _chain(random, size, 5)
    solved = f"{example.question}{example.beginning} {' '.join(example.answers)}\n\n"
    return Text(solved + text.question, text.beginning, text.answers)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def _common_words(random: Random, size: int, length: int) -> Text:
    """Makes a solved example, then a list of `size` words of which `COMMON` occur more often than the others."""

    def one(count: int, often: int, seldom: int) -> Text:
        words = _distinct(partial(_word, random), count)
        entries = words[:COMMON] * often + words[COMMON:] * seldom
        random.shuffle(entries)
        question = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            f"Memorize the ones that appear most often.\n{_numbered(entries)}\n"
            f"Question: What are the {COMMON} most common words in the above list?"
        )
        beginning = f" Answer: The top {COMMON} words that appear most often in the list are:"
        return Text(question, beginning, tuple(words[:COMMON]))

    example = one(40, 10, 3) if length >= LONG else one(20, 3, 1)
    text = one(size, 30, 3) if length >= LONG else one(size, 6, 1)
    solved = f"{example.question}{example.beginning} {_numbered(example.answers)}\n"
    return Text(solved + text.question, text.beginning, text.answers)


def _frequent_words(random: Random, size: int, length: int) -> Text:
    """Makes `size` coded words with the frequencies of a zeta distribution of exponent 2; "..." is the first."""
    words = _distinct(partial(_letters, random, string.ascii_lowercase, 6), max(5, length // 50 - 1))
    words[0] = "..."
    zeta = math.pi**2 / 6
    entries = [word for rank, word in enumerate(words, start=1) for _ in range(int(size / (zeta * rank**2)))]
    random.shuffle(entries)
    question = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(entries)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text?"
    )
    beginning = " Answer: According to the coded text above, the three most frequently appeared words are:"
    return Text(question, beginning, tuple(words[1:4]))


def _needle_task(*, keys: int = 1, values: int = 1, **options: Any) -> Task:
    return Task(partial(_needles, keys=keys, values=values, **options), keys * values, 128)


# RULER's names. Its niah_single_2 is left out: on the noise haystack it equals niah_single_1.
TASKS = {
    "niah_single_1": _needle_task(),
    "niah_single_3": _needle_task(kind="uuids"),
    "niah_multikey_1": _needle_task(keys=4),
    "niah_multikey_2": _needle_task(distractors=True),
    "niah_multikey_3": _needle_task(distractors=True, key=_uuid, kind="uuids"),
    "niah_multivalue": _needle_task(values=4),
    "niah_multiquery": _needle_task(keys=4, queries=4),
    "vt": Task(_variable_tracking, HOPS + 1, 30),
    "cwe": Task(_common_words, COMMON + 1, 120),
    # From 74 words on, the fourth word of the distribution occurs more often than the fifth.
    "fwe": Task(_frequent_words, 80, 50),
}
