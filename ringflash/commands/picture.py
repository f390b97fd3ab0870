"""File of a picture."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringflash import extras


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
