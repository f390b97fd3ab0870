"""Check of configurations: refuses foreign classes and functions before the parser imports them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ringflash.errors import ConfigError, RingflashError

LIGHTNING_CLASSES: dict[str, tuple[str, ...]] = {
    "callbacks": (
        "DeviceStatsMonitor",
        "EMAWeightAveraging",
        "EarlyStopping",
        "GradientAccumulationScheduler",
        "LearningRateMonitor",
        "ModelCheckpoint",
        "ModelSummary",
        "OnExceptionCheckpoint",
        "RichModelSummary",
        "RichProgressBar",
        "TQDMProgressBar",
        "Timer",
    ),
    "loggers": ("CSVLogger", "CometLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
    "profilers": ("AdvancedProfiler", "PassThroughProfiler", "PyTorchProfiler", "SimpleProfiler"),
    "strategies": ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"),
    "plugins": (
        "DoublePrecision",
        "FSDPPrecision",
        "HalfPrecision",
        "LightningEnvironment",
        "MixedPrecision",
        "Precision",
        "SLURMEnvironment",
        "TorchElasticEnvironment",
    ),
}
# Text parameters of ringflash and of these classes, which the parser never imports.
TEXT_KEYS = frozenset(
    {
        "cache_dir",
        "ckpt_path",
        "corpus",
        "default_root_dir",
        "dirpath",
        "filename",
        "init_from",
        "monitor",
        "name",
        "project",
        "prompt",
        "run_dir",
        "save_dir",
        "targets",
        "tokenizer",
        "version",
    }
)
OWN_NAME = "RingAttentionStrategy"  # a short name that the parser finds among the imported subclasses
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
MAX_CONFIG_BYTES = 4 << 20
REMEDY = "Build the Trainer in a program of your own to use other classes or functions; docs/security.md lists these."


def check_arguments(args: Sequence[str]) -> None:
    """Checks a command line and the configuration files that it names, without importing anything that they name.

    Raises:
        ConfigError: a class path neither of ringflash nor among the allowed Lightning classes; a function by its dotted
            path; a YAML tag; a configuration file that is missing or unreadable.
    """
    seen: set[tuple[int, str]] = set()
    keep: list[Any] = []  # parsed values stay alive, because `seen` holds their ids
    for option, value in _options(args):
        if option in ("config", "c"):
            content, folder = _read_config(value)
        else:
            content, folder = value, Path()
        keep.append(content)
        _check("" if option in ("config", "c") else option, content, folder, seen, keep)


def is_allowed(class_path: str) -> bool:
    """Returns whether a class path is allowed; imports modules of ringflash only."""
    module, _, name = class_path.rpartition(".")
    if not module:
        return any(name in names for names in LIGHTNING_CLASSES.values()) or name == OWN_NAME
    if module.split(".")[0] == "ringflash":
        try:
            found = getattr(importlib.import_module(module), name, None)
        except (ImportError, RingflashError):
            return False
        # Modules that ringflash imports, and their classes, are reachable as its attributes, so this checks the origin.
        return inspect.isclass(found) and found.__module__.split(".")[0] == "ringflash"
    return any(
        re.fullmatch(rf"lightning\.pytorch\.{group}(\.[a-z]\w*)*", module) is not None and name in names
        for group, names in LIGHTNING_CLASSES.items()
    )


def _options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and value of each option in any notation, and other arguments with an empty name."""
    name = ""
    for arg in args:
        if match := re.fullmatch(r"--?([A-Za-z][\w.\-]*)\+?(?:=(.*))?", arg, re.DOTALL):
            name = match[1]
            if match[2] is not None:
                yield name, match[2]
                name = ""
            # The parser reads `-cFILE` as `-c FILE`.
            elif name.startswith("c") and name != "config" and not arg.startswith("--") and name != "c":
                yield "c", name[1:]
        else:
            yield name, arg.split("=", 1)[1] if arg.startswith("-") and "=" in arg else arg
            name = ""


