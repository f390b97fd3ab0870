from __future__ import annotations

import csv
import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from PIL import Image

import ringflash
from ringflash.commands.main import main
from ringflash.errors import CheckpointError, ConfigError
from ringflash.train.checkpoint.manifest import verify
from ringflash.train.commands import train
from tests.helpers.patience import PATIENCE
from tests.helpers.ports import unused_port
from tests.helpers.programs import Finished, run_program, start_program
from tests.train.command_line import COMMAND, CONFIG, write_config

# Lightning calls a jsonargparse method by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CONFIGS = Path(ringflash.__file__).parents[1] / "configs"


def children(folder: Path) -> list[int]:
    """Returns the ids of living processes with the working directory `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "cwd").resolve() == folder.resolve() and (process / "stat").read_text().split()[2] != "Z":
                    found.append(int(process.name))
            except OSError:
                continue
    return found


def process_of_rank_1(parent: int, folder: Path) -> int:
    """Returns the id of the process that `parent` started for rank 1; a parent may have other children."""
    found = []
    for number in children(folder):
        process = Path("/proc") / str(number)
        parent_of_it = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        if parent_of_it == parent and b"LOCAL_RANK=1" in (process / "environ").read_bytes().split(b"\0"):
            found.append(number)
    (number,) = found
    return number


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Returns whether `condition` becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


@dataclass(frozen=True)
class Fit:
    """A run of twelve steps on two processes, a run that resumes it up to step 16, and one with no steps left."""

    folder: Path
    first: Finished
    resumed: Finished
    again: Finished
    left_over: list[int]


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    folder = tmp_path_factory.mktemp("fit")
    fit = ["-m", COMMAND, "train", "fit", "--config", str(write_config(folder, CONFIG))]
    first = run_program(fit, folder, MASTER_PORT=str(unused_port()))
    within(PATIENCE / 4, lambda: not children(folder))  # rank 1 may end after rank 0
    left_over = children(folder)
    more = ["--trainer.max_steps=16", "--trainer.devices=1", "--ckpt_path", "runs/test/checkpoints/last"]
    resumed = run_program([*fit, *more], folder)
    again = run_program([*fit, *more[:2], "--ckpt_path", "last"], folder)
    return Fit(folder, first, resumed, again, left_over)


def losses(log: Path) -> dict[int, float]:
    with log.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}


@pytest.mark.xdist_group("fit")
@pytest.mark.timeout(1200)
def test_a_run_on_two_processes(fit: Fit) -> None:
    assert fit.first.returncode == 0, fit.first.stderr
    run = fit.folder / "runs" / "test"
    out = fit.first.stdout
    for text in ("first loss", "last loss", "held-out loss", "tokens/s", "sample", "def "):
        assert text in out
    for path in ("runs/test/checkpoints/last", "runs/test/metrics.csv", "runs/test/report.md"):
        assert path in out
        assert (fit.folder / path).exists()
    logged = losses(run / "metrics.csv")
    assert list(logged) == [1, 3, 5, 7, 9, 11]
    assert logged[11] < logged[1]
    with Image.open(run / "report.png") as image:
        assert image.format == "PNG"
    with (run / "metrics.csv").open(newline="") as stream:
        names = {*next(csv.reader(stream))}
    position = "train/loss_by_position"
    assert {f"{position}/0-63", f"{position}/64-127", "train/learning_rate", "train/grad_norm"} <= names
    # The report has the last logged step and the saved settings.
    page = (run / "report.md").read_text()
    assert "| last step logged | 12 of 12 |" in page
    assert "| data.context_length | `128` |" in page
    assert list((run / "tensorboard").iterdir())
    assert fit.left_over == []
    assert out.count("first loss") == 1
    assert "Traceback" not in fit.first.stderr


@pytest.mark.xdist_group("fit")
@pytest.mark.timeout(1200)
def test_resume_at_another_world_size(fit: Fit) -> None:
    assert fit.resumed.returncode == 0, fit.resumed.stderr
    assert list(losses(fit.folder / "runs" / "test-2" / "metrics.csv")) == [13, 15]
    first = fit.first.stdout.split("first loss")[1].split()[0]
    assert fit.resumed.stdout.split("first loss")[1].split()[0] == first


@pytest.mark.xdist_group("fit")
@pytest.mark.timeout(1200)
def test_resume_at_the_end(fit: Fit) -> None:
    assert fit.again.returncode == 0, fit.again.stderr
    assert fit.again.stdout == "Already trained to step 16: nothing was left to do. Raise trainer.max_steps to go on.\n"
    assert [path.name for path in sorted((fit.folder / "runs").iterdir())] == ["test", "test-2"]


@pytest.mark.xdist_group("fit")
@pytest.mark.timeout(1200)
def test_generate_from_the_run(fit: Fit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.first.returncode == 0
    monkeypatch.chdir(fit.folder)
    args = ["generate", "--checkpoint", "runs/test/checkpoints/last", "--prompt", "def f", "--max-new-tokens", "5"]
    assert main([*args, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("def f")


@pytest.mark.parametrize(
    ("section", "key", "suggestion"),
    [
        ("data", "contxt_length", "Did you mean data.context_length?"),
        ("model.optimizer", "warmup_step", "Did you mean warmup_steps?"),
        ("model.model", "n_layer", "Did you mean n_layers?"),
        ("trainer", "max_stepss", "Did you mean trainer.max_steps?"),
        ("trainer.strategy.init_args", "layouts", "Did you mean layout?"),
        ("", "sumary", "Did you mean summary"),
    ],
)
def test_misspelt_key(
    tmp_path: Path, section: str, key: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    target = config
    for name in filter(None, section.split(".")):
        target = target[name]
    target[key] = {"prompt": "x"} if key == "sumary" else 3
    assert train.main(["fit", "--config", str(write_config(tmp_path, config))]) == 2
    captured = capsys.readouterr()
    assert suggestion in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) == 1


def test_misspelt_option_and_subcommand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, CONFIG))
    assert train.main(["fit", "--config", config, "--trainer.max_step=3"]) == 2
    assert "Did you mean trainer.max_steps?" in capsys.readouterr().err
    assert train.main(["ift"]) == 2
    assert "Did you mean fit?" in capsys.readouterr().err
    assert train.main(["fit", "--config", str(tmp_path / "nowhere.yaml")]) == 2
    assert "got no file " in capsys.readouterr().err


@pytest.mark.parametrize("payload", ["tag", "class", "function"])
def test_a_configuration_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, CONFIG)
    proof = tmp_path / "proof"
    lines = {
        "tag": f"seed_everything: !!python/object/apply:os.system ['touch {proof}']\n",
        "class": f"checkpoint: {{class_path: subprocess.Popen, init_args: {{args: [touch, {proof}]}}}}\n",
        "function": f"summary: {{class_path: os.system, init_args: {{command: touch {proof}}}}}\n",
    }
    content = yaml.safe_load(config.read_text())
    content.pop("summary")
    config.write_text(yaml.safe_dump(content) + lines[payload])
    assert train.main(["fit", "--config", str(config)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    args = f"[{{class_path: subprocess.Popen, init_args: {{args: [touch, {proof}]}}}}]"
    assert train.main(["fit", "--config", str(write_config(tmp_path, CONFIG)), f"--trainer.callbacks={args}"]) == 2
    assert not proof.exists()


def test_model_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, CONFIG))
    assert train.main(["fit", "--config", config, "--model.model.n_heads=3"]) == 2
    assert "a multiple of n_heads=3" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", [[], ["--trainer.strategy=ring_attention"]])
@pytest.mark.parametrize("precision", ["16-mixed", "64-true"])
def test_a_precision_is_refused_as_it_was_given(
    tmp_path: Path, strategy: list[str], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, CONFIG))
    assert train.main(["fit", "--config", config, *strategy, f"--trainer.precision={precision}"]) == 2
    assert f"precision: expected 32-true, the Trainer's default, got {precision}." in capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [("", "but empty ones"), ("short", "lower the context length")])
def test_bad_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(write_config(tmp_path, CONFIG))
    (tmp_path / "text.txt").write_text(content)
    assert train.main(["fit", "--config", config, "--trainer.strategy=auto", "--trainer.devices=1"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs" / "test").exists()


def test_empty_corpus_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(write_config(tmp_path, CONFIG))
    alone = ["--trainer.strategy=auto", "--trainer.devices=1"]
    assert train.main(["fit", "--config", config, *alone, "--data.corpus="]) == 2
    assert "which is empty" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["ring_attention", "auto"])
@pytest.mark.parametrize(("name", "got"), [("text.txt", "a file"), ("nowhere", "no such"), (".", "a folder")])
def test_resume_from_what_is_no_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    name: str,
    got: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--config", str(write_config(tmp_path, CONFIG)), "--ckpt_path", name]
    assert train.main(["fit", *args, f"--trainer.strategy={strategy}", "--trainer.devices=1"]) == 2
    error = capsys.readouterr().err
    assert f"ckpt_path {name}: expected a" in error
    assert f"got {got}" in error


@pytest.mark.parametrize("name", ["best", "last"])
def test_resume_from_a_name_of_lightnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "manifest.json").touch()
    train.check_checkpoint(f"./{name}", sharded=True)
    with pytest.raises(CheckpointError, match=f"ckpt_path {name}"):
        train.check_checkpoint(name, sharded=True)


@pytest.mark.timeout(800)
def test_missing_corpus_on_two_processes(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, CONFIG))
    (tmp_path / "text.txt").unlink()
    done = run_program(["-m", COMMAND, "train", "fit", "--config", config], tmp_path)
    assert done.returncode == 2, done.stderr
    assert "does not exist" in done.stderr
    assert done.stderr.count("ringflash: corpus") == 1
    assert "Traceback" not in done.stderr
    assert children(tmp_path) == []
    assert not (tmp_path / "runs" / "test").exists()


class Endless:
    """A run on two processes that only a signal ends: `rank` 0 launches rank 1, an interpreter of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        config = str(write_config(folder, CONFIG))
        args = ["-m", COMMAND, "train", "fit", "--config", config, "--trainer.max_steps=100000", *options]
        self.process = start_program(args, folder, f"{folder}/log", MASTER_PORT=str(unused_port()))

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("log.*"), reverse=True))

    def __enter__(self) -> Endless:
        assert within(PATIENCE, lambda: "step 1/" in self.log or not self.process.is_alive()), self.log
        return self

    def __exit__(self, *_: object) -> None:
        for number in children(self.folder):
            os.kill(number, signal.SIGKILL)
        self.process.join()

    def send(self, rank: int, number: signal.Signals) -> int | None:
        """Sends a signal to a rank, and returns the exit code once all processes have ended."""
        parent = self.process.pid
        assert parent is not None
        os.kill(process_of_rank_1(parent, self.folder) if rank else parent, number)
        assert within(PATIENCE / 4, lambda: not self.process.is_alive()), self.log
        assert within(PATIENCE / 4, lambda: not children(self.folder))
        return self.process.exitcode


