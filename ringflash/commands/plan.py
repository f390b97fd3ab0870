"""`ringflash plan`: the plan of a ring and its cost, as tables and a picture.

It shows the tokens that each rank holds, the KV that each rank computes with at each hop, and the FLOPs and bytes.

    ringflash plan --seqlen 131072 --world-size 4 --layout balanced --document-lengths lengths.txt --png plan.png
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.table import Table

import ringflash as rf
from ringflash.commands.options import DTYPES, REQUIRED, add_shared, check_at_least, check_heads, parser_of
from ringflash.errors import ArgumentError
from ringflash.layouts.balance import reaches
from ringflash.layouts.layout import LAYOUTS
from ringflash.masks import Full, Mask
from ringflash.ring.plan import Hop, Plan, pair_table
from ringflash.ring.ring_plan import make_plan

WIDTH = 150  # columns, if the output is not a terminal
MOST_COLUMNS = 8  # ranks up to which the table of hops has a column for each rank
MOST_HOPS = 64  # lines of the table of hops
MOST_COMPARED = 1024  # ranks up to which layouts are compared: each layout counts the pairs of all ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables, and draws the picture if `--png` is given."""
    options = _parser().parse_args(argv)
    _check(options)
    mask = _mask(options)
    mask.validate(options.seqlen)
    with _paused_collector():
        _show(mask, options)
    return 0


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Keeps plans from the collector of cycles, which would visit a million hops many times. Plans hold no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        make_plan.cache_clear()  # or the collector visits the plans once more when Python exits
        if was_enabled:
            gc.enable()


