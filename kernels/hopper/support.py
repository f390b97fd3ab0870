"""Which versions of Triton the Hopper kernels run under; `versions` has what differs between them.

This is a file of its own because it needs no Gluon: a machine whose Triton has none asks here first.
"""

from __future__ import annotations

SUPPORTED = ((3, 6), (3, 7), (3, 8), (3, 9))  # Gluon is experimental: each release is tried before it is added


def release_of(version: str) -> tuple[int, int]:
    """Major and minor of a version such as "3.9.0" or "3.8.0+git1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def refusal(version: str) -> str | None:
    """Reason why the kernels do not run under this version of Triton, or None."""
    if release_of(version) in SUPPORTED:
        return None
    names = [f"{major}.{minor}" for major, minor in SUPPORTED]
    return f"they run under triton {', '.join(names[:-1])} and {names[-1]}, not {version}"