@pytest.mark.timeout(800)
def test_interrupt_leaves_no_process(tmp_path: Path) -> None:
    with Endless(tmp_path) as run:
        time.sleep(1)
        assert run.send(0, signal.SIGINT) == 1, run.log


@pytest.mark.timeout(800)
def test_sigterm_saves_and_ends_all(tmp_path: Path) -> None:
    with Endless(tmp_path, "--ckpt_path=last", "--trainer.log_every_n_steps=1") as run:
        assert run.send(1, signal.SIGTERM) == 143, run.log
    text = run.log
    assert "no checkpoint in runs/test yet; starting from the beginning" in text
    (stopped,) = re.findall(r"SIGTERM on rank 1: stopped after step (\d+)", text)
    assert max(losses(tmp_path / "runs" / "test" / "metrics.csv")) == int(stopped) - 1
    assert "Traceback" not in text
    assert verify(tmp_path / "runs" / "test" / "checkpoints" / "last").step


def test_the_last_checkpoint_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.RingCLI, "_run_subcommand", lambda self, subcommand: None)
    args = ["fit", "--config", str(write_config(tmp_path, CONFIG)), "--ckpt_path=last", "--trainer.devices=1"]
    assert train.RingCLI(args, []).config_init["fit"]["ckpt_path"] is None
    assert "no checkpoint in runs/test yet; starting from the beginning" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="ckpt_path runs/test/checkpoints: .* got no such file or folder"):
        train.RingCLI(["validate", *args[1:]], [])
    for run, written in (("test", 3), ("test-2", 5), ("test-3", 4), ("test-of-others", 6)):
        folder = tmp_path / "runs" / run / "checkpoints" / "last"
        folder.mkdir(parents=True)
        files = {name: {"size": 0, "sha256": ""} for name in ("state.pt", "tensors.json")}
        (folder / "manifest.json").write_text(json.dumps({"written": written, "files": files}))
    assert train.RingCLI(args, []).config_init["fit"]["ckpt_path"] == "runs/test-2/checkpoints"


