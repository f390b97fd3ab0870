"""The decoding benchmark: flash_decode and its peers over cache lengths, in one run with interleaved rounds.

    ringflash bench decode --json decode.json
    ringflash bench decode --sweep --cache-seqlens 4096 131072

Figures are medians over rounds in a changing order. Bandwidth counts keys, values, queries and outputs once. It is
compared with the bandwidth of a copying kernel, bytes read and written, which is timed in every round. The calls cycle
through several caches, together larger than any L2. `graph` is the replay of a CUDA graph, and `queued` the GPU's time
with launches queued ahead. `host` is the time of Python, for torch with the choice of its backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import ringflash as rf
from ringflash.bench.common import timing
from ringflash.bench.common.problem import AGREEMENT, difference, failure
from ringflash.bench.common.record import Run
from ringflash.bench.common.report import Column, heads, print_table
from ringflash.bench.decode.peers import CacheShape, Call, Decoding, contenders, ours
from ringflash.commands.options import DTYPES, Described, add_shared, parser_of
from ringflash.errors import ArgumentError

COPY = "copy"
COPY_BYTES = {"cuda": 2**30, "cpu": 2**20}  # on a GPU, far larger than its L2
COLD_BYTES = 2**29  # of all caches together: ten times an H200's L2
HOST_CALLS = 20
GPU = {
    "cache_seqlens": [4096, 8192, 16384, 32768, 65536, 131072],
    "batch": 8,
    "nheads": 32,
    "nheads_kv": 8,
    "headdim": 128,
}
CPU = {"cache_seqlens": [64, 128], "batch": 2, "nheads": 4, "nheads_kv": 2, "headdim": 32}  # shows that it runs
SWEPT = {"block_n": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)}
SWEPT_SPLITS = (None, 4, 6, 8, 12, 16, 24)


def main(argv: Sequence[str]) -> int:
    """Measures the requested figures. Returns 1 if flash_decode failed, else 0."""
    run = Run.begin(_parser(), argv, GPU, CPU)
    options = run.options
    if options.sweep and run.device.type == "cpu":
        remedy = "Run it where the tiles are to be used."
        raise ArgumentError("--sweep", expected="a GPU", got="the CPU", remedy=remedy)
    measure = _sweep if options.sweep else _measure
    rows: list[dict[str, Any]] = []
    for length in options.cache_seqlens:
        heads = (options.nheads, options.nheads_kv, options.headdim)
        shape = CacheShape(length, options.batch, *heads, options.seqlen_q, DTYPES[options.dtype])
        rows += measure(shape, run.device, options.rounds)
        run.write(rows)
    _print(rows, run.device_name)
    return 1 if any("failed" in row and row["name"] == "ringflash" for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench decode", "Measures flash_decode beside its peers.")
    text = "lengths of the cache, in keys (default: 4096 to 131072, doubling)"
    parser.add_argument("--cache-seqlens", type=int, nargs="+", metavar="N", help=text)
    parser.add_argument("--seqlen-q", type=int, metavar="N", default=1, help="new tokens (default: %(default)s)")
    told: dict[str, Any] = {name: Described(str(GPU[name])) for name in ("batch", "nheads", "nheads_kv", "headdim")}
    add_shared(parser, "json", rounds=7, dtype="bfloat16", **told)
    parser.add_argument("--sweep", action="store_true", help="tiles and splits of flash_decode instead of peers")
    return parser


class _Runner:
    """One contender on all caches. Each call takes the next cache; a graph on a GPU has one call on each cache."""

    def __init__(self, calls: Sequence[Call], on_gpu: bool) -> None:
        for call in calls:
            call()
        following = itertools.cycle(calls)
        self.sampler, self._call, self._count = timing.Sampler(on_gpu), lambda: next(following)(), len(calls)
        self._replay = _captured(calls) if on_gpu else None

    def sample(self) -> None:
        """Adds a sample of each way to call."""
        self.sampler.sample("queued", self._call)
        if self._replay is not None:
            self.sample_graph()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                self._call()
            self.sampler.times.setdefault("host", []).append((time.perf_counter() - begin) / HOST_CALLS)
            torch.cuda.synchronize()

    def sample_graph(self) -> None:
        """Adds a sample of the graph."""
        assert self._replay is not None
        self.sampler.sample("graph", self._replay)

    def medians(self) -> dict[str, float]:
        """Returns the median seconds of one call in each way."""
        medians = self.sampler.medians()
        return {way: seconds / self._count if way == "graph" else seconds for way, seconds in medians.items()}


def _captured(calls: Sequence[Call]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warms up libraries that keep a workspace for each stream
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph.replay


def _problems(shape: CacheShape, device: torch.device) -> list[Decoding]:
    count = -(-COLD_BYTES // shape.kv_bytes) if device.type == "cuda" else 1
    return [Decoding.random(shape, device, seed) for seed in range(count)]


def _copy(device: torch.device) -> list[Call]:
    """Returns a kernel that moves the same bytes as a copy."""
    source = torch.randn(COPY_BYTES[device.type] // torch.float32.itemsize, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    # In a graph, Tensor.copy_ is a memcpy node: 2759 GB/s on an H200, where kernels reach more than 4000.
    return [lambda: torch.neg(source, out=target)]


def _measure(shape: CacheShape, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Measures one length and returns a row for each contender."""
    on_gpu = device.type == "cuda"
    problems = _problems(shape, device)
    runners = {COPY: _Runner(_copy(device), on_gpu)}
    failed: dict[str, str] = {}
    errors: dict[str, dict[str, float]] = {}
    exact = problems[0].reference(torch.float64)
    plain = problems[0].reference(shape.dtype)
    for name, prepare in contenders(device).items():
        try:
            calls = [prepare(problem) for problem in problems]
            got = calls[0]()[:1]
            apart = difference(got.double(), exact)
            if not apart < AGREEMENT:
                failed[name] = f"another result: it differs by {apart:.2g} of the largest value"
                continue
            errors[name] = _errors(got, plain, exact)
            runners[name] = _Runner(calls, on_gpu)
        except Exception as error:  # the contender's row reports it
            failed[name] = failure(error)
    for number in range(rounds):
        for name in timing.turns(list(runners), number):
            runners[name].sample()
    medians = {name: runner.medians() for name, runner in runners.items()}
    facts, copied = _facts(shape), 2 * COPY_BYTES[device.type] / _fastest(medians[COPY])
    rows = [
        {"name": name, **facts, **_figures(shape, medians[name], copied), "errors": errors[name]}
        for name in runners
        if name != COPY
    ]
    return rows + [{"name": name, **facts, "failed": text} for name, text in failed.items()]


