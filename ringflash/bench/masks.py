"""The mask benchmark: whether attention takes as much less time under a mask as the mask leaves less to see.

    ringflash bench masks --json masks.json

The yardstick is the causal mask; every other is beside it. A mask's share is its visible pairs of query and key over
those of the causal triangle, counted exactly; share times the causal ms of the same run is what it should take, and
`cost` is what it takes over that. Documents are there twice: as a mask, and as the batch of short sequences that they
are, which shows what short sequences cost without a mask. Cases take turns in rounds whose order changes; figures are
medians of the device's own times: see `timing`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ringflash as rf
from ringflash.arguments import DTYPES, check_at_least, fill_in
from ringflash.bench import record, timing
from ringflash.bench.accuracy import TENSORS
from ringflash.bench.problem import AGREEMENT, Problem, Setup, add_options, difference, failure
from ringflash.errors import ArgumentError

BLOCK = 128  # tokens in a block of the block-sparse mask
KEPT = 0.25  # of its blocks
MODES = {"backward_fast": False, "backward_deterministic": True}
PARTS = ("forward", *MODES)
FULL = {"seqlens": [32768], "headdims": [64, 128], "nheads": 16, "window": 4096, "documents": 16, "rounds": 5}
CPU = {"seqlens": [256], "headdims": [32], "nheads": 2, "window": 32, "documents": 4, "rounds": 2}  # shows that it runs


@dataclass(frozen=True)
class Case:
    """One way to see no more than the causal triangle.

    Args:
        name: what the tables call it.
        pairs: of query and key that are visible to a head, in all sequences together.
        attend: `flash_attention` with the mask.
        sequences: into which the tokens are cut.
    """

    name: str
    pairs: int
    attend: Callable[..., Any]
    sequences: int = 1

    def setup(self, problem: Problem, options: rf.AttentionOptions) -> Setup:
        """The problem, one sequence, as this case takes it."""
        given = problem.map(lambda x: x.view(self.sequences, -1, *x.shape[2:]))
        call = partial(self.attend, options=options)
        return Setup(given.leaves(), given.dout, call, lambda x: x.reshape(1, -1, *x.shape[2:]))


def cases(seqlen: int, window: int, documents: int) -> list[Case]:
    """The causal mask, and those that see less; the batch comes after the documents that it holds."""

    def masked(mask: Any) -> Callable[..., Any]:
        return partial(rf.flash_attention, mask=mask)

    causal = rf.Causal()
    length = seqlen // documents
    edge = min(window, seqlen)  # rows that see all before them
    blocks, block_pairs = _blocks(seqlen)
    apart = documents * triangle(length)
    return [
        Case("causal", triangle(seqlen), masked(causal)),
        Case(
            f"window of {window}",
            triangle(edge) + (seqlen - edge) * window,
            masked(causal & rf.SlidingWindow(window - 1, 0)),
        ),
        Case(f"{KEPT:.0%} of blocks of {BLOCK}", block_pairs, masked(causal & rf.BlockSparse(blocks, BLOCK))),
        Case(f"{documents} documents", apart, masked(causal & rf.Documents(range(0, seqlen + 1, length)))),
        Case(f"batch of {documents}", apart, masked(causal), sequences=documents),
    ]


def triangle(rows: int) -> int:
    """Pairs that a causal mask shows."""
    return rows * (rows + 1) // 2


def _blocks(seqlen: int) -> tuple[Tensor, int]:
    """Random blocks with the diagonal, and the pairs they show under a causal mask."""
    sizes = torch.tensor([min(BLOCK, seqlen - start) for start in range(0, seqlen, BLOCK)], device="cpu")
    drawn = torch.rand(len(sizes), len(sizes), generator=torch.Generator().manual_seed(seqlen), device="cpu")
    blocks = (drawn < KEPT) | torch.eye(len(sizes), dtype=torch.bool, device="cpu")
    below = int((blocks.tril(-1) * sizes[:, None] * sizes).sum())
    return blocks, below + sum(map(triangle, sizes.tolist()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every cell; 1 when a case failed."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fill_in(options, FULL if device.type == "cuda" else CPU)
    _check(options)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    command = record.command("ringflash bench masks", arguments)
    rows: list[dict[str, Any]] = []
    for seqlen, headdim in itertools.product(options.seqlens, options.headdims):
        cell = _measure(seqlen, headdim, options, device)
        _print(cell, device_name)
        rows += cell
        if options.json is not None:
            record.write(options.json, command, device_name, rows)
    return 1 if any("failed" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ringflash bench masks", description="Measures flash_attention under masks.")
    parser.add_argument("--seqlens", type=int, nargs="+", help="default: 32768")
    add_options(parser)
    parser.add_argument("--window", type=int, help="keys that a query sees, its own among them (default: 4096)")
    parser.add_argument("--documents", type=int, help="of equal length (default: 16)")
    parser.add_argument("--rounds", type=int, help="over all cases (default: 5)")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raises ArgumentError for sizes of which there are no cases."""
    check_at_least(options, ["seqlens", "window", "documents", "rounds"])
    for seqlen in options.seqlens:
        if seqlen % options.documents:
            remedy = "They are compared with a batch, whose sequences are equally long."
            expected = f"a number that divides {seqlen} tokens"
            raise ArgumentError("--documents", expected=expected, got=options.documents, remedy=remedy)


