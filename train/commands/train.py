"""`ringflash train`: LightningCLI over LanguageModel, or another module, and TextDataModule on a ring of ranks."""

from __future__ import annotations

import atexit
import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from argparse import ArgumentError as ParserError
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from ringflash import extras
from ringflash.errors import ArgumentError, CheckpointError, ConfigError, RingflashError
from ringflash.train.callbacks.checkpointing import LastCheckpoint
from ringflash.train.callbacks.loss_by_position import LossByPosition
from ringflash.train.callbacks.profiler import Profile
from ringflash.train.callbacks.progress import RingProgressBar
from ringflash.train.callbacks.report import Report
from ringflash.train.callbacks.summary import RunSummary
from ringflash.train.callbacks.throughput import Throughput
from ringflash.train.checkpoint.manifest import MANIFEST, complete_in, is_url, locate, read_manifest
from ringflash.train.commands.arguments import auto_arguments, help_text, with_config_files
from ringflash.train.commands.class_paths import check_arguments
from ringflash.train.data.module import TextDataModule
from ringflash.train.lightning.interrupt import Interrupt
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.optimizer import OptimizerConfig
from ringflash.train.lightning.preemption import Preempted, Preemption
from ringflash.train.lightning.ring_module import RingModule, refused_precision
from ringflash.train.lightning.strategy import RingAttentionStrategy
from ringflash.train.lightning_private import UntrustingCLI
from ringflash.train.remote import newest_at

CALLBACKS = {"throughput": Throughput, "report": Report, "summary": RunSummary, "profile": Profile}
STRATEGY = "ring_attention"
LAST = "last"  # value of --ckpt_path for the newest complete checkpoint of the runs in run_dir
# A child that fails waits this long before it prints its error, so that rank 0 can print the same error first.
CHILD_GRACE_SECONDS = 3.0
CHILD_EXIT_SECONDS = 20.0
RESULTS = ("metrics.csv", "checkpoints")  # in a run's folder after training
PREPARATIONS = ("config.yaml", "hparams.yaml", "tensorboard", "wandb", "tokenizer")  # written before training
LogName = Literal["csv", "tensorboard", "wandb"]


class NoLanguageModel(ConfigError):
    """Options of `ringflash finetune` where a LanguageModel would train."""