def _sweep(shape: CacheShape, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Measures one length and returns a row for each choice of tiles and splits, fastest first."""
    problems = _problems(shape, device)
    exact = problems[0].reference(torch.float64)
    choices: list[tuple[rf.DecodeTiles | None, int | None]] = [(None, None)]
    choices += itertools.product(
        [rf.DecodeTiles(*numbers) for numbers in itertools.product(*SWEPT.values())], SWEPT_SPLITS
    )
    copy = _Runner(_copy(device), on_gpu=True)
    rows = []
    for tiles, splits in choices:
        chosen = {"tiles": "shipped" if tiles is None else list(dataclasses.astuple(tiles)), "splits": splits}
        row = {"name": "ringflash", **_facts(shape), **chosen}
        try:
            options = rf.DecodeOptions(tiles=tiles, splits=splits)
            calls = [ours(problem, options) for problem in problems]
            if not difference(calls[0]()[:1].double(), exact) < AGREEMENT:
                raise ValueError("another result")
            runner = _Runner(calls, on_gpu=True)
            copy.sampler.times.clear()
            for _ in range(rounds):
                runner.sample_graph()
                copy.sample_graph()
            copied = 2 * COPY_BYTES[device.type] / copy.medians()["graph"]
            rows.append(row | _figures(shape, runner.medians(), copied))
        except Exception as error:  # the tiles do not fit the device
            rows.append({**row, "name": f"ringflash {chosen['tiles']}", "failed": failure(error)})
    return sorted(rows, key=lambda row: row.get("graph_us", float("inf")))


def _errors(got: Tensor, plain: Tensor, exact: Tensor) -> dict[str, float]:
    error, plain_error = (got.double() - exact).abs(), (plain.double() - exact).abs()
    rms, plain_rms = (x.square().mean().sqrt().item() for x in (error, plain_error))
    return {"rms": rms, "max": error.max().item(), "rms_over_plain": round(rms / max(plain_rms, 1e-30), 3)}


def _facts(shape: CacheShape) -> dict[str, Any]:
    return dataclasses.asdict(shape) | {"dtype": str(shape.dtype).removeprefix("torch."), "bytes": shape.bytes}


def _fastest(seconds: Mapping[str, float]) -> float:
    return seconds["graph" if "graph" in seconds else "queued"]


def _figures(shape: CacheShape, seconds: Mapping[str, float], copied: float) -> dict[str, float]:
    """Returns microseconds, and GB/s compared with a copy's rate `copied` in bytes a second."""
    figures = {f"{way}_us": round(value * 1e6, 2) for way, value in seconds.items()}
    rate = shape.bytes / _fastest(seconds)
    return figures | {
        "gb_s": round(rate / 1e9, 1),
        "copy_gb_s": round(copied / 1e9, 1),
        "share_of_copy": round(rate / copied, 3),
    }


def _print(rows: Sequence[Mapping[str, Any]], device: str) -> None:
    first = rows[0]
    title = f"Decoding {first['seqlen_q']} tokens, batch {first['batch']}, {heads(first)}, {first['dtype']}, {device}"
    of: Column = ("contender", "name", "")
    if "tiles" in first:
        of = ("tiles and splits", lambda row: f"{row['tiles']} {row['splits']}", "")
    columns: list[Column] = [
        ("keys", "length", "d"),
        of,
        *((key.replace("_", " "), key, ".1f") for key in ("graph_us", "queued_us", "host_us")),
        ("GB/s", "gb_s", ".0f"),
        ("of a copy", "share_of_copy", ".0%"),
        ("RMS error", lambda row: row["errors"]["rms"], ".1e"),
        ("of plain", lambda row: row["errors"]["rms_over_plain"], ".2f"),
    ]
    print_table(title, columns, rows, "{length} {name}")
