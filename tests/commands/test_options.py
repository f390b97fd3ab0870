"""Options have one name, one type and one meaning in all commands, and what they are given is checked."""

from __future__ import annotations

import json
import pickle
import re
from argparse import Action, ArgumentParser, Namespace
from functools import cache
from pathlib import Path
from typing import Any, Never
from unittest.mock import patch

import pytest

from ringflash.commands.main import BENCHMARKS, COMMANDS, main
from ringflash.commands.options import (
    CONFIGS,
    PRINTED,
    REQUIRED,
    SHARED,
    Described,
    add_shared,
    check_at_least,
    check_heads,
    check_positive,
    config_file,
    fill_in,
    put_json,
)
from ringflash.errors import ArgumentError, CheckpointCorrupt, ConfigError
from ringflash.integrations.transformers.mask import MaskAsTensor

KEYS = {"train", "finetune", "dpo"}  # their options are the keys of a configuration


class Stop(BaseException):
    """The end of a command that was only started for its parser."""


def parser_of(command: str) -> ArgumentParser:
    """Returns the parser of a command, which stops where it would parse its arguments."""
    found: list[ArgumentParser] = []

    def stop(self: ArgumentParser, *_: object) -> Never:
        found.append(self)
        raise Stop

    with patch.multiple(ArgumentParser, parse_args=stop, parse_known_args=stop), pytest.raises(Stop):
        main([*command.split(), "--help"])  # without it some benchmarks ask for torchrun
    return found[0]


@cache
def options() -> dict[str, dict[str, Action]]:
    """Returns the options of all commands and benchmarks: actions by the name of the option, then by the command."""
    commands = [*(COMMANDS.keys() - KEYS - {"bench", "checkpoint"}), "checkpoint verify"]
    found: dict[str, dict[str, Action]] = {}
    for command in sorted({*commands, *(f"bench {name}" for name in BENCHMARKS)}):
        for action in parser_of(command)._actions:
            for name in action.option_strings:
                found.setdefault(name, {})[command] = action
    return {name: actions for name, actions in found.items() if name not in ("-h", "--help")}


def meaning(action: Action) -> str:
    """Returns the help of an option without its default."""
    return re.sub(r" \(default: .*\)$", "", action.help or "")


def kind(action: Action) -> tuple[Any, ...]:
    """Returns what an option takes, and what it means."""
    return type(action), action.type, action.nargs, action.metavar, action.dest, meaning(action)


def test_an_option_has_one_type_and_one_meaning_in_all_commands() -> None:
    assert len(options()) > 90  # parsers were found
    for name, actions in options().items():
        kinds = {command: kind(action) for command, action in actions.items()}
        assert len({*kinds.values()}) == 1, (name, kinds)


def test_options_are_not_abbreviated() -> None:
    """The name of an option that was dropped may begin that of another one."""
    commands = [*(COMMANDS.keys() - KEYS - {"bench", "checkpoint"}), "checkpoint verify"]
    parsers = {command: parser_of(command) for command in [*commands, *(f"bench {name}" for name in BENCHMARKS)]}
    assert [command for command, parser in parsers.items() if parser.allow_abbrev] == []


