"""The compile gate without a GPU: it reads ptxas's output, fails on regressions, and compiles where tests interpret."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from ringflash.kernels.aot import __main__ as gate
from ringflash.kernels.aot import record
from ringflash.kernels.aot.cases import DTYPES, LAUNCHES, MASKS, MODES, cases
from ringflash.kernels.aot.compiler import Usage, parse_ptxas
from ringflash.kernels.aot.record import HOPPER_SPILLS, Record, compare, forgotten, over_limit, read, spilling, write
from tests.helpers.patience import PATIENCE
from tests.test_imports import ALLOWED

LOG = """
ptxas info    : (C7519) warpgroup.arrive is injected in around line 2469 by compiler to allow use of registers in GMMA \
in function '_dkdv_kernel'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function '_dkdv_kernel'
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_dkdv_kernel' for 'sm_90a'
ptxas info    : Function properties for _dkdv_kernel
    88 bytes stack frame, 108 bytes spill stores, 120 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 88 bytes cumulative stack size
ptxas info    : Compile time = 307.053 ms
"""

NAME = "sm_90 dkdv bfloat16 d128 causal alone"
DELTA = "sm_90 delta float32 d64 full alone"
USAGE = Usage(registers=255, spills=100, shared=83200, matmul="wgmma")


def test_reads_what_ptxas_says() -> None:
    expected = {"registers": 255, "spills": 228, "serialised": ("C7510",), "advice": ("C7519",)}
    assert parse_ptxas(LOG) == expected


def test_a_log_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="no registers"):
        parse_ptxas("")


def test_the_same_passes() -> None:
    verdict = compare({NAME: USAGE}, Record("3.6.0", {NAME: USAGE}))
    assert (verdict.failures, verdict.remarks) == ([], [])


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"spills": 104}, "spills 104 bytes, 100 are allowed"),
        ({"serialised": ("C7510",)}, "its WGMMAs are serialised (C7510), which is not allowed"),
        ({"matmul": "mma"}, "no longer uses WGMMA, but mma"),
        ({"matmul": ""}, "no longer uses WGMMA, but no tensor cores"),
    ],
)
def test_worse_fails(change: dict[str, object], failure: str) -> None:
    now = dataclasses.replace(USAGE, **change)  # pyright: ignore[reportArgumentType]
    assert compare({NAME: now}, Record("3.6.0", {NAME: USAGE})).failures == [f"{NAME}: {failure}"]


def test_better_is_remarked() -> None:
    allowed = dataclasses.replace(USAGE, serialised=("C7510",))
    verdict = compare({NAME: dataclasses.replace(USAGE, spills=0)}, Record("3.6.0", {NAME: allowed}))
    assert verdict.failures == []
    assert verdict.remarks == [
        f"{NAME}: spills 0 bytes, well under the 100 allowed",
        f"{NAME}: its WGMMAs are no longer serialised (C7510)",
    ]


def test_hopper_kernels_that_spill_are_remarked() -> None:
    names = [f"sm_90 {kernel} bfloat16 d128 causal alone" for kernel in ("hopper_backward", "hopper_ordered", "dq")]
    spills = HOPPER_SPILLS + 4, HOPPER_SPILLS, 100
    measured = {name: dataclasses.replace(USAGE, spills=x) for name, x in zip(names, spills, strict=True)}
    assert spilling(measured) == [f"{names[0]}: spills 20 bytes, a Hopper kernel should not"]


def test_what_is_not_recorded_fails_and_what_is_gone_is_told() -> None:
    gone = Record("3.6.0", {"sm_90 gone": USAGE})
    assert compare({NAME: USAGE}, gone).failures == [f"{NAME}: not in the record; it spills 100 bytes"]
    assert forgotten({NAME: USAGE}, gone) == ["sm_90 gone"]


def test_shared_memory_has_the_limit_of_its_target() -> None:
    usage = dataclasses.replace(USAGE, shared=200_000)
    assert over_limit({NAME: usage}) == []
    on_80 = NAME.replace("90", "80")
    assert over_limit({on_80: usage}) == [f"{on_80}: takes 200000 bytes of shared memory of 166912"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "allowance.json"
    record = Record("3.6.0", {NAME: dataclasses.replace(USAGE, advice=("C7519",)), "sm_80 x": USAGE}, "cafe")
    assert read(path) == Record("", {})
    write(record, path)
    assert read(path) == record


def test_every_case_names_what_there_is_and_the_record_knows_it() -> None:
    recorded = read().kernels
    for case in cases():
        assert case.kernel in LAUNCHES
        assert case.dtype in DTYPES
        assert case.mask in MASKS
        assert case.mode in MODES
        assert any(name == case.name or name.startswith(case.name + " _") for name in recorded), case.name
        if case.kernel.startswith("hopper_"):
            assert case.arch == 90
            assert case.dtype != "float32"
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    assert {case.kernel for case in cases()} == set(LAUNCHES)


# The gate runs five times. Its pool's process, which takes seconds to start, is prepared again for each later run.
GATE = """
import dataclasses
from ringflash.kernels.aot import __main__ as gate

class Pool(gate.ProcessPoolExecutor):
    started = None

    def __new__(cls, jobs, context, prepare, arguments):
        return cls.started or super().__new__(cls)

    def __init__(self, jobs, context, prepare, arguments):
        if self.started is None:
            super().__init__(jobs, context, prepare, arguments)
            Pool.started = self
        else:
            self.submit(prepare, *arguments).result()

    def __exit__(self, *_):
        pass

