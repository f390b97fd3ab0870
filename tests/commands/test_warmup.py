"""The command `ringflash warmup`: the calls of a configuration, their variants, compilation in processes, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

import ringflash as rf
from ringflash.commands import warmup
from ringflash.commands.main import main
from ringflash.errors import ArgumentError

# Lightning calls a jsonargparse method by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CONFIGS = Path(rf.__file__).parents[1] / "configs"

# The calls of a small run on a fake GPU: variants, a cold and a warm compilation, then the launches themselves.
COLD_AND_WARM = """
import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
import ringflash as rf
from ringflash.commands import warmup
from ringflash.kernels import select
from ringflash.kernels.aot.compiler import TargetDriver
from ringflash.kernels.triton.backend import TRITON

def main():
    driver.set_active(TargetDriver(90))
    select.choose = lambda name, q: TRITON
    masks = (rf.Causal(), rf.Causal() & rf.Documents([0, 300, 512]))
    calls = warmup.Calls(512, 1, 4, 2, 64, torch.bfloat16, masks[:1], world_size=2)
    variants = warmup.variants_of(calls, torch.device("cpu"))
    names = [variant.name for variant in variants]
    assert {"triton.forward._forward_kernel", "triton.delta._delta_kernel", "triton.backward_dq._dq_kernel"} <= {*names}
    packed = warmup.variants_of(warmup.Calls(512, 1, 4, 2, 64, torch.bfloat16, masks, 2), torch.device("cpu"))
    assert len(packed) > len(variants)
    chosen = [0, 1, names.index("triton.delta._delta_kernel")]  # the kernels of the first launches, and another one
    for cold, processes in ((True, 2), (False, 1)):
        outcomes = warmup.compile_all([variants[i] for i in chosen], processes, arch=90)
        assert [outcome.name for outcome in outcomes] == [names[i] for i in chosen]
        assert [(outcome.compiled, outcome.error) for outcome in outcomes] == [(cold, "")] * 3, outcomes
    hits = []

    class EnoughError(Exception):
        pass

    def listen(**given):
        hits.append(given["cache_hit"])
        if len(hits) == 2:  # the next kernel was not compiled
            raise EnoughError

    knobs.compilation.listener = listen
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **rest: run(self, *args, grid=grid, warmup=True, **rest)
    first = warmup.Calls(512, 1, 4, 2, 64, torch.bfloat16, masks[:1], world_size=2)
    try:
        first.run(torch.device("cpu"))
    except EnoughError:
        pass
    assert hits == [True] * 2, hits  # the launches of a run find the same keys
    print("same keys")

if __name__ == "__main__":
    main()
"""


def test_variants_are_compiled_once_under_the_keys_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COLD_AND_WARM)
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(CONFIGS.parent), os.environ.get("PYTHONPATH")))),
    }
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert "same keys" in run.stdout, run.stdout + run.stderr


def test_calls_of_a_ring_on_two_hosts() -> None:
    calls = warmup.calls_of(["--config", str(CONFIGS / "two-hosts.yaml")])
    assert (calls.world_size, calls.batch, calls.seqlen) == (8, 1, 524288)
    assert (calls.nheads, calls.nheads_kv, calls.headdim, calls.dtype) == (32, 8, 128, torch.bfloat16)
    assert calls.masks == (rf.Causal(),)
    assert (calls.layout, calls.hops, calls.deterministic) == ("zigzag", "auto", False)


def test_windows_documents_and_overrides(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text("some text of a document " * (i + 1))
    overrides = {
        "model.model.sliding_window": 65,
        "model.model.sliding_layers": [0],
        "data.documents": "packed",
        "data.corpus": str(text),
        "data.cache_dir": str(tmp_path / "cache"),
        "data.context_length": 512,
        "data.val_fraction": 0.1,
        "trainer.devices": 3,
    }
    config = ["--config", str(CONFIGS / "h200-4.yaml")]
    calls = warmup.calls_of([*config, *(f"--{name}={value}" for name, value in overrides.items())])
    assert calls.world_size == 3
    described = [str(mask) for mask in calls.masks]
    assert len(described) == 2 * warmup.PACKED_BATCHES
    assert sum("SlidingWindow(left=64" in each for each in described) == warmup.PACKED_BATCHES
    assert all("Documents" in each for each in described)


def test_a_configuration_that_does_not_exist_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--config", str(CONFIGS / "h200-3.yaml")]) == 2
    error = capsys.readouterr().err
    assert "expected a configuration file, got no file" in error
    assert "Did you mean" in error
    assert "h200-" in error.split("Did you mean")[1]


def test_a_run_on_cpus_has_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--config", str(CONFIGS / "tiny-cpu.yaml")]) == 2
    assert "trainer.accelerator: expected gpu, got cpu: nothing is compiled" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of machines without a GPU")
def test_without_a_gpu_it_says_where_to_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--config", str(CONFIGS / "h200-2.yaml")]) == 2
    error = capsys.readouterr().err
    assert "expected a GPU of the kind that will train" in error
    assert "Run it on a host of the run" in error


def test_the_number_of_processes_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--config", str(CONFIGS / "h200-2.yaml"), "--processes", "0"]) == 2
    assert "--processes: expected at least 1, got 0" in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ArgumentError, match="TRITON_CACHE_DIR: expected a folder that this user can write, got "):
        warmup.check_cache()


def test_a_killed_process_suggests_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Any:
            raise BrokenProcessPool

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(warmup, "ProcessPoolExecutor", Pool)
    with pytest.raises(ArgumentError, match="--processes: expected memory for 4 processes, got one that was killed"):
        warmup.compile_all([], 4, arch=90)