@pytest.mark.parametrize(("gpus", "name", "devices"), [(0, "tiny-cpu", 2), (1, "h200-1", 1), (3, "h200-4", 3)])
def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    fit, flag, path, *rest = train.auto_arguments()
    assert (fit, flag, Path(path).stem) == ("fit", "--config", name)
    config = yaml.safe_load(Path(path).read_text())
    assert rest == ([f"--trainer.devices={gpus}"] if gpus else [])
    assert gpus or config["trainer"]["devices"] == devices


def test_a_run_without_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    del config["model"]["optimizer"]
    args = ["fit", "--config", str(write_config(tmp_path, config))]
    assert train.main([*args, "--trainer.max_steps=-1"]) == 2
    assert "Set it, or model.optimizer.max_steps." in capsys.readouterr().err


def test_discard_leaves_what_others_have_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "notes.txt").touch()
    train.discard(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "metrics.csv").touch()
    (folder / "config.yaml").touch()
    train.discard(folder)
    assert (folder / "config.yaml").exists()
    train.discard(tmp_path / "nowhere")


def test_free_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train.free_folder(folder) == folder
    for name, content in (("run", "checkpoints"), ("run-2", "tensorboard")):
        (tmp_path / name / content).mkdir(parents=True)
    assert train.free_folder(folder) == tmp_path / "run-3"


