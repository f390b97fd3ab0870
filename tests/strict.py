"""Warnings are errors in processes that tests start, as pyproject.toml makes them in pytest's own."""

from __future__ import annotations

import warnings

# Messages of torch that concern its own code: a signature that Python 3.12 deprecates, and one release of Python 3.13.
KNOWN = (r"the \(type, exc, tb\) signature of throw\(\) is deprecated", "Guards may run slower on Python 3.13.0")


def make_warnings_errors() -> None:
    """Turns every warning but the known ones into an error."""
    warnings.simplefilter("error")
    for message in KNOWN:
        warnings.filterwarnings("ignore", message=message)
