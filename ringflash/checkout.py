"""A check that the package is complete, in a file of its own because it runs before any other import.

In a checkout, two of the package's folders are symbolic links.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec


def check_folders(package: str, paths: Sequence[str]) -> None:
    """Raises ImportError unless `kernels` and `train` are folders of this copy of the package.

    Without these folders Python would ask further finders, and an editable install could import another copy's files.

    Args:
        package: the name of the package that is being imported.
        paths: its `__path__`.
    """
    for folder in ("kernels", "train"):
        spec = find_spec(f"{package}.{folder}")  # also right for a package in an archive
        found = [] if spec is None else spec.submodule_search_locations or []
        if any(os.path.dirname(location) in paths for location in found):
            continue
        path = os.path.join(paths[0], folder)
        raise ImportError(
            f"{path}: expected a folder, got {'a file' if os.path.exists(path) else 'nothing'}. This checkout has no "
            "symbolic links: run `git config core.symlinks true` and make a new checkout, or install a wheel with "
            "`pip install ringflash`.",
            name=f"{package}.{folder}",
        )