@pytest.mark.parametrize("names", [None, ["csv"], ["tensorboard", "csv"], ["csv", "wandb"]])
def test_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Any) -> None:
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(train, "WandbLogger", lambda name, folder, project: (name, folder, project))
    first, *more = train.make_loggers(tmp_path / "run", names)
    assert isinstance(first, train.CSVLogger)
    if names == ["csv", "wandb"]:
        assert more == [("run", tmp_path / "run", "ringflash")]
    else:
        assert [type(logger) for logger in more] == ([] if names == ["csv"] else [train.TensorBoardLogger])


def test_loggers_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="csv among them"):
        train.make_loggers(tmp_path, ["tensorboard"])
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ConfigError, match=f"pip install 'ringflash.*leave {name} out"):
            train.make_loggers(tmp_path, ["csv", cast("Any", name)])
    assert len(train.make_loggers(tmp_path)) == 1


def test_what_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.RingCLI, "_run_subcommand", lambda self, subcommand: None)
    args = ["fit", "--config", str(write_config(tmp_path, CONFIG)), "--loggers=[csv]"]
    trainer: Any = train.RingCLI([*args, "--profile.steps=[3, 4]"], []).trainer
    assert [type(logger) for logger in trainer.loggers] == [train.CSVLogger]
    assert [c.steps for c in trainer.callbacks if isinstance(c, train.Profile)] == [(3, 4)]
    assert train.main([*args, "--trainer.logger=false"]) == 2
    assert "Leave one of the two out." in capsys.readouterr().err
    assert train.main([*args, "--profile.steps=[1, 4]"]) == 2
    assert "profile.steps" in capsys.readouterr().err


def test_explain_lists_the_names_when_none_is_near() -> None:
    message = (
        "Problem with given class_path 'ringflash.train.lightning.optimizer.OptimizerConfig':\n"
        "  Option 'xyz' is not accepted"
    )
    error = train.explain(message, [])
    assert isinstance(error, ConfigError)
    assert "lr, max_steps" in str(error)
