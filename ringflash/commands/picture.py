"""Pictures in files, apart from the options of commands because benchmarks and callbacks draw them too."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringflash import extras
from ringflash.errors import ArgumentError


class PictureFile(argparse.Action):
    """Option for the file of a picture, which is checked before a command begins to measure.

    Raises:
        ArgumentError: the file has not the suffix of a picture.
        MissingExtra: matplotlib is not installed.
    """

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        """Stores the path."""
        path, flag = Path(values), str(flag)
        if path.suffix not in (".png", ".svg", ".pdf"):
            remedy = f"Name it {path.with_suffix('.png')}." if path.name else "Name a file."
            raise ArgumentError(flag, expected="a .png, .svg or .pdf file", got=values, remedy=remedy)
        extras.require("plot", flag)
        setattr(namespace, self.dest, path)


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
