"""The scaling benchmark: ring_attention by length and number of GPUs, compared with flash_attention on one GPU.

    torchrun --nproc-per-node 4 -m ringflash.bench scaling --json scaling.json --png scaling.png

The rings consist of the first 1, 2, 4 ... ranks, and finally of all ranks. One rank runs `flash_attention`. Each round
runs all numbers of GPUs. Times are the slowest rank's, medians over rounds.

Strong scaling compares the same sequence: time on one GPU / (n times the time on n GPUs). Weak scaling compares the
same tokens a GPU, so n GPUs have n times the length and n^2 times the work. It is their TFLOP/s a GPU over the TFLOP/s
of one GPU at 1 / n of the length.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.bench.common import ranks
from ringflash.bench.common.plot import draw_scaling
from ringflash.bench.common.problem import Problem, failure
from ringflash.bench.common.ranks import PARTS, Samples
from ringflash.bench.common.report import Column, heads, print_table
from ringflash.bench.ring import peers
from ringflash.commands.options import DTYPES, Described, add_shared, check_at_least, parser_of
from ringflash.errors import ArgumentError

Rings = dict[int, tuple[dist.ProcessGroup, rf.ContextParallel | None]]  # by number of ranks, with this rank in them


def main(argv: Sequence[str]) -> int:
    """Joins the ranks that torchrun started, and runs the benchmark. Returns 1 if a row failed, else 0."""
    names = ["seqlens", "world_sizes", "most_tokens", "rounds", "repeats"]
    check_at_least(_parser().parse_args(argv), names)
    with ranks.joined("scaling", argv) as mesh:
        rows = run(argv, mesh)
    return 1 if any("failed" in row for row in rows) else 0


def run(arguments: Sequence[str], mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Measures every length; rank 0 prints a table, and writes JSON and draws a picture if asked.

    Returns:
        Rows of the rings that include this rank: on rank 0, all rows.

    Raises:
        ArgumentError: a number of GPUs does not divide all, or every length is too long or too short.
    """
    options = _parser().parse_args(arguments)
    counts = sorted(set(options.world_sizes or default_counts(mesh.size())))
    for count in counts:
        if mesh.size() % count:
            remedy = "Start another number of processes, or leave it out."
            raise ArgumentError("--world-sizes", expected=f"divisors of {mesh.size()}", got=count, remedy=remedy)
    if not any(_measured(seqlen, counts, options) for seqlen in options.seqlens):
        remedy = "Name other lengths, or more of --most-tokens."
        expected = f"a length of at most {options.most_tokens} tokens a GPU and a token at least"
        raise ArgumentError("--seqlens", expected=expected, got=options.seqlens, remedy=remedy)
    rings = _rings(counts, options)
    rows: list[dict[str, Any]] = []
    for seqlen in options.seqlens:
        rows = with_efficiency(rows + _measure_length(seqlen, counts, rings, options, mesh))
        ranks.write(options.json, "scaling", arguments, mesh, rows)
    if dist.get_rank() == 0:
        device = ranks.device_name(mesh)
        _print(rows, device)
        if options.png is not None:
            draw_scaling(options.png, rows, device)
    return rows


def default_counts(world_size: int) -> list[int]:
    """Returns the powers of two that divide `world_size`, and `world_size` itself."""
    powers = (2**n for n in range(world_size.bit_length()))
    return sorted({world_size, *(power for power in powers if world_size % power == 0)})


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench scaling", "Measures ring_attention by length and GPUs.")
    ranks.add_options(parser)
    add_shared(parser, "png", world_sizes=Described("1, 2, 4 ... and all"), rounds=3)
    parser.add_argument(
        "--most-tokens", type=int, default=2**18, help="a GPU; more are left out (default: %(default)s)"
    )
    return parser