def test_json_goes_to_a_file_or_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_json(PRINTED, {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    link, found = tmp_path / "link", tmp_path / "new" / "file.json"
    link.symlink_to(found)
    for content in (1, 2):
        put_json(link, content)
        assert json.loads(found.read_text()) == content
    assert link.is_symlink()
    put_json(Path("/dev/null"), {"a": 1})
    assert Path("/dev/null").is_char_device()
    for folder in (tmp_path, Path()):
        with pytest.raises(ArgumentError, match="--json: expected a FILE, got the folder .*Name a file in it"):
            put_json(folder, {})
    assert [path.name for path in found.parent.iterdir()] == ["file.json"]


def test_pictures_are_checked_before_a_command_begins() -> None:
    parser = ArgumentParser()
    add_shared(parser, "png")
    for name, remedy in (("loss.txt", "Name it loss.png"), ("plan", "Name it plan.png"), ("", "Name a file")):
        with pytest.raises(ArgumentError, match=f"--png: expected a .png, .svg or .pdf file, got .*{remedy}"):
            parser.parse_args(["--png", name])
    assert parser.parse_args(["--png", "made/loss.svg"]).png == Path("made/loss.svg")


def test_options_of_several_commands_are_the_shared_ones() -> None:
    several = {name for name, actions in options().items() if len(actions) > 1}
    assert several <= {f"--{name.replace('_', '-')}" for name in SHARED}
    for name, keywords in SHARED.items():
        for action in options()[f"--{name.replace('_', '-')}"].values():
            assert meaning(action) == keywords["help"]
            assert "choices" not in keywords or {*(action.choices or ())} <= {*keywords["choices"]}


def test_a_meaning_has_one_name() -> None:
    names: dict[str, set[str]] = {}
    for name, actions in options().items():
        for action in actions.values():
            names.setdefault(meaning(action), set()).add(name)
    assert {text: found for text, found in names.items() if len(found) > 1} == {}


def test_shared_options_tell_their_defaults() -> None:
    parser = ArgumentParser()
    choices = {"dtype": ("float32",)}
    add_shared(
        parser, "png", seqlen=REQUIRED, seqlens=[1, 2], tokens=Described("many"), dtype="float32", choices=choices
    )
    helps = {action.dest: action.help or "" for action in parser._actions}
    assert "(default: 1 2)" in helps["seqlens"]
    assert "(default: many)" in helps["tokens"]
    assert "default" not in helps["seqlen"] + helps["png"]
    given = parser.parse_args(["--seqlen", "3"])
    assert given == Namespace(png=None, seqlen=3, seqlens=[1, 2], tokens=None, dtype="float32")
    with pytest.raises(SystemExit):
        parser.parse_args([])
    with pytest.raises(SystemExit):
        parser.parse_args(["--seqlen", "3", "--dtype", "float16"])


def test_what_is_left_out_is_filled_in() -> None:
    options = Namespace(nheads=None, nheads_kv=None, rounds=3, png=None)
    fill_in(options, {"nheads": 8, "rounds": 5})
    assert options == Namespace(nheads=8, nheads_kv=8, rounds=3, png=None)
    fill_in(options, {"nheads": 16, "nheads_kv": 4})
    assert (options.nheads, options.nheads_kv) == (8, 8)


def test_configurations_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("two-hosts", "two-hosts.yaml", "configs/two-hosts.yaml"):
        assert config_file(name) == CONFIGS / "two-hosts.yaml"
    (tmp_path / "two-hosts.yaml").write_text("")  # a file comes first
    assert config_file("two-hosts.yaml") == Path("two-hosts.yaml")
    with pytest.raises(ConfigError, match=r"no file two-hots\. Did you mean two-hosts.yaml or two-hosts\?"):
        config_file("two-hots")
    with pytest.raises(ConfigError, match=r"no file elsewhere/two-hosts\. Did you mean two-hosts\?"):
        config_file("elsewhere/two-hosts")


def test_numbers_are_checked_one_by_one() -> None:
    options = Namespace(seqlens=[4, 2], choose_at=[], gpus_a_host=None, taken=0.0, latency_us=float("nan"))
    check_at_least(options, ["seqlens", "choose_at", "gpus_a_host"], 2)
    check_at_least(options, ["taken"], 0)
    message = "^--seqlens: expected at least 3, got 2. Leave it out for the default.$"
    with pytest.raises(ArgumentError, match=message):
        check_at_least(options, ["choose_at", "seqlens"], 3)
    with pytest.raises(ArgumentError, match="^--latency-us: expected at least 0, got nan. Say more.$"):
        check_at_least(options, ["latency_us"], 0, remedy="Say more.")
    with pytest.raises(ArgumentError, match="^--taken: expected more than 0, got 0.0. Leave it out for the default.$"):
        check_positive(options, ["taken"])


def test_heads_are_shared_evenly() -> None:
    check_heads(Namespace(nheads=12, nheads_kv=4))
    with pytest.raises(ArgumentError, match="^--nheads: expected a multiple of --nheads-kv 8, got 12. Query heads"):
        check_heads(Namespace(nheads=12, nheads_kv=8))


@pytest.mark.parametrize(
    "error",
    [
        CheckpointCorrupt("file", expected="a", got=Path("b"), remedy="Do c.", rank=2),
        MaskAsTensor("indexes it"),
    ],
)
def test_errors_travel_between_processes(error: ArgumentError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert (copy.argument, copy.remedy, copy.rank) == (error.argument, error.remedy, error.rank)
