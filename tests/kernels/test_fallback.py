"""Limits of the kernels for sm_90, and messages about slower kernels, with faked GPUs and versions; no kernel runs."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ringflash.kernels import fallback
from ringflash.kernels.fallback import is_viewable
from ringflash.kernels.hopper.backend import HOPPER
from ringflash.kernels.select import _in_triton
from ringflash.kernels.triton import backend
from ringflash.kernels.triton.backend import TRITON
from tests.kernels.hopper.test_backend import KNOWN, UNKNOWN, Call, call, calls, innermost, run_backward, run_forward

__all__ = ["calls"]  # re-exports a fixture

LOGGER = "ringflash.kernels"


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Returns the messages logged from now on, with the once-only reports reset as in a new process."""
    for report in (fallback.report_device, fallback.report_feature):
        report.cache_clear()
    caplog.set_level(logging.INFO, LOGGER)
    yield caplog
    for report in (fallback.report_device, fallback.report_feature):
        report.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes a CUDA device of capability 9.0; no kernel is launched on it."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(backend, "check_supported", lambda device, dtype: None)


def choose(name: str, index: int = 0) -> object:
    return _in_triton.__wrapped__(name, torch.device("cuda", index), torch.bfloat16)


@pytest.mark.usefixtures("gpu")
def test_another_triton_is_reported_once_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triton.__version__", "2.1.0")
    assert choose("auto") is TRITON
    assert choose("auto", 1) is TRITON
    (record,) = caplog.records
    assert (record.name, record.levelno) == (LOGGER, logging.WARNING)
    assert "not 2.1.0" in record.getMessage()
    assert "Install a version of triton" in record.getMessage()


@pytest.mark.usefixtures("gpu")
def test_another_capability_is_reported_before_the_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triton.__version__", "2.1.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    choose("auto")
    (record,) = caplog.records
    assert "compute capability 9.0, not 8.0. Use an H100 or H200" in record.getMessage()


@pytest.mark.usefixtures("gpu")
def test_kernels_that_the_caller_names_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triton.__version__", "2.1.0")
    assert choose("triton") is TRITON
    assert caplog.records == []


REPORTED = {
    "softcap": "softcap is set",
    "alibi": "ALiBi slopes are set",
    "dropout": "attention dropout is set",
    "bitmap": "the mask is no interval",
    "tree": "the mask is no interval",
    "wider values": "headdim and headdim_v differ",
    "narrower values": "headdim and headdim_v differ",
    "float32": "neither bfloat16 nor float16",
    "wider than 256": "or above 256",
    "rows of 72 bytes": "no multiple of 16",
    "chunks out of order": "ascending",
    "headdim not innermost": ".contiguous()",
    "unaligned": ".contiguous()",
    "expanded": ".contiguous()",
}


@pytest.mark.parametrize("run", [run_forward, run_backward])
@pytest.mark.parametrize("name", REPORTED)
def test_a_feature_that_the_fast_kernels_lack_is_reported_once(
    calls: list[Any], caplog: pytest.LogCaptureFixture, name: str, run: Callable[[Call], None]
) -> None:
    for _ in range(2):
        run(UNKNOWN[name])
    (record,) = caplog.records
    assert REPORTED[name] in record.getMessage()
    assert record.levelno == (logging.INFO if name == "float32" else logging.WARNING)


@pytest.mark.parametrize("name", KNOWN)
def test_calls_of_the_fast_kernels_are_not_reported(
    calls: list[Any], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    run_forward(KNOWN[name])
    run_backward(KNOWN[name])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("given", "message"),
    [(call(sinks=torch.zeros(4)), "sinks are set"), (call(headdim=256, carried=True), "for the forward alone")],
)
def test_features_of_one_pass_name_it(
    calls: list[Any], caplog: pytest.LogCaptureFixture, given: Call, message: str
) -> None:
    run_forward(given)
    run_backward(given)
    (record,) = caplog.records
    assert message in record.getMessage()


def test_choosing_the_backward_reports_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    (q, _, v), tile_problem, _ = call(headdim=264)
    HOPPER.fuses_dq(q, v, tile_problem.mask, tile_problem.score_config, hops=1, deterministic=False)
    (record,) = caplog.records
    assert "or above 256" in record.getMessage()


def test_why_not_here() -> None:
    reason = fallback.why_not(torch.device("cpu"))
    assert reason is not None
    assert "an NVIDIA GPU, not cpu" in reason


def test_why_not_with_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    for version in ("3.6.0", "3.7.1+gitabcdef", "3.8.0", "3.9.0"):
        monkeypatch.setattr("triton.__version__", version)
        assert fallback.why_not(torch.device("cuda")) is None
    for version in ("3.5.1", "3.10.0+gitabcdef", "4.0.0"):
        monkeypatch.setattr("triton.__version__", version)
        expected = f"they run under triton 3.6, 3.7, 3.8 and 3.9, not {version}"
        assert fallback.why_not(torch.device("cuda")) == expected


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_why_not_on_other_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    reason = fallback.why_not(torch.device("cuda"))
    expected = "they need compute capability 9.0, not {}.{}".format(*capability)
    assert reason == (None if capability == (9, 0) else expected)


def test_why_not_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    reason = fallback.why_not(torch.device("cuda"))
    assert reason is not None
    assert "TRITON_INTERPRET" in reason


def test_is_viewable() -> None:
    x = torch.zeros(2, 6, 4, 16, dtype=torch.bfloat16)
    assert is_viewable(x)
    assert is_viewable(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert is_viewable(x[:, ::2])
    assert is_viewable(x[..., :8])
    assert is_viewable(x[..., 8:])
    assert is_viewable(x[:1].expand(1, 6, 4, 16))
    assert is_viewable(torch.as_strided(x, (1, 1, 1, 8), (3, 5, 7, 1)))  # strides of dimensions of size 1 do not matter
    assert not is_viewable(x[..., 4:12])  # misaligned address
    assert not is_viewable(torch.zeros(2, 6, 4, 20, dtype=torch.bfloat16))  # misaligned stride
    assert not is_viewable(innermost(x))
    assert not is_viewable(x[:, :, :1].expand(2, 6, 4, 16))
    assert not is_viewable(x[:, :0])