def _read_config(value: str) -> tuple[Any, Path]:
    """Reads a configuration file, or a configuration given inline instead of a path."""
    path = Path(value)
    if _is_file(path):
        return _parse(path.read_bytes(), value), path.parent
    content = _parse(value.encode(), "--config") if is_inline(value) else value
    if not isinstance(content, dict):
        raise ConfigError(
            "--config",
            expected="a YAML file",
            got=f"{value}, which does not exist" if not path.exists() else f"{value}, which is no file",
            remedy=f"Name an existing file; the working folder is {Path.cwd()}.",
        )
    return content, Path()


def is_inline(value: str) -> bool:
    """Returns whether a configuration is given inline instead of a path."""
    return "\n" in value or ":" in value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _parse(content: bytes, name: str) -> Any:
    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            name,
            expected="plain YAML without tags",
            got=" ".join(str(error).split()) or type(error).__name__,
            remedy="Correct the file at that line.",
        ) from error


def _check(key: str, value: Any, folder: Path, seen: set[tuple[int, str]], keep: list[Any]) -> None:
    """Checks a value and everything in it, including texts that are YAML and files that texts name."""
    stack = [(key, value, folder)]
    while stack:
        key, value, folder = stack.pop()
        leaf = key.replace("-", "_").rpartition(".")[2].removesuffix("+")
        if isinstance(value, dict | list):
            # An anchor may be used again, even within itself. A list takes its key from each place of use, so its
            # strings may be text in one place and class names in another.
            place = id(value), leaf if leaf == "class_path" else "text" if leaf in TEXT_KEYS else ""
            if place in seen:
                continue
            seen.add(place)
            items = value.items() if isinstance(value, dict) else ((key, item) for item in value)
            inner = f"{key}." if key and isinstance(value, dict) else ""
            stack += [(f"{inner}{name}", item, folder) for name, item in items]
            continue
        if not isinstance(value, str):
            continue
        text = value.strip()
        if leaf == "class_path":
            if not is_allowed(text):
                raise _refused(key, text)
            continue
        if leaf in TEXT_KEYS:
            continue
        if DOTTED.fullmatch(text) and _is_importable(text) and not is_allowed(text):
            raise _refused(key, text)
        for inside, where in _contents(text, folder):
            keep.append(inside)
            stack.append((key, inside, where))


def _contents(text: str, folder: Path) -> Iterator[tuple[Any, Path]]:
    """Yields other contents that the parser could read from a text: YAML in it, and the file that it names."""
    paths = {Path(text), folder / text} if text and "\n" not in text else set[Path]()
    files = [path for path in paths if _is_file(path)]
    for path in files:
        if (size := path.stat().st_size) > MAX_CONFIG_BYTES:  # the parser has no such limit
            expected, remedy = f"a file of at most {MAX_CONFIG_BYTES} bytes", "Shorten it, or rename the file."
            raise ConfigError("configuration", expected=expected, got=f"{path} of {size} bytes", remedy=remedy)
    for content, where in [(text, folder), *((path.read_bytes(), path.parent) for path in files)]:
        try:
            parsed = yaml.safe_load(content)
        except (yaml.YAMLError, ValueError, RecursionError):
            if isinstance(content, str) and re.search(r"!!?[\w/]*python", content):
                raise ConfigError(
                    "configuration", expected="plain YAML without tags", got=text[:80], remedy="Leave the tag out."
                ) from None
            continue  # plain text, or an error that the parser reports; its loader is safe too
        if isinstance(parsed, dict | list) or (isinstance(parsed, str) and parsed != text):
            yield parsed, where


def _is_importable(dotted: str) -> bool:
    """Returns whether the first name of a dotted text is a module; it finds the module without running it."""
    try:
        return importlib.util.find_spec(dotted.split(".")[0]) is not None
    except (ImportError, ValueError):
        return True  # an imported module without a specification


def _refused(key: str, got: str) -> ConfigError:
    names = {name: f"lightning.pytorch.{group}.{name}" for group, names in LIGHTNING_CLASSES.items() for name in names}
    names[OWN_NAME] = "ringflash.train.lightning.strategy.RingAttentionStrategy"
    near = difflib.get_close_matches(got.rpartition(".")[2], names, n=1, cutoff=0.7)
    return ConfigError(
        key or "configuration",
        expected="a class of ringflash, or one of Lightning's that configurations may name",
        got=got[:200],
        remedy=f"Did you mean {names[near[0]]}? {REMEDY}" if near else REMEDY,
    )