def _measure(seqlen: int, headdim: int, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The rows of one cell, one a case."""
    sizes = {"seqlen": seqlen, "nheads": options.nheads, "nheads_kv": options.nheads_kv, "headdim": headdim}
    problem = Problem.random(**sizes, device=device, dtype=DTYPES[options.dtype])
    facts = sizes | {"dtype": options.dtype, "backend": options.backend}
    rows: dict[str, dict[str, Any]] = {}
    setups: dict[str, dict[str, Setup]] = {}
    expected: list[Tensor] | None = None
    for case in cases(seqlen, options.window, options.documents):
        rows[case.name] = {"name": case.name, **facts, "pairs": case.pairs}
        rows[case.name]["share"] = case.pairs / triangle(seqlen)
        if case.sequences == 1:  # else it must agree with the documents before it
            expected = None
        modes: dict[str, Setup] = {}
        try:
            for part, deterministic in MODES.items():
                how = rf.AttentionOptions(deterministic=deterministic, backend=options.backend)
                modes[part] = case.setup(problem, how)
                results = [modes[part].whole(x.detach()) for x in modes[part].forward_backward()]
                expected = expected or results
                _agree(results, expected)
                del results
            setups[case.name] = modes
        except Exception as error:  # a case that cannot, in whatever way: said in its row
            if isinstance(error, ArgumentError) and len(rows) == 1:
                raise  # heads or a backend that causal attention does not take: nothing can be measured
            rows[case.name]["failed"] = failure(error)
    del expected
    times = _take_turns(setups, rows, options.rounds, device.type == "cuda")
    _add_figures(list(rows.values()), times)
    return list(rows.values())


def _agree(results: list[Tensor], expected: list[Tensor]) -> None:
    """Raises ValueError when results are another attention's than those of the same documents or the other mode."""
    for name, got, wanted in zip(TENSORS, results, expected, strict=True):
        apart = difference(got, wanted)
        if not apart < AGREEMENT:
            raise ValueError(f"another result: {name} differs by {apart:.2g} of the largest value")


def _take_turns(
    setups: Mapping[str, Mapping[str, Setup]], rows: Mapping[str, dict[str, Any]], rounds: int, on_gpu: bool
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every pass of every case, round by round."""
    names, paces = list(setups), dict[tuple[str, str], timing.Pace]()
    times: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in names}

    def sample(name: str, part: str, pass_: Callable[[], object]) -> None:
        if (name, part) not in paces:
            paces[name, part] = timing.pace(pass_, on_gpu)
            rows[name][f"{part}_launch_us"] = round(paces[name, part].launch_seconds * 1e6, 1)
        times[name][part].append(timing.seconds(pass_, paces[name, part], on_gpu))

    for number in range(rounds):
        for name in timing.turns(names, number):
            if "failed" in rows[name]:
                continue
            try:
                for part, setup in setups[name].items():
                    out = setup.forward()
                    sample(name, part, partial(setup.backward, out))
                    del out
                sample(name, "forward", setups[name]["backward_fast"].forward)  # the same in both modes
            except Exception as error:  # as above
                rows[name]["failed"] = failure(error)
    return times


def _add_figures(rows: Sequence[dict[str, Any]], times: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Adds to every row its median ms, and beside those of the causal mask, the first row, expected ms and cost."""
    causal = rows[0]
    for row in rows:
        if "failed" in row:
            continue
        for part in PARTS:
            measured = statistics.median(times[row["name"]][part]) * 1e3
            row[f"{part}_ms"] = round(measured, 4)
            if "failed" not in causal:
                expected = row["share"] * statistics.median(times[causal["name"]][part]) * 1e3
                row[f"{part}_expected_ms"] = round(expected, 4)
                row[f"{part}_cost"] = round(measured / expected, 3)


def _print(rows: Sequence[Mapping[str, Any]], device: str) -> None:
    first = rows[0]
    heads = f"{first['nheads']}:{first['nheads_kv']} heads of {first['headdim']}"
    table = Table(title=f"{first['seqlen']} tokens, {heads}, {first['dtype']}, backend {first['backend']}, {device}")
    table.add_column("mask", no_wrap=True)
    table.add_column("share of\ncausal", justify="right")
    for part in PARTS:
        for what in ("expected ms", "ms", "cost"):
            table.add_column("\n".join([*part.split("_"), what]), justify="right")
    for row in rows:
        cells = [row["name"], f"{row['share']:.1%}"]
        for key in (f"{part}_{what}" for part in PARTS for what in ("expected_ms", "ms", "cost")):
            cells.append("-" if key not in row else f"{row[key]:.2f}" if key.endswith("cost") else f"{row[key]:.3f}")
        table.add_row(*cells)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    for row in rows:
        if "failed" in row:
            console.print(f"  {row['name']}: {row['failed']}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
