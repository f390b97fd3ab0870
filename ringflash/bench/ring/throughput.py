"""The ring benchmark: ring_attention over all ranks and its peers, in one run with interleaved rounds.

    torchrun --nproc-per-node 4 -m ringflash.bench ring --peers --check --json ring.json

Times are the slowest rank's, medians over rounds. TFLOP/s are of one GPU; causal counts as half, a backward as 2.5
forwards. Two yardsticks run in the same rounds:

- one kernel at equal work: causal `flash_attention` on every rank by itself. Its sequence has the visible pairs of the
  ring's mean rank: seqlen / sqrt(ranks) tokens for a causal ring. "of one kernel" is its time over the ring's time. The
  kernel has none of the ring's additions: state between hops, launches, uneven ranks, messages.
- the ring without messages: the same calls and kernels on the same plan, with nothing sent. The time that the real ring
  takes in addition is the exposed communication, divided by the number of hops. Both passes have the same number.

With --window-left or --num-documents, TFLOP/s count visible pairs. "over its FLOPs" is then the time over FLOPs / (rate
of the one kernel).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.bench.attention.masks import triangle
from ringflash.bench.common import ranks
from ringflash.bench.common.problem import AGREEMENT, Contender, Problem, difference, failure
from ringflash.bench.common.ranks import PARTS, Samples
from ringflash.bench.common.report import Column, Row, heads, print_table
from ringflash.bench.ring import peers, seen
from ringflash.bench.ring.accuracy import Yardstick
from ringflash.commands.options import DTYPES, add_shared, check_at_least, parser_of
from ringflash.errors import ArgumentError

ALONE, SILENT = "one kernel", "without messages"  # yardsticks
# Errors of contenders, which rows report. A broken installation raises OSError, and another release AttributeError.
CANNOT = (ImportError, OSError, AttributeError, RuntimeError, ValueError, TypeError, AssertionError)


@dataclass(frozen=True)
class Work:
    """Work of a problem in a ring.

    Args:
        flops: FLOPs of a forward on all ranks.
        hops: number of hops of the ring.
        tokens: length of a causal sequence with about the visible pairs of the mean rank.
        share: pairs of the mean rank over the pairs of this causal sequence: nearly 1.
        balance: pairs of the busiest rank over the mean.
        grouped: whether hops are grouped.
    """

    flops: float
    hops: int
    tokens: int
    share: float
    balance: float
    grouped: bool

    @staticmethod
    def of(problem: Problem, context: rf.ContextParallel) -> Work:
        """Returns the work of `problem` from the plan of `context`."""
        plan = context.plan(problem.visible, problem.seqlen, row_bytes=problem.row_bytes)
        pairs = sum(map(sum, plan.pairs)) / plan.world_size
        tokens = max(1, min(isqrt(int(2 * pairs)), problem.seqlen))
        share = pairs / triangle(tokens)
        return Work(problem.forward_flops, len(plan.hops), tokens, share, plan.balance, plan.grouped)


def main(argv: Sequence[str]) -> int:
    """Joins the ranks that torchrun started, and runs the benchmark. Returns 0."""
    _check(_parser().parse_args(argv))
    with ranks.joined("ring", argv) as mesh:
        run(argv, mesh)
    return 0


def run(arguments: Sequence[str], mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Measures every length and returns the rows. Rank 0 prints a table, and writes JSON if asked."""
    options = _parser().parse_args(arguments)
    context = rf.ContextParallel(mesh, layout=options.layout, transport=options.transport, hops=options.hops)
    named = peers.contenders(context, mesh, with_peers=options.peers)
    for name in options.variants:
        named[f"ringflash {context.layout}, {name}"] = peers.variant(name, mesh, context, options.transport)
    for number in options.head_splits:
        contender = peers.heads_by_ring(mesh, number, options.layout, options.transport)
        named[f"ringflash {context.layout}, heads over {number} ranks"] = contender
    rows: list[dict[str, Any]] = []
    for seqlen in options.seqlens:
        rows += _measure_length(seqlen, options, context, named, ranks.device_of(mesh))
        ranks.write(options.json, "ring", arguments, mesh, rows)
    if dist.get_rank() == 0:
        _print(rows, f"{mesh.size()} x {ranks.device_name(mesh)}")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench ring", "Measures ring_attention beside its peers.")
    ranks.add_options(parser)
    add_shared(parser, "window_left", "num_documents", "peers", rounds=5)
    parser.add_argument("--hops", default="auto", help="schedule, as ContextParallel.hops (default: %(default)s)")
    text = "calls in a time, one after another, as in training (default: %(default)s)"
    parser.add_argument("--queued", type=int, default=1, help=text)
    parser.add_argument("--variants", choices=peers.VARIANTS, nargs="+", default=[], help="ringflash in other ways too")
    add_shared(parser, head_splits=[])
    parser.add_argument("--check", action="store_true", help="errors against float64, beside plain attention's")
    return parser


