"""The mask benchmark: the time of attention under a mask, compared with the mask's share of visible pairs.

    ringflash bench masks --json masks.json

The causal mask is the yardstick for every other mask. A mask's share is its exact number of visible pairs over the
pairs of the causal triangle. The expected time is the share times the causal ms of the same run, and `cost` is the
measured time over the expected time. Documents have mixed lengths, or equal lengths. Equal documents are measured
twice: as a mask, and as a batch of short sequences, which shows the cost of short sequences without a mask. With
`--peers`, FlashAttention-4 and FlexAttention get the same cases, each compared with its own causal ms. Rounds run all
cases in a changing order. Figures are medians of the device's own times: see `timing`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringflash.bench.attention.mask_cases import cases, triangle
from ringflash.bench.attention.mask_peers import MaskContender, flash_attention_4, flex, ours
from ringflash.bench.attention.single import Unavailable, compiling
from ringflash.bench.common import timing
from ringflash.bench.common.problem import Problem, Setup, add_options, check_agreement, failure
from ringflash.bench.common.record import Run
from ringflash.bench.common.report import Column, heads, print_table
from ringflash.bench.ring.accuracy import TENSORS
from ringflash.commands.options import DTYPES, Described, add_shared, check_at_least, parser_of
from ringflash.errors import ArgumentError

FAST = "backward_fast"
MODES = {FAST: False, "backward_deterministic": True}
PARTS = ("forward", *MODES)
DESCRIPTION = "Measures flash_attention under masks; --peers adds FlashAttention-4 and FlexAttention."
FULL = {"seqlens": [32768], "headdims": [64, 128], "nheads": 16, "rounds": 5}
FULL |= {"window_left": 4095, "num_documents": 16}
CPU = {"seqlens": [256], "headdims": [32], "nheads": 2, "rounds": 2}  # shows that it runs
CPU |= {"window_left": 31, "num_documents": 4}

Key = tuple[str, str]  # a contender and a case


def main(argv: Sequence[str]) -> int:
    """Measures every cell. Returns 1 if a case failed, else 0."""
    run = Run.begin(_parser(), argv, FULL, CPU)
    _check(run.options, run.device)
    rows: list[dict[str, Any]] = []
    for seqlen, headdim in itertools.product(run.options.seqlens, run.options.headdims):
        with compiling() if run.options.peers else nullcontext():
            cell = _measure(seqlen, headdim, run.options, run.device)
        _print(cell, run.device_name)
        rows += cell
        run.write(rows)
    return 1 if any("failed" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench masks", DESCRIPTION)
    add_options(parser, FULL, "32768")
    told: dict[str, Any] = {name: Described(str(FULL[name])) for name in ("window_left", "num_documents")}
    add_shared(parser, "peers", backend="auto", **told)
    return parser


def _check(options: argparse.Namespace, device: torch.device) -> None:
    """Raises ArgumentError for sizes that have no cases, and for peers that cannot run on `device`."""
    check_at_least(options, ["seqlens", "num_documents", "rounds"])
    check_at_least(options, ["window_left"], 0)
    if options.peers and device.type != "cuda":
        remedy = "Leave it out: FlashAttention-4 and FlexAttention's backward run on GPUs."
        raise ArgumentError("--peers", expected="a GPU", got="none", remedy=remedy)
    for seqlen in options.seqlens:
        if seqlen % options.num_documents:
            remedy = "They are compared with a batch, whose sequences are equally long."
            expected = f"a number that divides {seqlen} tokens"
            raise ArgumentError("--num-documents", expected=expected, got=options.num_documents, remedy=remedy)


def _measure(seqlen: int, headdim: int, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measures one cell and returns a row for each contender and case."""
    sizes = {"seqlen": seqlen, "nheads": options.nheads, "nheads_kv": options.nheads_kv, "headdim": headdim}
    problem = Problem.random(**sizes, device=device, dtype=DTYPES[options.dtype])
    facts = sizes | {"dtype": options.dtype, "backend": options.backend}
    rows: dict[Key, dict[str, Any]] = {}
    setups: dict[Key, dict[str, Setup]] = {}
    expected: list[Tensor] | None = None
    contenders: dict[str, dict[str, MaskContender]] = {
        "ringflash": {part: partial(ours, deterministic=mode, backend=options.backend) for part, mode in MODES.items()}
    }
    if options.peers:
        contenders |= {"FlashAttention-4": {FAST: flash_attention_4}, "FlexAttention": {FAST: flex}}
    for case in cases(seqlen, options.window_left + 1, options.num_documents):
        if case.sequences == 1:  # a batch must agree with the documents before it
            expected = None
        for by, parts in contenders.items():
            row = {"name": case.name, "by": by, **facts, "pairs": case.pairs, "share": case.pairs / triangle(seqlen)}
            rows[by, case.name] = row
            modes: dict[str, Setup] = {}
            try:
                for part, prepare in parts.items():
                    modes[part] = prepare(case, problem)
                    results = [modes[part].whole(x.detach()) for x in modes[part].forward_backward()]
                    check_agreement(TENSORS, results, expected or results)
                    expected = expected or results
                    del results
                setups[by, case.name] = modes
            except Unavailable as error:
                row["unavailable"] = str(error)
            except Exception as error:  # for whatever reason it fails, its row reports it
                if isinstance(error, ArgumentError) and len(rows) == 1:
                    raise  # attention takes no such heads or backend: nothing can be measured
                row["failed"] = failure(error)
    del expected
    samplers = {key: timing.Sampler(device.type == "cuda") for key in setups}
    for number in range(options.rounds):
        for key in timing.turns(list(setups), number):
            samplers[key].sample_passes(setups[key], rows[key])
    for by in contenders:
        _add_figures([row for row in rows.values() if row["by"] == by], samplers)
    return list(rows.values())


def _add_figures(rows: Sequence[dict[str, Any]], samplers: Mapping[Key, timing.Sampler]) -> None:
    """Adds to every row its median ms, and its expected ms and cost relative to the first row, the causal mask."""
    causal = rows[0]["name"]
    measured = [row for row in rows if not {"failed", "unavailable"} & row.keys()]
    medians = {row["name"]: samplers[row["by"], row["name"]].medians() for row in measured}
    for row in measured:
        row |= samplers[row["by"], row["name"]].launches()
        for part, seconds in medians[row["name"]].items():
            row[f"{part}_ms"] = round(seconds * 1e3, 4)
            if causal in medians:
                expected = row["share"] * medians[causal][part]
                row[f"{part}_expected_ms"] = round(expected * 1e3, 4)
                row[f"{part}_cost"] = round(seconds / expected, 3)


def _print(rows: Sequence[Mapping[str, Any]], device: str) -> None:
    first = rows[0]
    title = f"{first['seqlen']} tokens, {heads(first)}, {first['dtype']}, backend {first['backend']}, {device}"
    columns: list[Column] = [("mask", "name", "<"), ("by", "by", "<"), ("share of\ncausal", "share", ".1%")]
    for part in PARTS:
        head = part.replace("_", "\n")
        for what, form in (("expected_ms", ".3f"), ("ms", ".3f"), ("cost", ".2f")):
            columns.append((f"{head}\n{what.replace('_', ' ')}", f"{part}_{what}", form))
    print_table(title, columns, rows, "{name}, {by}")
