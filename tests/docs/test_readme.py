"""The README's programs run, every link of the documentation leads somewhere, and the first page stays short."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Never
from unittest.mock import patch

import pytest

import ringflash
from ringflash.commands.main import main
from tests.helpers.programs import output_of_text

ROOT = Path(ringflash.__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks() -> tuple[str, str]:
    """Returns the two programs of the README: attention, and a ring with its loss."""
    attention, ring = BLOCK.findall(README.read_text())
    return attention, ring


def test_the_lines_of_attention_run(tmp_path: Path) -> None:
    attention, _ = blocks()
    shown = "\nprint(*out.shape, *newest.shape, q.grad.shape == q.shape)"
    assert output_of_text(attention + shown, tmp_path).split() == ["2", "1000", "8", "64", "2", "1", "8", "64", "True"]


@pytest.mark.timeout(800)
def test_the_lines_of_a_ring_give_the_same_loss_on_any_number_of_ranks(tmp_path: Path) -> None:
    _, ring = blocks()
    printed = []
    for ranks in (1, 2):
        losses = re.findall(r"loss (\d\.\d{4})", output_of_text(ring, tmp_path, ranks=ranks))
        assert len(losses) == ranks
        printed += map(float, losses)
    assert printed == pytest.approx([printed[0]] * 3, abs=1.1e-4)


def test_the_commands_of_make_are_those_of_the_makefile() -> None:
    told = re.findall(r"^    (make \w+) ", README.read_text(), re.MULTILINE)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert told == ["make train", "make test"]
    assert {command.split()[1] for command in told} <= set(targets)


class Parsed(BaseException):
    """The end of a command that has parsed its arguments."""

    def __init__(self, options: Namespace) -> None:
        self.options = options


def options_of(arguments: list[str]) -> Namespace:
    """Returns what a command parses from its arguments; it is not run."""
    parse = ArgumentParser.parse_args

    def stop(self: ArgumentParser, *args: Any) -> Never:
        raise Parsed(parse(self, *args))

    with patch.object(ArgumentParser, "parse_args", stop), pytest.raises(Parsed) as parsed:
        main(arguments)
    return parsed.value.options


# Lightning calls a jsonargparse method by its deprecated name.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_commands_of_training_are_understood() -> None:
    from ringflash.train.commands.configured import configured  # here, because Lightning takes seconds to import

    section = README.read_text().split("\n## Training\n")[1].split("\n## ")[0]
    commands = [shlex.split(line) for line in re.findall(r"^    ringflash (.*)$", section, re.MULTILINE)]
    assert [command[0] for command in commands] == ["prepare", "train", "export"]
    prepare, export = options_of(commands[0]), options_of(commands[2])
    assert (prepare.sources, prepare.tokenizer) == (["my/*.jsonl"], "path/to/tokenizer.json")
    assert (export.to, export.max_position_embeddings) == (Path("FOLDER"), 65536)
    action, flag, config, *rest = commands[1][1:]
    assert (action, flag, config) == ("fit", "--config", "configs/h200-4.yaml")
    run = configured([flag, str(ROOT / config), *rest])
    assert run.ranks == 4
    assert run.datamodule.context_length == export.max_position_embeddings
    assert run.shape.vocab_size == 128256
    assert Path(run.datamodule.sources) == prepare.to


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 1000


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT.resolve()), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_and_picture_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if "://" not in link
    }
    pictures = [*(ROOT / "docs").rglob("*.png"), *(ROOT / "docs").rglob("*.svg")]
    assert {path.resolve() for path in (*PAGES[1:], *pictures)} <= linked
