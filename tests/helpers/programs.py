"""Programs in processes of a fork server, which has imported the library and the trainer.

An interpreter of its own takes about ten seconds of a core to import both, and a forked process milliseconds. Tests of
imports start interpreters instead. A launcher in a forked process starts an interpreter for each of its other ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from tests.helpers.distributed import PRELOADED, PROCESSES
from tests.helpers.patience import PATIENCE
from tests.helpers.ports import unused_port

OUTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # variables of an enclosing distributed run


@dataclass(frozen=True)
class Finished:
    """The exit code of a program, the greatest one of its ranks, and all that its ranks printed."""

    returncode: int
    stdout: str
    stderr: str


def inherited() -> dict[str, str]:
    """Returns the environment without the variables of an enclosing distributed run."""
    return {name: value for name, value in os.environ.items() if name not in OUTER}


def run_program(arguments: Sequence[str], cwd: Path, *, ranks: int | None = None, **variables: str) -> Finished:
    """Runs a Python program to its end, and returns its output.

    Args:
        arguments: those of the interpreter: a path or `-m` and a module, then the program's own.
        cwd: the working directory.
        ranks: number of processes, with the variables that torchrun sets; None is one process without them.
        **variables: more variables of the environment.
    """
    port = str(unused_port())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = []
        for rank in range(ranks or 1):
            own = {} if ranks is None else _of_torchrun(rank, ranks, port)
            process = start_program(arguments, cwd, f"{folder}/{rank}", **own, **variables)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode is not None, f"{' '.join(arguments)} takes longer than {PATIENCE} s"
        codes = [process.exitcode or 0 for process in processes]
        texts = [
            "".join(Path(f"{folder}/{rank}.{stream}").read_text() for rank in range(len(codes)))
            for stream in ("out", "err")
        ]
    return Finished(max(codes, key=abs), *texts)


def start_program(arguments: Sequence[str], cwd: Path, output: str, **variables: str) -> ForkServerProcess:
    """Starts a Python program, with `variables` in its environment, and returns its process.

    Args:
        arguments: those of the interpreter: a path or `-m` and a module, then the program's own.
        cwd: the working directory.
        output: the program prints to files of this path with the suffixes `.out` and `.err`.
        **variables: more variables of the environment.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
    process = PROCESSES.Process(target=_run, args=(list(arguments), str(cwd), inherited() | usual | variables, output))
    process.start()
    return process


def output_of(arguments: Sequence[str], cwd: Path, *, ranks: int | None = None) -> str:
    """Returns what a program prints; it must succeed."""
    done = run_program(arguments, cwd, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout


def output_of_text(program: str, cwd: Path, *, ranks: int | None = None) -> str:
    """Returns what a program prints that is given as text; it must succeed."""
    (cwd / "program.py").write_text(program)
    return output_of(["program.py"], cwd, ranks=ranks)


def _of_torchrun(rank: int, ranks: int, port: str) -> dict[str, str]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**place, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}


def _run(arguments: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    gc.freeze()  # what the fork server made stays out of garbage collection, and so in memory that processes share
    for number, stream in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(1)
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], cwd
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(arguments), str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