def _check(options: argparse.Namespace) -> None:
    check_at_least(options, ["rounds", "repeats", "queued"])
    for seqlen in options.seqlens:
        _, name = seen.mask(seqlen, options.window_left, options.num_documents)
        if options.peers and name != "causal":
            remedy = "Leave out --peers: they know the causal mask alone."
            raise ArgumentError("--peers", expected="the causal mask", got=name, remedy=remedy)


def _measure_length(
    seqlen: int,
    options: argparse.Namespace,
    context: rf.ContextParallel,
    named: dict[str, Contender],
    device: torch.device,
) -> list[dict[str, Any]]:
    mask, mask_name = seen.mask(seqlen, options.window_left, options.num_documents)
    sizes = {"nheads": options.nheads, "nheads_kv": options.nheads_kv, "headdim": options.headdim}
    problem = Problem.random(seqlen, **sizes, device=device, dtype=DTYPES[options.dtype], mask=mask)
    work = Work.of(problem, context)
    ours = next(iter(named))
    failed, errors = _compare(problem, named, context, check=options.check)
    timed = {name: contender for name, contender in named.items() if name not in failed}
    if ours in timed:
        timed[SILENT] = partial(peers.without_messages, context=context)
        timed[ALONE] = partial(peers.alone, tokens=work.tokens)
    samples = {name: Samples() for name in timed}
    for _ in range(options.rounds):
        for name, contender in timed.items():
            if name in failed:
                continue
            try:
                ranks.take_round(contender, problem, samples[name], options.repeats, queued=options.queued)
            except CANNOT as error:  # out of memory, on all ranks alike
                failed[name] = failure(error)
    medians = {name: of.medians() for name, of in samples.items() if name not in failed}
    same = {"seqlen": seqlen, "world_size": context.world_size, "mask": mask_name, **sizes, "dtype": options.dtype}
    same |= {"queued": options.queued} if options.queued > 1 else {}
    rows: list[dict[str, Any]] = []
    for name in named:
        row: dict[str, Any] = {"name": name, **same}
        if name == ours:
            row |= {"layout": options.layout, "transport": context.transport_kind, "balance": round(work.balance, 4)}
            row["schedule"] = "grouped" if work.grouped else "ring"
        if name in failed:
            rows.append(row | {"failed": failed[name]})
            continue
        row |= samples[name].figures(work.flops, context.world_size)
        row |= _over_one_kernel(medians[name], medians[ALONE], work) if ALONE in medians else {}
        if name == ours:
            row |= _yardsticks(medians, ours, work) if {ALONE, SILENT} <= medians.keys() else {}
            row |= {"errors_over_plain": errors} if errors else {}
        rows.append(row)
    return rows


