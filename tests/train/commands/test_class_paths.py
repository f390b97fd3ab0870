"""Class paths in untrusted configurations: only names on the list are imported or called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringflash.errors import ConfigError
from ringflash.train.commands import train
from ringflash.train.commands.class_paths import LIGHTNING_CLASSES, MAX_CONFIG_BYTES, check_arguments, is_allowed
from tests.train.command_line import CONFIG, environment, write_config

EVIL = {"class_path": "evil.Evil"}
LAMBDA = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"setup": "os.system"}}
SETTINGS: list[dict[str, Any]] = [
    {"trainer": {"callbacks": [EVIL]}},
    {"trainer": {"callbacks": EVIL}},
    {"trainer": {"callbacks": ["evil.Evil"]}},
    {"trainer": {"strategy": EVIL}},
    {"trainer": {"strategy": "evil.Evil"}},
    {"trainer": {"plugins": [EVIL]}},
    {"trainer": {"profiler": EVIL}},
    {"trainer": {"profiler": "evil.Evil"}},
    {"trainer": {"logger": EVIL}},
    {"trainer": {"accelerator": EVIL}},
    {"trainer": {"callbacks": [LAMBDA]}},
    {"trainer": {"callbacks": [LAMBDA | {"class_path": "LambdaCallback"}]}},
    {
        "trainer": {
            "callbacks": [
                {"class_path": "ringflash.train.commands.train.subprocess.Popen", "init_args": {"args": "ls"}}
            ]
        }
    },
    {"trainer": {"callbacks": [{"class_path": "ringflash.train.commands.train.main"}]}},
    {"trainer": {"callbacks": "[{class_path: evil.Evil}]"}},
    {"trainer": {"callbacks": "nested.txt"}},
    {"trainer": "nested.txt"},
    {"trainer.callbacks": [EVIL]},
    {
        "trainer": {
            "strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"x": "os.system"}}
        }
    },
    {"checkpoint": {"class_path": "subprocess.Popen", "init_args": {"args": ["ls"]}}},
    {"model": {"model": EVIL}},
    {"data": EVIL},
]
ARGUMENTS = [
    ["--trainer.callbacks=evil.Evil"],
    ["--trainer.callbacks", "evil.Evil"],
    ["--trainer.callbacks+=evil.Evil"],
    ["--trainer.callbacks+", "evil.Evil"],
    ["--trainer.callbacks.class_path", "evil.Evil"],
    ["--trainer.callbacks", "[{class_path: evil.Evil}]"],
    ["--trainer.callbacks.help", "evil.Evil"],
    ["--trainer.callbacks.help=evil.Evil"],
    ["--trainer.callbacks=nested.txt"],
    ["--trainer", "nested.txt"],
    ["--trainer.callbacks=LambdaCallback", "--trainer.callbacks.setup=os.system"],
    ["--config", "{trainer: {callbacks: [{class_path: evil.Evil}]}}"],
    ["-c", "{trainer: {callbacks: [{class_path: evil.Evil}]}}"],
    ["--config=extra.yaml"],
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a working folder with an importable module that writes a file as proof when it is imported."""
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath('proof').touch()\n"
        "from lightning.pytorch import Callback\nclass Evil(Callback):\n    pass\n"
    )
    (tmp_path / "nested.txt").write_text("callbacks: [{class_path: evil.Evil}]\n")
    (tmp_path / "extra.yaml").write_text("trainer: {callbacks: [{class_path: evil.Evil}]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_a_file_cannot_import_or_call_what_is_not_listed(
    folder: Path, index: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(folder, {**CONFIG, **SETTINGS[index]})
    assert train.main(["fit", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert "expected a class of ringflash, or one of Lightning's" in error
    assert len(error.splitlines()) == 1
    assert not (folder / "proof").exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("args", ARGUMENTS, ids=" ".join)
def test_an_argument_cannot_import_or_call_what_is_not_listed(
    folder: Path, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["fit", "--config", str(write_config(folder, CONFIG)), *args]) == 2
    assert "expected a class of ringflash, or one of Lightning's" in capsys.readouterr().err
    assert not (folder / "proof").exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.system ['touch proof']", "!!python/name:os.system", "!x 1"]
)
def test_tags_are_refused(folder: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder, CONFIG)
    config.write_text(f"{config.read_text()}\nseed_everything: {value}\n")
    assert train.main(["fit", "--config", str(config)]) == 2
    assert "expected plain YAML without tags" in capsys.readouterr().err
    assert not (folder / "proof").exists()


def test_anchors_that_multiply_or_hold_themselves_are_walked_once() -> None:
    bomb = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    check_arguments(["--config", bomb + "self: &self [*self]\n"])
    with pytest.raises(ConfigError, match=r"self\.class_path: .*got evil\.Evil"):
        check_arguments(["--config", bomb + "self: &self {class_path: evil.Evil, again: *self}\n"])
    with pytest.raises(ConfigError, match="plain YAML"):
        check_arguments(["--config", "a: " + "[" * 100_000])


@pytest.mark.parametrize("first", ["callbacks", "corpus"])
def test_an_anchor_that_is_text_in_one_place_is_a_class_in_another(folder: Path, first: str) -> None:
    second = "corpus" if first == "callbacks" else "callbacks"
    for value in ("[evil.Evil]", "[[evil.Evil]]"):
        with pytest.raises(ConfigError, match=r"callbacks: .*got evil\.Evil"):
            check_arguments(["--config", f"{first}: &a {value}\n{second}: *a\n"])
    assert not (folder / "proof").exists()


def test_a_file_that_is_too_long_to_check_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "nested.txt").open("a") as stream:
        stream.write("# padding\n" * (MAX_CONFIG_BYTES // 10 + 1))
    config = write_config(folder, {**CONFIG, "trainer": "nested.txt"})
    assert train.main(["fit", "--config", str(config)]) == 2
    assert f"expected a file of at most {MAX_CONFIG_BYTES} bytes, got " in capsys.readouterr().err
    assert not (folder / "proof").exists()


def test_a_missing_configuration_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--config", "name.yaml"], ["--config=name.yaml"], ["-c", "name.yaml"]):
        assert train.main(["fit", *args]) == 2
        error = capsys.readouterr().err
        assert "--config: expected a configuration file, got no file name.yaml." in error
    assert train.main(["fit", "--config", "two-host"]) == 2
    assert "Did you mean two-hosts?" in capsys.readouterr().err


def test_the_nearest_class_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean lightning\.pytorch\.callbacks\.EarlyStopping\?"):
        check_arguments(["--trainer.callbacks.class_path=lightning.pytorch.callbacks.EarlyStoping"])


def test_listed_classes_and_plain_text_are_accepted(folder: Path) -> None:
    assert is_allowed("ringflash.train.lightning.strategy.RingAttentionStrategy")
    assert is_allowed("lightning.pytorch.callbacks.early_stopping.EarlyStopping")
    assert not is_allowed("lightning.pytorch.callbacks.model_checkpoint.os.system")
    assert not is_allowed("ringflash.train.nowhere.Evil")
    for group, names in LIGHTNING_CLASSES.items():
        module = __import__(f"lightning.pytorch.{group}", fromlist=["*"])
        environments = __import__("lightning.pytorch.plugins.environments", fromlist=["*"])
        for name in names:
            assert hasattr(module, name) or hasattr(environments, name), name
    early = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "os.loss"}}
    text = {
        "data": {"corpus": "evil.txt", "cache_dir": "os.path"},
        "trainer": {"callbacks": [early]},
        "run_dir": "os.x",
    }
    check_arguments(["--config", yaml.safe_dump(text), "--summary.prompt", "os.path", "--ckpt_path=evil.Evil"])


def test_the_page_lists_these_classes_of_lightning() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    for group, names in LIGHTNING_CLASSES.items():
        (found,) = re.findall(rf"^- `lightning\.pytorch\.{group}`: (.*?)[;.]\n", page, re.DOTALL | re.MULTILINE)
        assert set(re.findall(r"\b[A-Z]\w+", re.sub(r"\(.*?\)", "", found, flags=re.DOTALL))) == set(names)


def test_an_average_that_no_model_of_a_configuration_can_have_is_not_listed() -> None:
    with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
        check_arguments(["--trainer.callbacks.class_path=lightning.pytorch.callbacks.StochasticWeightAveraging"])


def test_a_module_of_the_working_folder_does_not_stand_for_a_library_s(folder: Path) -> None:
    (folder / "yaml.py").write_text("from pathlib import Path\nPath('proof').touch()\n")
    args, root = [sys.executable, "-m", "ringflash", "train", "ift"], str(Path(__file__).parents[3])
    paths = {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(args, cwd=folder, env=environment() | paths, capture_output=True)
    assert done.returncode == 2, done.stderr.decode()
    assert not (folder / "proof").exists()