class RingCLI(UntrustingCLI):
    """Builds and runs the Trainer from `args`; `trainers` receives it before the run starts.

    Raises:
        ConfigError: before anything is imported, for a class or function that configurations may not name.
    """

    name = "train"  # of the command
    module: type[RingModule] = LanguageModel
    data: type[pl.LightningDataModule] = TextDataModule
    run_callbacks: Mapping[str, type[pl.Callback]] = CALLBACKS
    samples_text = True  # whether the summary has a sample of text, which needs a LanguageModel

    def __init__(self, args: Sequence[str], trainers: list[pl.Trainer]) -> None:
        check_arguments(args)
        self._trainers = trainers
        self._folder: Path | None = None
        # Errors come back as exceptions instead of a usage text of two hundred options.
        options: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
        try:
            super().__init__(
                self.module,
                self.data,
                args=list(args),
                # Children of one run must draw the same seed, so there is a fixed default.
                seed_everything_default=0,
                trainer_defaults={"strategy": STRATEGY, "use_distributed_sampler": False},
                parser_kwargs=options | {name: dict(options) for name in self.subcommands()},
                save_config_kwargs={"overwrite": True},
                auto_configure_optimizers=False,
                # Checkpoints hold no pickled arguments to rebuild a module from.
                load_from_checkpoint_support=False,
            )
        finally:
            self._discard_unused()

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns the Trainer's methods that this module and data support."""
        return {name: skip for name, skip in LightningCLI.subcommands().items() if name != "predict"}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the run's folder and the callbacks of every run."""
        parser.add_argument(
            "--run_dir",
            default="runs/ringflash",
            help="Folder of the run's logs, checkpoint and report; a number is appended if there is a run in it.",
        )
        parser.add_class_arguments(LastCheckpoint, "checkpoint")
        parser.add_argument(
            "--loggers",
            type=list[LogName] | None,
            default=None,
            help="Logs to keep: csv, which the report is drawn from, tensorboard, wandb (default: csv, and tensorboard "
            "where it is installed).",
        )
        for name, callback in self.run_callbacks.items():
            parser.add_class_arguments(callback, name)
        if not self.samples_text:
            parser.set_defaults({"summary.sample_tokens": 0})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses `args`; Lightning's own method would warn if sys.argv holds arguments too.

        Raises:
            ConfigError: an unknown name, with the nearest known one, or a value that does not fit.
        """
        try:
            self.config = parser.parse_args(args)
            given = parser.parse_args(args, defaults=False)
        except ParserError as error:
            if self.module is LanguageModel and (other := of_transformers(str(error))) is not None:
                raise other from error
            raise explain(str(error), self.option_names(args[0] if args else None), self.name) from error
        self._seed_parts(given)
        optimizer = f"{self.config.subcommand}.model.optimizer"
        if self.config.get(optimizer) is not None and f"{optimizer}.max_steps" not in given:
            del self.config[f"{optimizer}.max_steps"]  # this is OptimizerConfig's default, not the Trainer's value

    def _seed_parts(self, given: Any) -> None:
        """Gives the seeds of weights and of the data's order the value of `seed_everything`, where they have none."""
        seed = given.get(f"{self.config.subcommand}.seed_everything")
        if seed is None or isinstance(seed, bool):
            return
        for name in ("model.seed", "data.seed"):
            key = f"{self.config.subcommand}.{name}"
            if key in self.config and key not in given:
                self.config[key] = seed

    def before_instantiate_classes(self) -> None:
        """Makes Lightning save the configuration next to the logs of a run, if the run has them."""
        if self.subcommand != "fit" or self._value(self.config, "trainer.logger") is False:
            self.save_config_callback = None

    def instantiate_classes(self) -> None:
        """Builds module, data and Trainer; by default the learning-rate schedule ends with the run."""
        self._written, self.config = self.config, self.config.clone()
        end_schedule(self.config[str(self.subcommand)], fit=self.subcommand == "fit")
        try:
            super().instantiate_classes()
        except ValueError as error:
            # The parser wraps a component's own error, so this looks for it in the chain of causes.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, RingflashError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Adds loggers, callbacks and the progress bar, unless the configuration sets or forbids them.

        Raises:
            ConfigError: loggers next to trainer.logger, or a precision that the ring's strategy refuses.
        """
        # The saved configuration keeps open values open, so that it also fits runs of other lengths.
        self.config = self._written
        config = self._value(self.config_init, "trainer")
        check_precision(config)
        fit = self.subcommand == "fit"
        callbacks = config.get("callbacks") or []
        callbacks = [*callbacks] if isinstance(callbacks, list) else [callbacks]
        callbacks += [self._value(self.config_init, name) for name in self.run_callbacks]
        if config.get("enable_checkpointing") is not False:
            callbacks.append(self._value(self.config_init, "checkpoint"))
        if config.get("enable_progress_bar") is not False:
            callbacks.append(RingProgressBar())
        kwargs["callbacks"] = [*callbacks, LossByPosition(), Interrupt(), Preemption()]
        loggers = self._value(self.config_init, "loggers")
        if config.get("logger") in (None, True):
            self._folder = free_folder(Path(self._value(self.config_init, "run_dir"))) if fit else None
            kwargs["logger"] = make_loggers(self._folder, loggers) if self._folder else False
        elif loggers is not None:
            remedy = "Leave one of the two out."
            raise ConfigError("loggers", expected="nothing beside trainer.logger", got=loggers, remedy=remedy)
        # Lightning's summary would count nothing, because the decoder is built after the ranks have connected.
        kwargs["enable_model_summary"] = bool(config.get("enable_model_summary"))
        return super().instantiate_trainer(**kwargs)

    def after_instantiate_classes(self) -> None:
        """Hands the trainer out, and checks the initial checkpoint before other processes exist."""
        self._trainers.append(self.trainer)
        if (path := self._value(self.config_init, "ckpt_path")) is not None:
            sharded = isinstance(self.trainer.strategy, RingAttentionStrategy)
            if path == LAST and sharded:
                path = self._newest_checkpoints()
            if path is not None:
                check_checkpoint(str(path), sharded=sharded)

    def _newest_checkpoints(self) -> Path | str | None:
        """Replaces `LAST` in the configuration by the newest checkpoints; a fit without any starts from scratch.

        A machine without a run's folder takes the checkpoints that were copied to `checkpoint.remote`.
        """
        folder = Path(self._value(self.config_init, "run_dir"))
        path: Path | str | None = newest_checkpoints(folder)
        if path is None and (remote := getattr(self._value(self.config_init, "checkpoint"), "remote", None)):
            with suppress(CheckpointError):  # the start of the training says what cannot be reached
                newest_at(remote, "checkpoint.remote")
                path = str(remote)
        if path is not None and local_rank() == 0:
            print(f"ringflash: resuming from {path}", file=sys.stderr, flush=True)
        if path is None and self.subcommand != "fit":
            path = folder / "checkpoints"  # does not exist, so the check below raises
        elif path is None and local_rank() == 0:
            print(f"ringflash: no checkpoint in {folder} yet; starting from the beginning", file=sys.stderr, flush=True)
        self.config_init[str(self.subcommand)]["ckpt_path"] = path and str(path)
        return path

    def _value(self, config: Any, name: str) -> Any:
        """Returns the value of `name` in the subcommand's part of `config`, or None."""
        return config[str(self.subcommand)].get(name)

    def _discard_unused(self) -> None:
        """Removes the folder of a run that failed before its first step, or that was at its end already."""
        if self._folder is None or not self._trainers:
            return
        trained = self._value(self.config_init, "summary").trained and self.trainer.global_step
        if self.trainer.is_global_zero and not trained:
            discard(self._folder)


