from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringflash.train.callbacks.trace import covered, timeline


def event(category: str, name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, **more}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda x: (x[0], x[0] + x[1])), max_size=8))
def test_union_of_intervals(intervals: list[tuple[int, int]]) -> None:
    assert covered(intervals) == len({tick for start, end in intervals for tick in range(start, end)})


def test_exposed_is_what_no_kernel_hides() -> None:
    seen = timeline(
        [
            event("cpu_op", "aten::mm", 0, 500),
            event("kernel", "attention", 100, 40),
            event("kernel", "attention", 150, 40),
            event("kernel", "ncclDevKernel_AllGather", 130, 30),  # 10 us lie between the kernels
            event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 190, 20),  # exposed, without a kernel
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 190, 20),  # hides no message
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 200, 5),  # hides 5 us of the message
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 220, 10, args={"stream": 20}),  # from a peer
            event("kernel", "adam", 250, 50),
            event("ac2g", "flow", 0, 0) | {"ph": "s"},
        ]
    )
    assert seen is not None
    assert (seen.seconds, seen.compute) == pytest.approx((200e-6, 135e-6))
    assert (seen.communication, seen.exposed, seen.idle) == pytest.approx((60e-6, 35e-6, 30e-6))
    assert [(cost.name, cost.calls) for cost in seen.kernels[:2]] == [("attention", 2), ("adam", 1)]
    assert seen.kernels[0].seconds == pytest.approx(80e-6)


def test_a_trace_without_a_gpu() -> None:
    assert timeline([event("cpu_op", "aten::mm", 0, 500), {"ph": "M", "name": "process_name"}]) is None
