"""The kernel benchmark: forward and backward of flash_attention and of its peers on one device, in one run.

    ringflash bench kernels --peers --json kernels.json --png kernels.png

Rounds run all contenders and a large matmul in a changing order; figures are medians. TFLOP/s count 4 seqlen^2 nheads
headdim batch for a forward, half as much if causal, and 2.5 forwards for a backward. The forward records gradients, as
in training. Times are the device's own: see `timing`. Errors are of the first sequence's first KV head and its query
heads. Peak memory excludes the inputs. A long run can be split by --headdims or --seqlens; --merge joins the JSON of
the pieces. The portable kernels are measured too on devices that run the kernels for sm_90.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringflash.bench.attention import traffic
from ringflash.bench.attention.single import Unavailable, contenders
from ringflash.bench.attention.tiles import auto_kernels, pass_bytes
from ringflash.bench.attention.traffic import Shape, Traffic
from ringflash.bench.common import memory, plot, profiler, timing
from ringflash.bench.common.problem import Contender, Problem, Setup, add_options, check_agreement, failure
from ringflash.bench.common.record import Run
from ringflash.bench.common.report import Column, Row, print_table
from ringflash.bench.ring.accuracy import TENSORS, Yardstick
from ringflash.commands.options import DTYPES, MASKS, Described, add_shared, fill_in, parser_of
from ringflash.errors import ArgumentError

MATMUL = "matmul"
BACKWARD = 2.5  # FLOPs of a backward over the FLOPs of a forward
MIN_ROUNDS = 2
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
DESCRIPTION = """Measures flash_attention on one device; --peers adds SDPA, FlexAttention, FlashAttention-4 and standard
attention."""
FULL = {"seqlens": LENGTHS, "headdims": [64, 128, 256], "nheads": 16, "tokens": 16384, "rounds": 5}
QUICK = {"seqlens": [1024, 8192], "headdims": [128], "nheads": 16, "tokens": 16384, "rounds": 3}
CPU = {"seqlens": [64, 128], "headdims": [32], "nheads": 2, "tokens": 128, "rounds": 2}  # shows that it runs


def main(argv: Sequence[str]) -> int:
    """Measures or computes the requested figures. Returns 1 if a contender of ours failed or broke a bound, else 0."""
    run = Run.begin(_parser(), argv, {}, {})
    options, device = run.options, run.device
    computes = options.traffic or options.profile
    _check(options, computes)
    fill_in(options, QUICK if options.quick else CPU if device.type == "cpu" and not computes else FULL)
    if options.memory is not None:
        rows = memory.check(options.memory, DTYPES[options.dtype], nheads=8, nheads_kv=1, headdim=128)
        run.write(rows)
        return 0 if all(row["within"] for row in rows) else 1
    shapes, about = _shapes(options), dict[str, Any]()
    if computes:
        return _traffic(shapes, run)
    if options.merge:
        earlier = [json.loads(path.read_text()) for path in options.merge]
        rows, missing = [row for each in earlier for row in each["rows"]], []
        command = "; ".join(each["command"] for each in earlier)
        run = dataclasses.replace(run, device_name=earlier[0]["device"], command=command)
        about = {"date": max(each["date"] for each in earlier), "versions": earlier[0]["versions"]}
    else:
        rows, missing = _run(shapes, run)
    _print(rows, missing, run.device_name)
    run.write(rows, missing=missing, **about)
    if options.png is not None and rows:
        plot.draw_kernels(options.png, rows, run.device_name)
    return 1 if any("failed" in row and row["name"].startswith("ringflash") for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench kernels", DESCRIPTION)
    add_options(parser, FULL, "512 to 131072, doubling")
    add_shared(parser, "peers", "png", masks=[*MASKS], tokens=Described(str(FULL["tokens"])))
    parser.add_argument("--cell-s", type=float, default=20.0, help="no further round after this (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, help="no further cell after this many seconds")
    parser.add_argument("--errors-to", type=int, default=8192, help="largest seqlen compared with float64")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders, as the tables name them; peers too")
    parser.add_argument("--quick", action="store_true", help="1k and 8k tokens, headdim 128, three rounds")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: join the JSON of earlier runs")
    parser.add_argument("--traffic", action="store_true", help="measure nothing: compute HBM bytes")
    parser.add_argument("--profile", action="store_true", help="as --traffic, beside what a profiler measures")
    parser.add_argument(
        "--memory", type=int, metavar="SEQLEN", help="peak memory, 8:1 heads of 128; 1 when above its bound"
    )
    return parser


def _check(options: argparse.Namespace, computes: bool) -> None:
    """Raises ArgumentError for an option that the chosen mode would ignore."""
    if options.png is not None and (computes or options.memory is not None):
        remedy = "Leave --png out, or measure."
        raise ArgumentError("--png", expected="figures to draw", got="--traffic, --profile or --memory", remedy=remedy)
    if options.only is not None and (computes or options.merge or options.memory is not None):
        got = "--traffic, --profile, --merge or --memory"
        remedy = "Leave --only out, or measure."
        raise ArgumentError("--only", expected="contenders to measure", got=got, remedy=remedy)
    given = [name for name in FULL if name != "rounds" and getattr(options, name) is not None]
    if options.memory is not None and given:
        got = ", ".join(f"--{name}" for name in given)
        remedy = "Its length is its own argument; heads are 8:1 of 128."
        raise ArgumentError("--memory", expected="no other sizes", got=got, remedy=remedy)


def _shapes(options: argparse.Namespace) -> list[Shape]:
    """Returns the cells, short sequences first, so that an interrupted run has the most of them."""
    size = DTYPES[options.dtype].itemsize
    return [
        Shape(max(1, options.tokens // seqlen), seqlen, options.nheads, options.nheads_kv, headdim, causal, size)
        for seqlen in sorted(options.seqlens)
        for headdim in options.headdims
        for causal in (mask == "causal" for mask in options.masks)
    ]


def _run(shapes: list[Shape], run: Run) -> tuple[list[dict[str, Any]], list[str]]:
    """Measures the cells that the budget allows. Returns their rows, and the names of the other cells."""
    begin, rows, options = time.monotonic(), [], run.options
    named = contenders(run.device, DTYPES[options.dtype], with_peers=options.peers, only=options.only)
    for number, shape in enumerate(shapes):
        if number > 0 and options.budget_s is not None and time.monotonic() - begin > options.budget_s:
            return rows, [_name(shape) for shape in shapes[number:]]
        rows += _measure(shape, named, options, run.device)
        run.write(rows, missing=[_name(shape) for shape in shapes[number + 1 :]])
        print(f"{_name(shape)}: {time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows, []


def _measure(
    shape: Shape, named: dict[str, Contender], options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Measures one cell and returns a row for each contender."""
    dtype = DTYPES[options.dtype]
    kernels = auto_kernels(device, dtype)
    sizes = (shape.seqlen, shape.nheads, shape.nheads_kv, shape.headdim)
    problem = Problem.random(*sizes, device, dtype, batch=shape.batch, causal=shape.causal)
    yardstick = Yardstick.of(problem) if shape.seqlen <= options.errors_to else None
    facts = dataclasses.asdict(shape) | {"dtype": options.dtype}
    rows: dict[str, dict[str, Any]] = {name: {"name": name, **facts} for name in named}
    with ExitStack() as stack:
        setups: dict[str, Setup] = {}
        expected: list[Tensor] | None = None
        for name, contender in named.items():
            try:
                setup = stack.enter_context(contender(problem))
                results = [setup.whole(x.detach()) for x in setup.forward_backward()]
                expected = expected or results
                check_agreement(TENSORS, results, expected)
                if yardstick is not None:
                    errors = yardstick.errors(results)
                    rows[name]["errors"] = {tensor: dataclasses.asdict(error) for tensor, error in errors.items()}
                del results
                rows[name] |= _peak_memory(setup, shape.batch * shape.seqlen, device)
                setups[name] = setup
            except Unavailable as error:
                rows[name]["failed"] = str(error)
            except Exception as error:  # for whatever reason it fails, its row reports it
                rows[name]["failed"] = failure(error)
        del expected
        matmul, matmul_flops = _matmul(dtype, device)
        samplers = _take_turns(setups, matmul, rows, options)
    matmul_tflops = matmul_flops / samplers[MATMUL].medians()["forward"] / 1e12
    for name, row in rows.items():
        row |= {"matmul_tflops": round(matmul_tflops, 4)} | _bytes(name, shape, kernels)
        if name in samplers:
            row |= _figures(samplers[name], problem.forward_flops, matmul_tflops)
    return list(rows.values())