def _show(mask: Mask, options: argparse.Namespace) -> None:
    context = rf.ContextParallel.local(options.world_size, options.layout)
    plans = [context.plan(mask, options.seqlen, rank) for rank in range(options.world_size)]
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_ranks(plans, options))
    console.print(_hops(plans, options))
    if options.world_size <= MOST_COMPARED:
        console.print(_layouts(mask, options))
    else:
        console.print(f"Layouts are compared over up to {MOST_COMPARED} ranks.")
    if options.png is not None:
        from ringflash.commands.plan_picture import draw

        draw(options.png, plans)
        console.print(f"Drawn: {options.png}", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("plan", "Shows a ring's plan: nothing is run.")
    add_shared(parser, seqlen=REQUIRED, world_size=REQUIRED, layout="zigzag", mask="causal")
    add_shared(parser, "window_left", "window_right")
    text = "lengths of packed documents: 4096,512,..., or a file that holds them"
    parser.add_argument("--document-lengths", metavar="LENGTHS", help=text)
    add_shared(parser, batch=1, nheads=32, nheads_kv=8, headdim=128, dtype="bfloat16")
    add_shared(parser, "png", "debug")
    return parser


def _check(options: argparse.Namespace) -> None:
    positive = ["seqlen", "world_size", "batch", "nheads", "nheads_kv", "headdim"]
    check_at_least(options, positive, remedy="Pass a positive number.")
    check_heads(options)
    check_at_least(options, ["window_left", "window_right"], 0, remedy="Leave it out for no limit.")


def _mask(options: argparse.Namespace) -> Mask:
    mask: Mask = rf.Causal() if options.mask == "causal" else Full()
    if options.window_left is not None or options.window_right is not None:
        mask &= rf.SlidingWindow(options.window_left, options.window_right)
    if options.document_lengths is not None:
        lengths = _lengths(options.document_lengths)
        if sum(lengths) != options.seqlen:
            expected, got = f"lengths that sum to --seqlen {options.seqlen}", f"a sum of {sum(lengths)}"
            remedy = "Add what pads the sequence as a document, or change --seqlen."
            raise ArgumentError("--document-lengths", expected=expected, got=got, remedy=remedy)
        mask &= rf.Documents([0, *accumulate(lengths)])
    return mask


def _lengths(given: str) -> list[int]:
    """Returns the whole numbers in `given` or in the file of that name, separated by commas or white space."""
    # os.path takes any text; Path.is_file raises OSError for lengths that are too long for a name.
    text = Path(given).read_text(errors="replace") if os.path.isfile(given) else given
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        wrong = next((word for word in words if not word.isascii() or not word.isdigit()), "none")
        remedy = "Pass --document-lengths 4096,512,3584, or a file of such numbers."
        raise ArgumentError(
            "--document-lengths", expected="lengths, or a file that holds them", got=wrong, remedy=remedy
        )
    return [int(word) for word in words]


def _ranks(plans: Sequence[Plan], options: argparse.Namespace) -> Table:
    first = plans[0]
    table = Table(
        title=f"{first.layout.name}, {first.mask!r}: {options.seqlen} tokens over {first.world_size} ranks, batch "
        f"{options.batch}, {options.nheads}:{options.nheads_kv} heads of {options.headdim}, {options.dtype}",
        caption=f"The busiest rank has {first.balance:.3f} of the mean; as ranks wait for each other the ring takes "
        f"{first.critical_path:.3f}. A backward sends keys and values again, and their gradients in float32.",
    )
    work = "rank", "tokens", "chunks", "share of\nFLOPs", "TFLOP\nforward", "TFLOP\nbackward"
    messages = "MiB sent\nforward", "MiB sent\nbackward", "of these\npassed on", "hops\ncomputed"
    for column in (*work, *messages):
        table.add_column(column, justify="right")
    heads = options.batch, options.nheads_kv, options.headdim, DTYPES[options.dtype].itemsize
    total = sum(map(sum, first.pairs))
    for plan in plans:
        flops = [plan.flops(options.batch, options.nheads, options.headdim, backward=back) for back in (False, True)]
        passed = sum(plan.rows_sent_at(hop) for hop in plan.hops if hop.passes_on) / max(plan.rows_sent, 1)
        table.add_row(
            str(plan.rank),
            f"{plan.layout.length(plan.rank):,}",
            str(len(plan.q_chunks)),
            f"{sum(plan.pairs[plan.rank]) / total if total else 1 / len(plans):.2%}",
            *(f"{count / 1e12:,.3f}" for count in flops),
            *(f"{sent / 2**20:,.1f}" for sent in (plan.bytes_sent(*heads), plan.bytes_sent_backward(*heads))),
            f"{passed:.0%}",
            f"{sum(hop.meets for hop in plan.hops)} of {len(plan.hops)}",
        )
    return table


def _hops(plans: Sequence[Plan], options: argparse.Namespace) -> Table:
    total = max(sum(map(sum, plans[0].pairs)), 1)
    shown = plans if len(plans) <= MOST_COLUMNS else []
    count = len(plans[0].hops)
    table = Table(
        title="Hops of a forward: whose KV is where, and its share of all FLOPs",
        caption=f"The first {MOST_HOPS} of {count} hops." if count > MOST_HOPS else None,
    )
    table.add_column("hop", justify="right")
    columns = "ranks that\ncompute", "pass on", "are idle", "share of\nFLOPs", "busiest\nof mean", "MiB sent\nin all"
    for column in columns:
        table.add_column(column, justify="right")
    for plan in shown:
        table.add_column(f"rank {plan.rank}")
    row_bytes = 2 * options.batch * options.nheads_kv * options.headdim * DTYPES[options.dtype].itemsize
    for step in zip(*(plan.hops[:MOST_HOPS] for plan in plans), strict=True):
        computing, passing = sum(hop.meets for hop in step), sum(hop.passes_on for hop in step)
        pairs = [hop.pairs for hop in step]
        table.add_row(
            str(step[0].index),
            *map(str, (computing, passing, len(step) - computing - passing)),
            f"{sum(pairs) / total:.1%}",
            f"{max(pairs) * len(pairs) / sum(pairs):.2f}" if sum(pairs) else "-",
            f"{sum(plan.rows_sent_at(hop) for plan, hop in zip(plans, step, strict=True)) * row_bytes / 2**20:,.1f}",
            *(_cell(hop, total) for hop in step[: len(shown)]),
        )
    return table


def _cell(hop: Hop, total: int) -> str:
    if hop.meets:
        return f"KV {hop.owners[0]}: {hop.pairs / total:.1%}"
    return f"KV {hop.owners[0]} passes" if hop.passes_on else "idle"


def _layouts(mask: Mask, options: argparse.Namespace) -> Table:
    table = Table(title="The same under every layout")
    rest = "busiest\nof mean", "time of\nthe ring", "hops", "KV rows sent,\nof all to all", "most chunks\na rank"
    for column in ("layout", *rest):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for layout in LAYOUTS:
        plan = rf.ContextParallel.local(options.world_size, layout).plan(mask, options.seqlen)
        reach = reaches(pair_table(plan.layout, mask) > 0).tolist()
        sent = sum(hops * rows for hops, rows in zip(reach, plan.layout.lengths, strict=True))  # by all ranks
        everything = options.seqlen * max(plan.world_size - 1, 1)
        table.add_row(
            layout,
            f"{plan.balance:.3f}",
            f"{plan.critical_path:.3f}",
            str(len(plan.hops)),
            f"{sent / everything:.0%}",
            str(max(map(len, plan.layout.chunks))),
        )
    return table
