"""The command line: help, unknown commands, benchmarks that need torchrun, `doctor`, and bad arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash import __version__
from ringflash.commands import doctor
from ringflash.commands.doctor import facts
from ringflash.commands.main import main
from tests.helpers.patience import PATIENCE


def test_help_is_quick_to_come() -> None:
    code = (
        "import sys; from ringflash.commands.main import main; main(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('lightning', 'jsonargparse', 'matplotlib', 'triton')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert all(
        f"  {command} " in done.stdout
        for command in ("train", "prepare", "generate", "plan", "plan-memory", "bench", "doctor")
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ringflash {__version__}\n"


@pytest.mark.parametrize(("command", "hint"), [("trian", "Did you mean train?"), ("xyz", "Commands are train,")])
def test_unknown_command(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert hint in capsys.readouterr().err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: ringflash" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ring", "scaling"])
def test_benchmarks_of_ranks_say_how_they_are_started(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(["bench", name, "--seqlens", "4096", "--json", "my file"]) == 2
    command = f"\n    torchrun --nproc-per-node 4 -m ringflash.bench {name} --seqlens 4096 --json 'my file'\n"
    assert command in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--help"], 0, "  kernels "),
        ([], 2, "  decode "),
        (["kernel"], 2, "Did you mean kernels?"),
        (
            ["--seqlens", "4096"],
            2,
            "expected one of ring, scaling, training, model, kernels, host, masks, hops, accuracy, decode, "
            "got '--seqlens'. Put",
        ),
    ],
)
def test_bench_names_its_benchmarks(
    args: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *args]) == code
    assert message in "".join(capsys.readouterr())


@pytest.mark.parametrize(("args", "code"), [(["--help"], 0), (["-h"], 0), ([], 2), (["vrify"], 2)])
def test_checkpoint_names_its_command(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *args]) == code
    captured = capsys.readouterr()
    assert ("usage: ringflash checkpoint" in captured.out) == (code == 0)
    assert "verify" in "".join(captured)


@pytest.mark.parametrize("benchmark", ["ring", "scaling", "training", "model", "kernels", "masks", "hops"])
def test_a_benchmark_explains_itself(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", benchmark, "--help"])
    assert "--seqlens" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--json"], ["--json", "--rounds", "1"]])
def test_a_benchmark_writes_json_to_a_file(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *given]) == 2
    assert "--json: expected a FILE, got none. Name one: --json kernels.json." in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "attention on cpu" in out
    assert facts()["attention on cpu"] == "eager kernels (float32)"
    assert facts()["self-test on cpu"].startswith("passed")


def test_doctor_in_a_checkout_has_the_version_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "ringflash")
    assert facts()["ringflash"] == __version__


def test_doctor_exits_with_1_when_a_needed_package_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "numpy")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["problems"], found["facts"]["numpy"]) == (False, ["numpy"], "MISSING")


def test_doctor_does_without_an_optional_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "tensorboard")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["problems"]) == (True, [])


@pytest.mark.parametrize("wrong", ["out", "dq", "dk", "dv"])
def test_doctor_finds_attention_with_a_wrong_result(
    wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
        for name, x in (("dq", q), ("dk", k), ("dv", v)):
            if name == wrong:
                x.register_hook(lambda grad: grad * 1.001)
        out = rf.flash_attention(q, k, v, **rest)
        return out + (1e-3 * out).detach() if wrong == "out" else out

    monkeypatch.setattr(doctor, "flash_attention", attention)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "self-test on cpu" in found["problems"]
    assert f"of {wrong}," in found["facts"]["self-test on cpu"]


def test_doctor_reports_kernels_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*_: Tensor, **__: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(doctor, "flash_attention", attention)
    assert facts()["self-test on cpu"] == "FAILED: RuntimeError: no such kernel"


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hides the metadata of one package, as if it were not installed; every other package has a version."""

    def version(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("importlib.metadata.version", version)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint", "nowhere"], "no such folder"),
        (["--checkpoint", "nowhere", "--prompt", ""], "--prompt"),
        (["--checkpoint", "nowhere", "--device", "tpu"], "--device"),
        (
            ["--checkpoint", "nowhere", "--prompt-file", "nowhere.txt"],
            "--prompt-file: expected UTF-8 text, got nowhere.txt",
        ),
        (
            ["--checkpoint", "nowhere", "--prompt", "a", "--prompt-file", "b"],
            "--prompt: expected none with --prompt-file",
        ),
        (["--checkpoint", "nowhere", "--top-p", "0"], "top_p"),
    ],
)
def test_generate_with_bad_arguments(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