def _bytes(name: str, shape: Shape, kernels: str) -> dict[str, Any]:
    """Returns the computed HBM bytes of both passes, if the contender's memory accesses are known.

    `kernels` names the kernels that backend "auto" chooses.
    """
    must = traffic.compulsory(shape)
    moved = traffic.standard(shape) if name == "standard attention" else None
    if name.startswith("ringflash"):
        mode, _, named_kernels = name.removeprefix("ringflash ").partition(", ")
        tiled = pass_bytes(shape, named_kernels or kernels)
        moved = Traffic(tiled["forward"], tiled[f"backward {mode}"])
    if moved is None:
        return {}
    return {
        "forward_bytes": {"compulsory": must.forward, "computed": moved.forward},
        "backward_bytes": {"compulsory": must.backward, "computed": moved.backward},
    }


def _peak_memory(setup: Setup, tokens: int, device: torch.device) -> dict[str, Any]:
    """Returns the peak memory of one forward and backward, with the results but without the inputs."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    setup.forward_backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"peak_bytes": peak, "peak_bytes_per_token": round(peak / tokens, 1)}


def _matmul(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], float]:
    """Returns a large matmul and its FLOPs, which give the device's own rate at the current clock."""
    n = 8192 if device.type == "cuda" else 256
    a, b, c = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))
    return lambda: torch.matmul(a, b, out=c), 2.0 * n**3


