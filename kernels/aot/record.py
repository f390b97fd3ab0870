"""Allowances of compiled kernels, one record for each version of Triton, and the comparison with them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from ringflash.kernels.aot.compiler import Usage
from ringflash.kernels.versions import environment_of_compilations

RECORDS = Path(__file__).with_name("allowances")  # one file for each version of Triton
PACKAGE = Path(__file__).parents[2]
# The parts of the package that decide what kernels compile to: those that `kernels` imports, directly or not.
PARTS = ("checks", "compile_once", "dropout", "errors", "kernels", "layouts", "masks", "state", "torch_private")

# Shared memory of one program, in bytes: CUDA C++ programming guide, table of technical specifications.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}

HOPPER_SPILLS = 16  # bytes; tile sizes are chosen to keep the values that loops use in registers
MUCH_BETTER = 64  # bytes of spills below the allowance from which on it should be recorded again


@dataclass(frozen=True)
class Record:
    """Usage of kernels when they were last recorded.

    Args:
        triton: version of Triton that compiled them.
        kernels: usage by name.
        inputs: digest of what they were compiled from, as `digest_of_inputs`; empty if only some were compiled.
    """

    triton: str
    kernels: Mapping[str, Usage]
    inputs: str = ""


@dataclass(frozen=True)
class Verdict:
    """Failures and remarks, one line each."""

    failures: list[str]
    remarks: list[str]


def digest_of_inputs() -> str:
    """Returns a digest of all files and settings that decide what kernels compile to, except Triton's version."""
    settings = environment_of_compilations() | {k: v for k, v in os.environ.items() if k.startswith("TRITON_PTXAS")}
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for part in PARTS:
        folder = PACKAGE / part
        paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]
        for path in paths:
            digest.update(f"\0{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def path_of(version: str) -> Path:
    """Returns the file of the record for one version of Triton; "3.8.0+git1" shares the file of "3.8.0"."""
    return RECORDS / f"{version.partition('+')[0]}.json"


def nearest(version: str) -> Path:
    """Returns the file of this version's record, or of the newest version with a record if this one has none."""
    own = path_of(version)
    if own.exists():
        return own
    return max(RECORDS.glob("[0-9]*.json"), key=lambda path: tuple(map(int, path.stem.split("."))), default=own)


def read(path: Path | None = None) -> Record:
    """Reads the record at `path`, by default `nearest` of the running Triton; returns an empty one if there is none."""
    path = path or nearest(triton.__version__)
    if not path.exists():
        return Record("", {})
    content = json.loads(path.read_text())
    kernels = {}
    for name, usage in content["kernels"].items():
        codes = {key: tuple(usage[key]) for key in ("serialised", "advice")}
        kernels[name] = Usage(**usage | codes)
    return Record(content["triton"], kernels, content.get("inputs", ""))


def write(record: Record, path: Path | None = None) -> None:
    """Writes one line for each kernel, sorted, so that a diff shows the changed kernels."""
    path = path or path_of(record.triton)
    path.parent.mkdir(exist_ok=True)
    lines = [f"    {json.dumps(name)}: {json.dumps(asdict(usage))}" for name, usage in sorted(record.kernels.items())]
    kernels = ",\n".join(lines)
    head = f'  "triton": {json.dumps(record.triton)},\n  "inputs": {json.dumps(record.inputs)},\n'
    path.write_text(f'{{\n{head}  "kernels": {{\n{kernels}\n  }}\n}}\n')


def over_limit(measured: Mapping[str, Usage]) -> list[str]:
    """Returns failures of kernels that need more shared memory than their target has and so would not launch."""
    failures = []
    for name, usage in measured.items():
        limit = SHARED_LIMIT[int(name.split()[0].removeprefix("sm_"))]
        if usage.shared > limit:
            failures.append(f"{name}: takes {usage.shared} bytes of shared memory of {limit}")
    return failures


def spilling(measured: Mapping[str, Usage]) -> list[str]:
    """Returns remarks on the kernels of `kernels/hopper` that spill, even if the record allows that."""
    hopper = {name: usage for name, usage in measured.items() if name.split()[1].startswith("hopper_")}
    many = {name: usage.spills for name, usage in hopper.items() if usage.spills > HOPPER_SPILLS}
    return [f"{name}: spills {spills} bytes, a Hopper kernel should not" for name, spills in many.items()]


def compare(measured: Mapping[str, Usage], record: Record) -> Verdict:
    """Compares `measured` with the record: more spills, newly serialised or lost WGMMAs, and unknown kernels fail."""
    failures, remarks = [], []
    for name, now in measured.items():
        allowed = record.kernels.get(name)
        if allowed is None:
            failures.append(f"{name}: not in the record; it spills {now.spills} bytes")
            continue
        if now.spills > allowed.spills:
            failures.append(f"{name}: spills {now.spills} bytes, {allowed.spills} are allowed")
        elif allowed.spills - now.spills >= MUCH_BETTER:
            remarks.append(f"{name}: spills {now.spills} bytes, well under the {allowed.spills} allowed")
        if new := sorted({*now.serialised} - {*allowed.serialised}):
            failures.append(f"{name}: its WGMMAs are serialised ({', '.join(new)}), which is not allowed")
        elif gone := sorted({*allowed.serialised} - {*now.serialised}):
            remarks.append(f"{name}: its WGMMAs are no longer serialised ({', '.join(gone)})")
        if allowed.matmul == "wgmma" != now.matmul:
            failures.append(f"{name}: no longer uses WGMMA, but {now.matmul or 'no tensor cores'}")
    return Verdict(failures, remarks)


def forgotten(measured: Mapping[str, Usage], record: Record) -> list[str]:
    """Returns the names in the record that no case compiles any more."""
    return sorted({*record.kernels} - {*measured})