gate.ProcessPoolExecutor = Pool
args = ["--jobs", "1", "--only", "delta", "float32", "d64"]
records = []
gate.read, gate.write = lambda: gate.Record("", {}), records.append
gate.main([*args, "--record"])  # of the Triton that runs, whether or not the repository has one of it
record, = records
gate.read = lambda: record
print(gate.main([*args, "--all"]), gate.main(args))
for change in ({"registers": 1}, {"source": "", "spills": -1}):
    planted = {name: dataclasses.replace(usage, **change) for name, usage in record.kernels.items()}
    gate.read = lambda: dataclasses.replace(record, kernels=planted)
    print(gate.main(args))
Pool.started.shutdown()
"""


def test_compiles_although_tests_interpret_and_only_what_has_another_ir() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", GATE], capture_output=True, text=True, timeout=PATIENCE, env=env)
    assert result.returncode == 0, result.stderr
    registers = re.findall(r"sm_90   delta float32 d64 full alone +(\d+) ", result.stdout)
    first, *registers = registers
    assert first == registers[0] == registers[1] == registers[3] != registers[2] == "1"  # the planted count
    compiled = "1 compiled, 0 with the IR of the record, taken to compile as they did then"
    taken = "0 compiled, 1 with the IR of the record, taken to compile as they did then"
    failed = f"FAILED: {DELTA}: spills 0 bytes, -1 are allowed"
    lines = [line for line in result.stdout.splitlines() if "compiled," in line or line.startswith(("0", "1", "F"))]
    said = [compiled, compiled, taken, "0 0", taken, "0", compiled, failed, "1"]
    assert [line for line in lines if "kernels in" not in line] == said


def test_nothing_is_compiled_from_the_files_of_the_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled, args = list[str](), ["--only", "delta", "float32", "d64"]

    def compile_cases(cases: list[Any], *_: object) -> tuple[dict[str, Usage], list[str]]:
        compiled.extend(case.name for case in cases)
        return {DELTA: USAGE}, []

    same = Record(triton.__version__, {DELTA: USAGE, NAME: USAGE}, record.digest_of_inputs())
    monkeypatch.setattr(gate, "_compile", compile_cases)
    monkeypatch.setattr(gate, "read", lambda: same)
    assert gate.main(args) == 0
    assert compiled == []
    assert "1 kernels of the files of the record" in capsys.readouterr().out
    for change in ({"inputs": "f00d"}, {"triton": "0.1"}):
        monkeypatch.setattr(gate, "read", lambda: dataclasses.replace(same, **change))  # noqa: B023 - called at once
        assert gate.main(args) == 0
        assert compiled.pop() == DELTA
    monkeypatch.setattr(gate, "read", lambda: same)
    gate.main([*args, "--all"])
    assert compiled == [DELTA]


def test_the_digest_is_of_all_that_kernels_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed, new = set[str](), {"kernels", "torch_private"}
    while new:
        needed |= new
        new = set().union(*(ALLOWED[part] for part in new)) - needed
    assert {*record.PARTS} == needed
    shutil.copytree(record.PACKAGE, tmp_path / "ringflash", ignore=shutil.ignore_patterns("train", "bench"))
    digests = {record.digest_of_inputs()}
    monkeypatch.setattr(record, "PACKAGE", tmp_path / "ringflash")
    digests.add(record.digest_of_inputs())
    assert len(digests) == 1
    for name in ("kernels/triton/forward.py", "masks/intervals.py", "dropout.py"):
        with (tmp_path / "ringflash" / name).open("a") as file:
            file.write("# another comment")
        digests.add(record.digest_of_inputs())
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/elsewhere")
    digests.add(record.digest_of_inputs())
    assert len(digests) == 5


def test_what_stays_in_a_record_of_another_triton_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "allowance.json"
    kept, new = dataclasses.replace(USAGE, source="f00d"), dataclasses.replace(USAGE, source="cafe")
    for version, source in (("0.1", ""), (triton.__version__, "f00d")):
        write(Record(version, {NAME: kept}), path)
        monkeypatch.setattr(gate, "read", lambda: read(path))
        monkeypatch.setattr(gate, "write", lambda record: write(record, path))
        monkeypatch.setattr(gate, "_compile", lambda *_: ({DELTA: new}, []))
        assert gate.main(["--record", "--only", "delta", "float32", "d64"]) == 0
        assert read(path) == Record(triton.__version__, {NAME: dataclasses.replace(kept, source=source), DELTA: new})


def test_a_version_without_a_record_is_held_to_the_newest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    assert record.read() == Record("", {})
    for version in ("3.9.0", "3.10.0", "3.6.0"):
        write(Record(version, {NAME: USAGE}))
    assert record.read(record.nearest("3.9.0")).triton == "3.9.0"
    assert record.read(record.nearest("3.8.0")).triton == "3.10.0"


def test_pins_are_those_of_the_builds_of_torch() -> None:
    """Checks Triton's pin: the metadata of torch's CUDA wheel on PyPI names one version, and a CPU build needs none."""
    lines = Path(__file__).parents[3].joinpath("constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    of_cuda_wheels = {"2.13.0": "3.7.1"}
    assert pins["triton"] == of_cuda_wheels[pins["torch"]]
    if torch.__version__.split("+")[0] == pins["torch"]:
        required = [line for line in metadata.requires("torch") or [] if line.startswith("triton==")]
        assert all(line.split(";")[0] == f"triton=={pins['triton']}" for line in required)
        assert bool(required) == (torch.version.cuda is not None)