def _rings(counts: Sequence[int], options: argparse.Namespace) -> Rings:
    """Returns the groups of first ranks that include this rank, with a context for more than one rank.

    The function is a collective of all ranks.
    """
    rings: Rings = {}
    for count in counts:
        group = dist.new_group(list(range(count)))
        if isinstance(group, dist.ProcessGroup):
            ring = rf.ContextParallel(group, layout=options.layout, transport=options.transport) if count > 1 else None
            rings[count] = group, ring
    return rings


def _measured(seqlen: int, counts: Sequence[int], options: argparse.Namespace) -> list[int]:
    """Returns the numbers of GPUs for which `seqlen` is neither too long nor too short."""
    return [count for count in counts if count <= seqlen <= options.most_tokens * count]


def _measure_length(
    seqlen: int, counts: Sequence[int], rings: Rings, options: argparse.Namespace, mesh: DeviceMesh
) -> list[dict[str, Any]]:
    """Measures one length. Returns a row for each of its rings that includes this rank."""
    counts = _measured(seqlen, counts, options)
    sizes = {"nheads": options.nheads, "nheads_kv": options.nheads_kv, "headdim": options.headdim}
    problem = Problem.random(seqlen, **sizes, device=ranks.device_of(mesh), dtype=DTYPES[options.dtype])
    samples, failed = {count: Samples() for count in counts}, dict[int, str]()
    for _ in range(options.rounds):
        for count in counts:
            if count in rings and count not in failed:
                group, context = rings[count]
                alone = partial(peers.alone, tokens=seqlen)
                contender = alone if context is None else partial(peers.ours, context=context)
                try:
                    ranks.take_round(contender, problem, samples[count], options.repeats, group)
                except ArgumentError:
                    raise  # attention does not take the heads
                except RuntimeError as error:  # out of memory, on all ranks of the ring alike
                    failed[count] = failure(error)
            dist.barrier()  # ranks outside the ring wait, and leave the links and the power to it
    rows = []
    for count in (count for count in counts if count in rings):
        row: dict[str, Any] = {"seqlen": seqlen, "gpus": count, **sizes, "dtype": options.dtype}
        ring = rings[count][1]
        row |= {"layout": options.layout, "transport": "none" if ring is None else ring.transport_kind}
        if count in failed:
            rows.append(row | {"failed": failed[count]})
            continue
        rows.append(row | samples[count].figures(problem.forward_flops, count))
    return rows


def with_efficiency(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with strong and weak scaling, if one GPU was measured at the length of the comparison."""
    alone = {row["seqlen"]: row for row in rows if row["gpus"] == 1 and "failed" not in row}

    def rate(row: dict[str, Any], part: str) -> float:
        return row["seqlen"] ** 2 / row["gpus"] / row[f"{part}_ms"]

    found = []
    for row in rows:
        added: dict[str, float] = {}
        for part in PARTS if "failed" not in row else ():
            for name, seqlen in (("strong", row["seqlen"]), ("weak", row["seqlen"] / row["gpus"])):
                if seqlen in alone:
                    added[f"{part}_{name}"] = round(rate(row, part) / rate(alone[seqlen], part), 4)
        found.append(row | added)
    return found


def _print(rows: Sequence[dict[str, Any]], device: str) -> None:
    first = rows[0]
    columns: list[Column] = [("seqlen", "seqlen", "d"), ("GPUs", "gpus", "d")]
    for part, title in (("forward", "forward"), ("forward_backward", "both passes")):
        columns += [
            (f"{title}\nms", f"{part}_ms", ".2f"),
            (f"{title}\nTFLOP/s\na GPU", f"{part}_tflops_per_gpu", ".0f"),
            (f"{title}\nstrong\nscaling", f"{part}_strong", ".1%"),
            (f"{title}\nweak\nscaling", f"{part}_weak", ".1%"),
        ]
    columns.append(("GiB", "gib", ".2f"))
    print_table(
        f"Scaling, causal, {first['layout']}: {heads(first)}, {first['dtype']}, {device}",
        columns,
        rows,
        "{seqlen} tokens on {gpus}",
    )