def end_schedule(config: Any, *, fit: bool) -> None:
    """Sets an open optimizer.max_steps to the Trainer's, or to the end of the warmup if that is later.

    Raises:
        ConfigError: the Trainer has no max_steps either, and `fit` is true.
    """
    optimizer = config.model.optimizer
    if optimizer is not None and "max_steps" in optimizer:
        return
    steps = config.trainer.max_steps
    if fit and steps < 0:
        raise ConfigError(
            "trainer.max_steps",
            expected="a number of steps, at the last of which the learning rate is at its lowest",
            got=steps,
            remedy="Set it, or model.optimizer.max_steps.",
        )
    warmup_steps = OptimizerConfig.warmup_steps if optimizer is None else optimizer.warmup_steps
    config["model.optimizer.max_steps"] = max(steps, warmup_steps + 1)


def check_precision(trainer: Any) -> None:
    """Raises ConfigError for a precision that RingAttentionStrategy refuses, before the Trainer replaces it."""
    precision, strategy = trainer.get("precision"), trainer.get("strategy")
    sharded = strategy == STRATEGY or isinstance(strategy, RingAttentionStrategy)
    if sharded and precision not in (None, 32, "32", "32-true"):
        raise refused_precision(precision)


def check_checkpoint(path: str, *, sharded: bool) -> None:
    """Raises CheckpointError unless `path` is a checkpoint of the strategy.

    RingAttentionStrategy takes a checkpoint folder, or a folder of such folders; other strategies take a file. The
    content is compared with the manifest when it is loaded. A URL stands for such a folder.
    """
    if sharded and is_url(path):
        newest_at(path, "ckpt_path")
        return
    found, named = locate(Path(path)), path in ("best", "hpc", LAST)  # Lightning reads these as other files
    there = (found / MANIFEST).is_file() or complete_in(found) if sharded else zipfile.is_zipfile(found)
    if there and not named:
        return
    got = "no such file or folder"
    if found.exists() and not named:
        got = f"a folder without {MANIFEST}" if found.is_dir() else "a file"
    raise CheckpointError(
        f"ckpt_path {path}",
        expected="a checkpoint folder, as in runs/tiny-cpu/checkpoints/last" if sharded else "a file of Lightning's",
        got=got,
        remedy="Pass a checkpoint that was saved with this strategy.",
    )