def _compare(
    problem: Problem, named: dict[str, Contender], context: rf.ContextParallel, *, check: bool
) -> tuple[dict[str, str], dict[str, float]]:
    """Compares every contender's output with the first one's, because only equal results are worth timing.

    Returns:
        Reasons of failed contenders by name, and with `check` on rank 0 the errors of the first contender.

    Raises:
        ArgumentError: attention does not take the heads, the length or the mask.
    """
    expected, failed, results, errors = None, dict[str, str](), [], dict[str, float]()
    ours = next(iter(named))
    for name, contender in named.items():
        try:
            with contender(problem) as shard:
                out = shard.whole(shard.forward().detach())
                expected = out if expected is None else expected
                apart = difference(out, expected)
                if name == ours and check:
                    results = [shard.whole(x.detach()) for x in shard.forward_backward()]
            if not apart < AGREEMENT:
                failed[name] = f"another result: it differs by {apart:.2g} of the largest value"
        except ArgumentError:
            raise  # attention does not take the heads, the length or the mask
        except CANNOT as error:
            failed[name] = failure(error)
    if results and context.rank == 0:
        for tensor, error in Yardstick.of(problem).errors(results).items():
            errors |= {f"{tensor} rms": round(error.rms_ratio, 3), f"{tensor} max": round(error.max_ratio, 3)}
    dist.barrier()
    return failed, errors


def _over_one_kernel(seconds: dict[str, float], alone: dict[str, float], work: Work) -> dict[str, float]:
    figures: dict[str, float] = {}
    for part in PARTS:
        figures[f"{part}_of_one_kernel"] = round(alone[part] * work.share / seconds[part], 4)
        figures[f"{part}_over_flops"] = round(seconds[part] / alone[part] / work.share, 3)
    return figures


def _yardsticks(medians: dict[str, dict[str, float]], ours: str, work: Work) -> dict[str, float]:
    """Returns the times of the yardsticks, and the exposed communication of each pass in microseconds a hop."""
    figures: dict[str, float] = {"hops": work.hops, "one_kernel_tokens": work.tokens}
    for part in PARTS:
        figures[f"one_kernel_{part}_ms"] = round(medians[ALONE][part] * 1e3, 3)
        figures[f"without_messages_{part}_ms"] = round(medians[SILENT][part] * 1e3, 3)
    exposed = {part: medians[ours][part] - medians[SILENT][part] for part in PARTS}
    backward = exposed["forward_backward"] - exposed["forward"]
    for name, seconds in (("forward", exposed["forward"]), ("backward", backward)):
        figures[f"{name}_exposed_us_a_hop"] = round(seconds / work.hops * 1e6, 1)
    return figures


def _print(rows: Sequence[Row], device: str) -> None:
    """Prints the times, rates and memory of every contender, and the errors if they were measured."""
    first = rows[0]
    columns: list[Column] = [("seqlen", "seqlen", "d"), ("contender", "name", "<")]
    for part, title in (("forward", "forward"), ("forward_backward", "both passes")):
        columns.append((f"{title}\nms", f"{part}_ms", ".2f"))
        columns.append((f"{title}\nTFLOP/s\na GPU", f"{part}_tflops_per_gpu", ".0f"))
        if first["mask"] == "causal":
            columns.append((f"{title}\nof one\nkernel", f"{part}_of_one_kernel", ".1%"))
        else:
            columns.append((f"{title}\nover its\nFLOPs", f"{part}_over_flops", ".2f"))
    columns.append(("exposed us a hop\nforward / backward", _exposed, ">"))
    columns.append(("GiB", "gib", ".2f"))
    title = f"Ring attention, {first['mask']}: {heads(first)}, {first['dtype']}, {device}"
    print_table(title, columns, rows, "{seqlen}, {name}")
    for row in rows:
        if "errors_over_plain" in row:
            print(f"{row['seqlen']}: errors over plain {row['dtype']} attention's: {row['errors_over_plain']}")


def _exposed(row: Row) -> str:
    return f"{row['forward_exposed_us_a_hop']:.0f} / {row['backward_exposed_us_a_hop']:.0f}"
