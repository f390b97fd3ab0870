"""Extras of the package: the modules that each brings, and the error that names the extra of a missing one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ringflash.errors import RingflashError

# Each is imported by the part of the library that needs it; attention alone needs none of these.
EXTRAS = {
    "train": ("lightning", "jsonargparse", "safetensors", "filelock", "rich"),
    "plot": ("matplotlib", "rich"),
    "data": ("tokenizers", "pyarrow", "zstandard"),
    "trainer": ("transformers", "accelerate"),
    "hf": ("transformers",),
    "peft": ("peft",),
    "qlora": ("bitsandbytes",),
    "fp8": ("torchao",),
    "logging": ("tensorboard",),
    "wandb": ("wandb",),
}


class MissingExtra(RingflashError, ImportError):
    """A package that is not installed, and that an extra of ringflash brings.

    Args:
        needs: description of what needs the package, such as the name of a command.
        package: the missing package.
        extra: the extra that brings it.
    """

    def __init__(self, needs: str, package: str, extra: str) -> None:
        self.needs, self.extra = needs, extra
        super().__init__(f"{needs} needs {package}, which is not installed. {install(extra)}", name=package)

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[Any, ...]]:
        """Returns a form that can be sent between processes; an ImportError keeps `name` outside of its attributes."""
        return type(self), (self.needs, self.name, self.extra)


def install(extra: str) -> str:
    """Returns the sentence that says how an extra is installed."""
    return f"Install it with `pip install 'ringflash[{extra}]'`."


def is_older(version: str, least: str) -> bool:
    """Returns whether a version such as "5.17.0" belongs to an earlier release than `least`, such as "5.23"."""
    found, wanted = (tuple(int(part) for part in x.split(".")[:2] if part.isdigit()) for x in (version, least))
    return found < wanted


def require(extra: str, needs: str) -> None:
    """Raises `MissingExtra` unless the packages of `extra` are installed; `needs` names what needs them."""
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise MissingExtra(needs, package, extra)


def missing(error: ModuleNotFoundError, needs: str) -> MissingExtra | None:
    """Returns the error that names the extra of the module which `error` misses; None if no extra brings it."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in reversed(EXTRAS.items()) if package in packages), None)
    return None if extra is None else MissingExtra(needs, package, extra)