def newest_checkpoints(folder: Path) -> Path | None:
    """Returns the folder of the newest complete checkpoint in the runs `folder`, folder-2, ...; None without one."""
    name = re.compile(rf"{re.escape(folder.name)}(-\d+)?")
    runs = [run for run in folder.parent.glob("*") if name.fullmatch(run.name)]
    newest = [found[0] for run in runs if (found := complete_in(run / "checkpoints"))]
    return max(newest, key=lambda path: read_manifest(path).written).parent if newest else None


def free_folder(folder: Path) -> Path:
    """Returns `folder`, or the first of folder-2, folder-3, ... without a run in it."""
    number, candidate = 1, folder
    while any((candidate / name).exists() for name in (*RESULTS, *PREPARATIONS)):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def discard(folder: Path) -> None:
    """Removes the files of a run that never trained from `folder`, and then the folder, if it is empty."""
    if not folder.is_dir() or any((folder / name).exists() for name in RESULTS):
        return
    for name in PREPARATIONS:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def make_loggers(folder: Path, names: Sequence[LogName] | None = None) -> list[Logger]:
    """Makes the loggers `names` in `folder`, the CSV first; by default CSV, and TensorBoard if it is installed.

    Raises:
        ConfigError: `names` lacks csv, or the package of a logger is not installed.
    """
    # Uses empty names, because Lightning's versions would nest a run's files three folders deep. Each row is written at
    # once, so that a report can be made during the run.
    loggers: list[Logger] = [CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)]
    if names is None:
        names = ["csv"]
        if importlib.util.find_spec("tensorboard") is not None:
            names = ["csv", "tensorboard"]
        elif local_rank() == 0:
            text = "No TensorBoard log: install ringflash[logging] to have one. The CSV log is complete."
            print(text, file=sys.stderr)
    if "csv" not in names:
        raise ConfigError("loggers", expected="csv among them", got=names, remedy="Reports are drawn from it: add csv.")
    for name, extra in (("tensorboard", "logging"), ("wandb", "wandb")):
        if name in names and importlib.util.find_spec(name) is None:
            remedy = f"{extras.install(extra)} Or leave {name} out."
            raise ConfigError("loggers", expected=f"{name} installed", got="no such package", remedy=remedy)
    if "tensorboard" in names:
        loggers.append(TensorBoardLogger(folder, name="", version="tensorboard"))
    if "wandb" in names:
        loggers.append(WandbLogger(folder.name, folder, project="ringflash"))
    return loggers


def explain(message: str, known: Iterable[str], command: str = "train") -> ConfigError:
    """Converts an error of jsonargparse to the library's own, with a suggestion for an unknown name."""
    see_help = f"See `ringflash {command} fit --help`."
    accepted = {name.replace("-", "_") for name in known}
    if match := re.search(r"given class_path '([\w.]+)':\s+Option '([^']+)' is not accepted", message):
        name, accepted = match[2], {*_parameters(match[1])}
    elif match := re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.-]+)", message):
        name = match[1].replace("-", "_")
    elif match := re.search(r"argument subcommand: invalid choice: '([^']+)'", message):
        name = match[1]
    else:
        return ConfigError(
            "configuration",
            expected="names and values that the components accept",
            got=message.rstrip("."),
            remedy=see_help,
        )
    few, names = len(accepted) <= 12, ", ".join(sorted(accepted))
    near = difflib.get_close_matches(name, accepted, n=1, cutoff=0.5)
    return ConfigError(
        name,
        expected="a known name",
        got="one that nothing accepts",
        remedy=f"Did you mean {near[0]}?" if near else f"Known are {names}." if few else see_help,
    )


