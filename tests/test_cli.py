from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ringflash import __version__
from ringflash.cli import main
from ringflash.doctor import facts
from tests.patience import PATIENCE


def test_help_is_quick_to_come() -> None:
    code = (
        "import sys; from ringflash.cli import main; main(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('lightning', 'jsonargparse', 'matplotlib', 'triton')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert all(
        f"  {command} " in done.stdout for command in ("train", "prepare", "generate", "plan", "bench", "doctor")
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
            "expected one of ring, scaling, training, model, kernels, masks, hops, decode, got '--seqlens'. Put its",
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
    assert ("--contexts" if benchmark == "training" else "--seqlens") in capsys.readouterr().out


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "attention on cpu" in out
    assert facts()["attention on cpu"] == "eager kernels (float32)"
    assert "MISSING" not in facts().values()


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
