"""Pictures in files, apart from the options of commands because benchmarks and callbacks draw them too."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringflash import extras
from ringflash.errors import ArgumentError


def check_picture(flag: str, path: Path | None, example: str) -> None:
    """Raises ArgumentError unless `path`, if it is given, has the suffix of a picture; `example` has one."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        remedy = f"Name it {example}."
        raise ArgumentError(flag, expected="a .png, .svg or .pdf file", got=path, remedy=remedy)
    if path is not None:
        extras.require("plot", flag)


@contextmanager
def picture(path: Path, size: tuple[float, float], dpi: int = 110) -> Generator[Any, None, None]:
    """Yields a matplotlib figure of `size` in inches, and saves it to `path` at the end."""
    # Avoids pyplot, which keeps figures and picks a window system. Imported here because fonts take a second to load.
    extras.require("plot", f"The picture {path.name}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
