"""The host benchmark: the time that Python and the launches of one warm call take, for ringflash and its peers.

    ringflash bench host --json host.json

A sample is the mean of calls in a row, without waiting for the GPU, whose queue is empty when the sample begins. Rounds
run all calls in a changing order; figures are medians in microseconds. Documents that were seen before are one mask
object; new documents are another mask in every call, whose making is not timed, from lengths on the CPU or the GPU.
Calls of the peers whose package is
missing are left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf
from ringflash.bench.attention.single import Unavailable, cute, out_of
from ringflash.bench.common import timing
from ringflash.bench.common.problem import add_options
from ringflash.bench.common.record import Run
from ringflash.bench.common.report import Column, print_table
from ringflash.commands.options import DTYPES, parser_of

CALLS = 40  # of a sample: few enough that their launches fit into the GPU's queue
WARM_CALLS = 5
GPU = {"seqlens": [128, 512, 1024, 2048], "headdims": [64, 128], "nheads": 8, "rounds": 15}
CPU = {"seqlens": [64], "headdims": [32], "nheads": 2, "rounds": 2}  # shows that it runs
_Calls = dict[tuple[str, str], Callable[[], object]]  # by the names of the contender and of the call


def main(argv: Sequence[str]) -> int:
    """Measures and prints the host time of every call."""
    run = Run.begin(_parser(), argv, GPU, CPU)
    options, device = run.options, run.device
    rows: list[dict[str, Any]] = []
    count = len(options.headdims) * (options.rounds * CALLS + WARM_CALLS)  # a mask keeps its tables: each is used once
    masks = {seqlen: [_new_documents(seqlen, place, count) for place in ("cpu", device)] for seqlen in options.seqlens}
    heads = options.nheads, options.nheads_kv
    for seqlen, headdim in itertools.product(options.seqlens, options.headdims):
        shape = {"seqlen": seqlen, "headdim": headdim, "nheads": heads[0], "nheads_kv": heads[1]}
        calls = _calls(
            seqlen, heads, headdim, device, DTYPES[options.dtype], masks[seqlen], with_compiled=options.compiled
        )
        for (name, call), microseconds in _measure(calls, options.rounds, device).items():
            rows.append(
                {"name": name, "call": call, **shape, "dtype": options.dtype, "host_us": round(microseconds, 1)}
            )
        run.write(rows)
    _print(rows, run.device_name)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench host", "Measures the host time of warm calls.")
    add_options(parser, GPU, "128 512 1024 2048")
    parser.add_argument("--compiled", action="store_true", help="also both under torch.compile")
    return parser


def _calls(
    seqlen: int,
    heads: tuple[int, int],
    headdim: int,
    device: torch.device,
    dtype: torch.dtype,
    fresh: Sequence[Iterator[Any]],
    *,
    with_compiled: bool,
) -> _Calls:
    """Returns the calls to measure, on causal self-attention of one sequence; `fresh` yields new documents.

    The first iterator has them on the CPU, and the second on the device.
    """
    nheads, nheads_kv = heads
    q, k, v, dout = (
        torch.randn(1, seqlen, count, headdim, device=device, dtype=dtype)
        for count in (nheads, nheads_kv, nheads_kv, nheads)
    )
    causal, seen = rf.Causal(), rf.Causal() & rf.Documents([0, seqlen // 3, seqlen])
    calls: _Calls = {}

    def add(name: str, attend: Callable[..., Tensor], heads_first: bool = False, repeats: bool = True) -> None:
        tensors = [x.transpose(1, 2).contiguous() if heads_first else x for x in (q, k, v, dout)]
        plain, gradient = tensors[:3], tensors[3]
        leaves = [x.detach().requires_grad_() for x in plain]
        out = attend(*leaves)
        calls[name, "forward"] = lambda: attend(*plain)
        calls[name, "forward with gradients"] = lambda: attend(*leaves)
        if repeats:
            calls[name, "backward"] = lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    add("ringflash", lambda q, k, v: rf.flash_attention(q, k, v, mask=causal))
    calls["ringflash", "forward, documents seen before"] = lambda: rf.flash_attention(q, k, v, mask=seen)
    for name, masks in zip(("new documents", "new documents on the GPU"), fresh, strict=True):
        calls["ringflash", f"forward, {name}"] = lambda masks=masks: rf.flash_attention(q, k, v, mask=next(masks))
    if with_compiled:
        compiled = torch.compile(lambda q, k, v: rf.flash_attention(q, k, v, mask=causal))
        add("ringflash, compiled", compiled, repeats=False)  # a compiled backward frees what it reads
    lengths = torch.full((1,), seqlen, dtype=torch.int32, device=device)
    calls["ringflash", "flash_decode"] = lambda: rf.flash_decode(q[:, -1:], k, v, cache_seqlens=lengths)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=nheads > nheads_kv)

    if device.type == "cuda":
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # fails here, rather than choosing another backend later
            sdpa(*(x.transpose(1, 2) for x in (q, k, v)))
    add("SDPA", sdpa, heads_first=True)
    if with_compiled:
        add("SDPA, compiled", torch.compile(sdpa), heads_first=True, repeats=False)
    with suppress(Unavailable):
        add("FlashAttention-4", out_of(cute().flash_attn_func, causal=True))
    return calls


def _new_documents(seqlen: int, device: torch.device | str, count: int) -> Iterator[Any]:
    """Returns `count` masks of three documents. Equal ones are further apart than any cache by value keeps."""
    cuts = itertools.islice(itertools.cycle(itertools.combinations(range(1, seqlen), 2)), count)
    ends = torch.tensor([[0, *pair, seqlen] for pair in cuts]).to(device)
    return iter([rf.Causal() & rf.Documents(each) for each in ends])


def _measure(calls: _Calls, rounds: int, device: torch.device) -> dict[tuple[str, str], float]:
    """Returns the median microseconds of each call."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    on_gpu = device.type == "cuda"
    for call in calls.values():
        for _ in range(WARM_CALLS):
            call()
    for number in range(rounds):
        for name in timing.turns(list(calls), number):
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return {name: statistics.median(samples) for name, samples in times.items()}


def _print(rows: list[dict[str, Any]], device: str) -> None:
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    columns: dict[str, Column] = {key: (title, key, "") for title, key in (("contender", "name"), ("call", "call"))}
    for row in rows:
        size = f"{row['seqlen']} tokens, d{row['headdim']}"
        lines.setdefault((row["name"], row["call"]), dict(row))[size] = row["host_us"]
        columns[size] = size, size, ".1f"
    print_table(f"host time of a warm call, us, {device}", list(columns.values()), list(lines.values()))
