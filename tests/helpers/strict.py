"""Warnings as errors in the processes that tests start, as in pytest's own process by pyproject.toml."""

from __future__ import annotations

import warnings

# Warnings of torch about its own code: a signature that Python 3.12 deprecates, and one release of Python 3.13.
# Its compiler imports a module that it deprecates itself; on machines with a GPU, torch.compiler.reset() does so too.
# Lightning warns on a machine with a GPU when a test trains on the CPU.
KNOWN = (
    r"the \(type, exc, tb\) signature of throw\(\) is deprecated",
    "Guards may run slower on Python 3.13.0",
    r".*torch\.jit\.script_method. is deprecated",
    "GPU available but not used",
)


def make_warnings_errors() -> None:
    """Makes every warning except the known ones an error."""
    warnings.simplefilter("error")
    for message in KNOWN:
        warnings.filterwarnings("ignore", message=message)
