"""Number of functions of the library that a warm call runs, written to the test report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringflash as rf
from ringflash.ops.attention import _call
from tests.helpers.frames import frames_of


def _flash_attention() -> Callable[[], object]:
    q, mask = torch.randn(1, 64, 4, 32), rf.Causal()
    return lambda: rf.flash_attention(q, q, q, mask=mask)


def _ring_attention() -> Callable[[], object]:
    q, mask, context = torch.randn(1, 64, 4, 32), rf.Causal(), rf.ContextParallel.local(2)
    return lambda: rf.ring_attention(q, q, q, context, mask=mask)


def _operator() -> Callable[[], object]:
    q, context = torch.randn(1, 64, 4, 32), rf.ContextParallel.local(1)
    inputs = q, q, q, *_call(context.name, rf.Causal(), 0.25, None, 0.0, rf.AttentionOptions())
    return torch.no_grad()(lambda: torch.ops.ringflash.attention.default(*inputs))  # as a compiled step calls it


@pytest.mark.parametrize(
    ("make", "most_frames", "most_files"),
    [(_flash_attention, 40, 8), (_ring_attention, 200, 16), (_operator, 30, 13)],
)
def test_frames_of_a_warm_call(
    make: Callable[[], Callable[[], object]], most_frames: int, most_files: int, record_property: Any
) -> None:
    frames = frames_of(make())
    files = {file for file, _ in frames}
    record_property("frames", len(frames))
    record_property("files", len(files))
    print(f"{make.__name__}: {len(frames)} frames in {len(files)} files")
    assert len(frames) <= most_frames
    assert len(files) <= most_files
