"""HBM bytes of a pass, measured by the GPU's counters with Nsight Compute, or with CUPTI through torch's profiler.

The counters may be out of reach, because no profiler is installed or because none may read them. Each profiler runs in
its own process, so that a failure or an abort costs only this profiler's figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ringflash.bench.attention.single import ours
from ringflash.bench.attention.traffic import Shape
from ringflash.bench.common.problem import Problem
from ringflash.commands.options import DTYPES

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
PASSES = ("forward", "backward deterministic", "backward fast")
TIMEOUT_SECONDS = 180
MARK = "measured bytes: "


def measure(shape: Shape, dtype: str) -> tuple[dict[str, float], str]:
    """Measures the HBM bytes of our passes with the first profiler that works on this machine.

    Returns:
        Bytes by pass and the profiler's name; without a profiler, no bytes and the reason.
    """
    if not torch.cuda.is_available():
        return {}, "no profiler at hand (no CUDA device)"
    tried = []
    for name, run in (("ncu", _with_ncu), ("CUPTI", _with_cupti)):
        try:
            measured = {what: run(_child(shape, dtype, what)) for what in PASSES}
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            tried.append(f"{name}: {str(error).splitlines()[0][:120]}")
        else:
            return measured, name
    return {}, f"no profiler at hand ({'; '.join(tried)})"


def _child(shape: Shape, dtype: str, what: str) -> list[str]:
    sizes = (shape.batch, shape.seqlen, shape.nheads, shape.nheads_kv, shape.headdim, int(shape.causal))
    return [sys.executable, "-m", "ringflash.bench.common.profiler", *map(str, sizes), "--dtype", dtype, "--pass", what]


def _with_ncu(child: list[str]) -> float:
    if shutil.which("ncu") is None:
        raise OSError("not on PATH")
    options = ["--profile-from-start", "off", "--metrics", ",".join(METRICS), "--csv", "--print-units", "base"]
    return ncu_bytes(_output(["ncu", *options, *child, "--under", "ncu"]).splitlines())


def ncu_bytes(lines: Iterable[str]) -> float:
    """Returns the sum over all kernels and both metrics of Nsight Compute's table, which follows other lines.

    Raises:
        ValueError: there is no table, or it has no figures.
    """
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if not rows or "Metric Value" not in rows[0]:
        raise ValueError("ncu gave no table")
    name, value = rows[0].index("Metric Name"), rows[0].index("Metric Value")
    found = [float(row[value].replace(",", "")) for row in rows[1:] if row[name] in METRICS]
    if not found:
        raise ValueError("ncu gave no figures")
    return sum(found)


def _with_cupti(child: list[str]) -> float:
    for line in _output([*child, "--under", "cupti"]).splitlines():
        if line.startswith(MARK):
            return float(line.removeprefix(MARK))
    raise ValueError("no counters in the trace")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise ValueError(next((line for line in lines if "ERR" in line), lines[-1]))
    return done.stdout


def trace_bytes(trace: str) -> float:
    """Returns the sum of both metrics over all events of a Chrome trace.

    Raises:
        ValueError: the trace has no such metrics.
    """
    events = json.loads(trace)["traceEvents"]
    found = [float(event["args"][metric]) for event in events for metric in METRICS if metric in event.get("args", {})]
    if not found:
        raise ValueError("no counters in the trace")
    return sum(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one pass once under a profiler. `measure` starts it in a process of its own."""
    parser = argparse.ArgumentParser("ringflash.bench.common.profiler", allow_abbrev=False)
    parser.add_argument("sizes", type=int, nargs=6, help="batch, seqlen, nheads, nheads_kv, headdim, causal")
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--pass", dest="what", choices=PASSES, required=True)
    parser.add_argument("--under", choices=("ncu", "cupti"), required=True)
    options = parser.parse_args(argv)
    batch, seqlen, nheads, nheads_kv, headdim, causal = options.sizes
    device, dtype = torch.device("cuda"), DTYPES[options.dtype]
    problem = Problem.random(seqlen, nheads, nheads_kv, headdim, device, dtype, batch=batch, causal=bool(causal))
    with ours(problem, deterministic="deterministic" in options.what) as setup:
        out = setup.forward()
        call = setup.forward if options.what == "forward" else partial(setup.backward, out)
        call()
        torch.cuda.synchronize()
        if options.under == "ncu":
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        else:
            print(f"{MARK}{_under_cupti(call)}")
    return 0


def _under_cupti(call: Callable[[], object]) -> float:
    from torch._C._profiler import _ExperimentalConfig

    config = _ExperimentalConfig(profiler_metrics=list(METRICS), profiler_measure_per_kernel=True)
    with profile(activities=[ProfilerActivity.CUDA], experimental_config=config) as profiled:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        return trace_bytes(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
