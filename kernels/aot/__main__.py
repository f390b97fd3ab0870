"""The compile gate: compiles every shipped kernel for its targets without a GPU, and fails where one got worse.

python -m ringflash.kernels.aot            compares with the recorded allowances. Nothing is compiled if the record was
                                           made of the same files. Otherwise a kernel with the recorded IR is not
                                           compiled to the end. In both cases the gate takes the recorded usage.
python -m ringflash.kernels.aot --all      compiles every kernel to the end.
python -m ringflash.kernels.aot --record   makes the usage of this run the allowance.

Each version of Triton has a record of its own. To run another version than the installed one, put a folder with that
version first in PYTHONPATH; `make aot TRITON=3.9.0` makes such a folder.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import triton
from rich.console import Console
from rich.table import Table

from ringflash.kernels.aot.cases import Case, cases
from ringflash.kernels.aot.compiler import Usage, compile_case, prepare
from ringflash.kernels.aot.record import Record, compare, digest_of_inputs, forgotten, over_limit, read, spilling, write


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints a table, and returns 1 if a kernel does not compile, does not fit, or got worse."""
    parser = _parser()
    options = parser.parse_args(argv)
    chosen = [case for case in cases() if all(word in case.name.split() for word in options.only)]
    if options.hopper:
        chosen = [case for case in chosen if case.kernel.startswith("hopper_")]
    if not chosen:
        parser.error(f"no case has all the words {options.only}; {len(cases())} are like {cases()[0].name!r}")
    record = read()
    known = {} if options.all or record.triton != triton.__version__ else {u.source: u for u in record.kernels.values()}
    inputs = digest_of_inputs()
    if known and record.inputs == inputs and not options.record:
        measured, failures = _recorded(chosen, record), list[str]()
        _print(measured, record)
        print(f"{len(measured)} kernels of the files of the record, taken to compile as they did then")
    else:
        begin = time.perf_counter()
        measured, failures = _compile(chosen, options.jobs, known)
        seconds = time.perf_counter() - begin
        _print(measured, record)
        anew = sum(usage.source not in known for usage in measured.values())
        print(f"{len(measured)} kernels in {seconds:.0f} s by {options.jobs} processes, triton {triton.__version__}:")
        print(f"{anew} compiled, {len(measured) - anew} with the IR of the record, taken to compile as they did then")
    remarks = spilling(measured)
    if options.record:  # kernels that this run did not compile keep their usage
        in_part = bool(options.only or options.hopper or failures)
        stays = record.kernels if in_part else {}
        if record.triton != triton.__version__:  # usage by source is valid for one version of Triton
            stays = {name: replace(usage, source="") for name, usage in stays.items()}
        write(Record(triton.__version__, {**stays, **measured}, "" if in_part else inputs))
    else:
        verdict = compare(measured, record)
        remarks += verdict.remarks
        if not (options.only or options.hopper):
            remarks += [f"{name}: in the record, but no case compiles it" for name in forgotten(measured, record)]
        if record.triton in ("", triton.__version__):
            failures += verdict.failures
        else:
            remarks += verdict.failures
            remarks.append(f"The record is of triton {record.triton}: what another one compiles worse is no failure.")
    failures += over_limit(measured)
    for line in remarks:
        print(f"note: {line}")
    for line in failures:
        print(f"FAILED: {line}")
    if failures and not options.record:
        print("`make aot-record` makes it the allowance, except what does not compile or does not fit.")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    description = "Compiles every shipped kernel, on a machine with or without a GPU."
    parser = argparse.ArgumentParser("ringflash.kernels.aot", description=description, allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="compile those too whose IR is the recorded one")
    parser.add_argument("--record", action="store_true", help="make what is found now the allowance")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with these words: sm_90 dq d128")
    parser.add_argument("--hopper", action="store_true", help="only the kernels in Gluon, for sm_90")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    return parser


def _compile(chosen: Sequence[Case], jobs: int, known: Mapping[str, Usage]) -> tuple[dict[str, Usage], list[str]]:
    """Returns the usage, by name, of the kernels that compile, and messages about the cases that do not."""
    os.environ.pop("TRITON_INTERPRET", None)  # before the processes start, which would else interpret the kernels
    measured: dict[str, Usage] = {}
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(jobs, context, prepare, (cache, known)) as pool:
        futures = {case: pool.submit(compile_case, case) for case in chosen}
        for case, future in futures.items():
            try:
                result = future.result()
            except BrokenProcessPool:
                begun = chosen[chosen.index(case) :][:jobs]
                failures.append(f"one of {', '.join(x.name for x in begun)}: the compiler ended its process")
                break
            if isinstance(result, str):
                failures.append(f"{case.name}: {result}")
            else:
                measured |= result
    return measured, failures


def _recorded(chosen: Sequence[Case], record: Record) -> dict[str, Usage]:
    """Returns the recorded usage of the kernels of these cases, by name."""
    names = {case.name for case in chosen}
    return {name: usage for name, usage in record.kernels.items() if names & {name, name.rpartition(" ")[0]}}


def _print(measured: Mapping[str, Usage], record: Record) -> None:
    table = Table(box=None, title="Kernels compiled ahead of time; spills and shared memory in bytes")
    for column in ("target", "kernel"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "spills", "allowed", "shared"):
        table.add_column(column, justify="right")
    table.add_column("matmul")
    table.add_column("ptxas")
    for name, usage in sorted(measured.items()):
        target, kernel = name.split(maxsplit=1)
        allowed = record.kernels.get(name)
        codes = [*(f"{code} serialised" for code in usage.serialised), *usage.advice]
        figures = (usage.registers, usage.spills, "-" if allowed is None else allowed.spills, usage.shared)
        table.add_row(target, kernel, *map(str, figures), usage.matmul, " ".join(codes))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
