"""Counts the library's Python frames of a call, as a measure of how much a reader has to follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ringflash

ROOTS = tuple(f"{Path(ringflash.__file__).parents[1] / folder}{os.sep}" for folder in ("ringflash", "kernels", "train"))

INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")  # frames of their own in Python 3.11 alone


def frames_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Returns the file and the name of each function of the library that `call` runs in this thread, in order.

    The first calls fill caches, so `call` runs three times before it is counted.
    """
    for _ in range(3):
        call()
    frames: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = os.path.realpath(frame.f_code.co_filename)
        if event == "call" and file.startswith(ROOTS) and frame.f_code.co_name not in INLINED:
            frames.append((file, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return frames