def of_transformers(message: str) -> NoLanguageModel | None:
    """Returns the error for options of `ringflash finetune` in an error of jsonargparse; None if there are none."""
    remedy = "Run `ringflash finetune` with these arguments: it trains models of transformers, with LoRA or without."
    if re.search(r"model\.lora\b", message):
        expected, got = "nothing: LanguageModel trains all its weights", "options of LoRA"
        return NoLanguageModel("model.lora", expected=expected, got=got, remedy=remedy)
    if re.search(r'"model\.model".*<class \'ringflash\.train\.models\.config\.ModelConfig\'>', message, re.DOTALL) and (
        given := re.search(r"Given value type: <class 'str'>\s+Given value: (.*)", message)
    ):
        remedy += " To begin with a model's weights here, set model.model to null and model.init_from to its folder."
        return NoLanguageModel("model.model", expected="the shape of a decoder", got=given[1], remedy=remedy)
    return None


def _parameters(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def local_rank() -> int:
    """Returns 0 in the process that the user started, and in the first process of torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def main(argv: Sequence[str], cli: type[RingCLI] = RingCLI) -> int:
    """Runs `ringflash train ...`; returns its exit code: 2 after an error of usage, 1 of the run, 143 after SIGTERM."""
    args = [arg for arg in argv if arg != "--debug"]
    debug = len(args) < len(argv)
    if args[:1] in (["-h"], ["--help"]):
        print(help_text(cli.name))
        return 0
    if not debug:
        quieten()
    trainers: list[pl.Trainer] = []
    # Ranks synchronise once more at exit. This process waits for its children after that: atexit runs last-in first.
    children: list[subprocess.Popen[bytes]] = []
    atexit.register(stop_children, children, at_once=False)
    failed = True
    try:
        cli(with_config_files([*auto_arguments(), *args[1:]] if args[:1] == ["auto"] else args), trainers)
        failed = False
    except Preempted as ended:
        failed = False  # the other processes end in the same way
        return int(ended.code or 0)
    except (RingflashError, MisconfigurationException) as error:
        if debug:
            raise
        rank = local_rank()
        if rank:
            time.sleep(CHILD_GRACE_SECONDS)
        remedy = " Pass --trainer.accelerator=cpu to train without a GPU." if "backend found" in str(error) else ""
        print(f"ringflash{f' (rank {rank})' if rank else ''}: {error}{remedy}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ArgumentError | MisconfigurationException) else 1
    finally:
        children += take_children(trainers)
        if failed:
            stop_children(children, at_once=True)
    return 0


def take_children(trainers: Sequence[pl.Trainer]) -> list[subprocess.Popen[bytes]]:
    """Returns the processes that Lightning launched, and makes Lightning stop watching them.

    When one of them exits with a code, Lightning's watching thread kills this process, which may be about to exit with
    the same code.
    """
    taken: list[subprocess.Popen[bytes]] = []
    for trainer in trainers:
        launched = getattr(trainer.strategy.launcher, "procs", [])  # Lightning's thread watches the same list
        taken += launched
        launched.clear()
    return taken


def stop_children(children: Sequence[subprocess.Popen[bytes]], *, at_once: bool) -> None:
    """Waits until the processes have ended, and kills them at the deadline, or at once."""
    deadline = time.monotonic() + (0 if at_once else CHILD_EXIT_SECONDS)
    for process in children:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def quieten() -> None:
    """Silences Lightning's messages about itself at every start."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Advice on loader workers: slices of a memory-mapped file need none.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning's own use of a name that PyTorch has moved.
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