def _take_turns(
    setups: dict[str, Setup], matmul: Callable[[], Tensor], rows: dict[str, dict[str, Any]], options: argparse.Namespace
) -> dict[str, timing.Sampler]:
    """Returns samples of every pass of every contender, and of the matmul as the forward of `MATMUL`."""
    on_gpu = matmul().is_cuda
    samplers = {name: timing.Sampler(on_gpu) for name in (MATMUL, *setups)}
    begin = time.monotonic()
    for number in range(options.rounds):
        if number >= MIN_ROUNDS and time.monotonic() - begin > options.cell_s:
            break
        for name in timing.turns(list(samplers), number):
            if name == MATMUL:
                samplers[name].sample("forward", matmul)
            else:
                samplers[name].sample_passes({"backward": setups[name]}, rows[name])
    return samplers


def _figures(sampler: timing.Sampler, forward_flops: float, matmul_tflops: float) -> dict[str, Any]:
    """Returns the milliseconds, TFLOP/s and share of the matmul's rate of each pass, from medians over the rounds."""
    figures: dict[str, Any] = sampler.launches()
    passes = {"forward": 1.0, "backward": BACKWARD}
    for part, seconds in sampler.medians().items():
        tflops = passes[part] * forward_flops / seconds / 1e12
        figures |= {f"{part}_ms": round(seconds * 1e3, 4), f"{part}_tflops": round(tflops, 4)}
        figures |= {f"{part}_share": round(tflops / matmul_tflops, 3), "rounds": len(sampler.times[part])}
    return figures


def _traffic(shapes: list[Shape], run: Run) -> int:
    """Prints and writes HBM bytes: computed for the kernels that "auto" chooses here, and measured with --profile."""
    rows, why, options = [], "", run.options
    kernels = auto_kernels(run.device, DTYPES[options.dtype])
    for shape in shapes:
        must, materialised = traffic.compulsory(shape), traffic.standard(shape)
        measured: dict[str, float] = {}
        if options.profile and (rows == [] or rows[-1]["measured"]):  # one attempt without a profiler is enough
            measured, why = profiler.measure(shape, options.dtype)
        row = {"compulsory": dataclasses.asdict(must), "tiled": pass_bytes(shape, kernels)}
        row |= {"standard": dataclasses.asdict(materialised), "measured": measured}
        rows.append(dataclasses.asdict(shape) | row)
    _print_traffic(rows, kernels)
    if options.profile:
        print(f"measured with {why}" if rows[0]["measured"] else why)
    run.write(rows, profiler=why, kernels=kernels)
    return 0


def _name(shape: Shape) -> str:
    return f"{'causal' if shape.causal else 'full'} headdim {shape.headdim} seqlen {shape.seqlen}"


def _print(rows: Sequence[Row], missing: Sequence[str], device: str) -> None:
    """Prints one table a cell: the rates, memory and errors of every contender, or the reason for a failure."""
    columns: list[Column] = [("contender", "name", "")]
    for part in ("forward", "backward"):
        columns += [
            (f"{part}\nms", f"{part}_ms", ".3f"),
            (f"{part}\nTFLOP/s", lambda row, key=f"{part}_tflops": _rate(row[key]), ">"),
            (f"{part}\nof matmul", f"{part}_share", ".0%"),
        ]
    columns += [
        ("peak\nMiB", lambda row: row["peak_bytes"] / 2**20, ",.0f"),
        ("bytes\na token", "peak_bytes_per_token", ",.0f"),
        ("RMS error\nout dq dk dv", lambda row: " ".join(f"{row['errors'][x]['rms']:.1e}" for x in TENSORS), ">"),
        ("of plain\nout dq dk dv", lambda row: " ".join(f"{row['errors'][x]['rms_ratio']:.2f}" for x in TENSORS), ">"),
    ]

    def cell_of(row: Row) -> tuple[Any, ...]:
        return row["headdim"], not row["causal"], row["seqlen"]

    for _, cell in itertools.groupby(sorted(rows, key=cell_of), cell_of):
        shown = list(cell)
        first = shown[0]
        title = (
            f"seqlen {first['seqlen']}, headdim {first['headdim']}, {'causal' if first['causal'] else 'full'}: "
            f"batch {first['batch']}, {first['nheads']}:{first['nheads_kv']} heads, {first['dtype']}, {device}, "
            f"matmul {_rate(first['matmul_tflops'])} TFLOP/s"
        )
        print_table(title, columns, shown, "{name}")
    if missing:
        print(f"Not measured, out of time: {'; '.join(missing)}")


def _rate(tflops: float) -> str:
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.2g}"


def _print_traffic(rows: Sequence[Row], kernels: str) -> None:
    """Prints HBM bytes in MiB: compulsory, computed for the tiles of `kernels`, measured, and of standard attention.

    The bytes of the tiles are computed without a cache.
    """
    lines: list[dict[str, Any]] = []
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        for what, tiled in row["tiled"].items():
            part = what.split()[0]
            line = {"cell": f"{mask} headdim {row['headdim']} seqlen {row['seqlen']} batch {row['batch']}"}
            sizes = {"compulsory": row["compulsory"][part], "tiled": tiled, "standard": row["standard"][part]}
            sizes |= {"measured": row["measured"][what]} if what in row["measured"] else {}
            lines.append(line | {"pass": what} | {name: size / 2**20 for name, size in sizes.items()})
    columns: list[Column] = [("cell", "cell", ""), ("pass", "pass", "")]
    for title, key in (("compulsory", "compulsory"), ("tiled, no cache", "tiled"), ("measured", "measured")):
        columns.append((title, key, ",.1f"))
    columns.append(("standard attention", "standard", ",.1f"))
    title = f"HBM traffic of the {kernels} kernels in MiB; computed, but for the columns that say measured"
    print_table(title, columns, lines)
