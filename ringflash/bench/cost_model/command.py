"""`ringflash bench model`: predicted times of rings, compared with measurements, and the fastest split.

    ringflash bench model --world-sizes 4 --seqlens 65536 131072 --measured ring.json --json model.json

Nothing is run. docs/performance/cost-model.md has the formulas, and says which figures are measured, fitted or assumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ringflash.bench.attention.traffic import Shape
from ringflash.bench.common import record
from ringflash.bench.common.report import Column, Row, print_table
from ringflash.bench.cost_model.model import FAR, NEAR, Link, Machine, Prediction, Split, predict
from ringflash.commands.options import DTYPES, add_shared, check_at_least, check_heads, check_positive, parser_of
from ringflash.errors import ArgumentError

LAYOUTS = ("zigzag", "striped", "contiguous")  # candidates, the even ones first
MEASURED = ("nheads", "nheads_kv", "headdim", "dtype", "forward_ms")  # further keys of a measured row
FLOPS = 2 * 3.5  # of both passes, for each seqlen^2 headdim and query head; causal counts as half
FAMILIES = {"ring": "ring", "heads": "heads x ring", "rings": "ring of rings"}


def main(argv: Sequence[str]) -> int:
    """Prints the tables, and writes JSON if asked. Returns 0."""
    options = _parser().parse_args(argv)
    _check(options)
    rings = [] if options.measured is None else _read(options.measured)
    rows = [_row(seqlen, world, options) for world in options.world_sizes for seqlen in options.seqlens]
    _print_predictions(rows, options)
    measured = [_measured(row, options) for row in rings]
    if measured:
        _print_beside(measured, options)
    choices = [_choose(seqlen, world, options) for world in options.world_sizes for seqlen in options.choose_at]
    if choices:
        _print_choices(choices)
    if options.json is not None:
        more = {"machine": asdict(_machine(options, "symmetric")), "measured": measured, "choices": choices}
        more["machine"]["near"] = {name: asdict(_near(options, name)) for name in NEAR}
        command = record.command("ringflash bench model", argv)
        record.write(options.json, command, "none: predictions", rows, **more)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench model", "Predicts causal ring attention from figures of the machine; runs nothing.")
    default = " (default: %(default)s)"
    add = parser.add_argument
    add_shared(parser, "json", seqlens=[2**n for n in range(13, 21)], world_sizes=[4, 8, 64, 1024])
    add_shared(parser, batch=1, nheads=32, nheads_kv=8, headdim=128, dtype="bfloat16")
    add_shared(parser, layout="zigzag", transport="auto", head_split=1, choices={"transport": ("auto", *NEAR)})
    add("--choose-at", type=int, nargs="*", default=[2**17, 2**20, 2**23], help="tokens of the last table" + default)
    add("--inner-ring", type=int, help="GPUs of an inner ring, in the first table (default: one ring)")
    machine = Machine()
    add("--tflops-forward", type=float, default=machine.tflops_forward, help="the kernel's rate, forward" + default)
    add("--tflops-backward", type=float, default=machine.tflops_backward, help="and backward" + default)
    add("--bandwidth-gb-s", type=float, help="within a host, a GPU and direction (default: that of the transport)")
    add("--latency-us", type=float, help="of a message within a host (default: that of the transport)")
    add("--taken", type=float, help="share of a message's time that kernels lose (default: that of the transport)")
    add("--network-gb-s", type=float, default=FAR.gb_s, help="between hosts, a GPU and direction" + default)
    add("--network-latency-us", type=float, default=FAR.latency_us, help="of a message between hosts" + default)
    add("--launch-us", type=float, default=machine.launch_us, help="of a hop on the GPU" + default)
    add("--issue-us", type=float, default=machine.issue_us, help="of a hop in Python; 0: CUDA graphs" + default)
    add("--gpus-a-host", type=int, default=machine.gpus_a_host, help="GPUs of a host" + default)
    add("--measured", type=Path, metavar="RING.json", help="of `bench ring`: its figures beside the predictions")
    return parser


def _check(options: argparse.Namespace) -> None:
    shape = ["seqlens", "world_sizes", "choose_at", "batch", "nheads", "nheads_kv", "headdim"]
    check_at_least(options, [*shape, "head_split", "gpus_a_host"])
    check_positive(options, ["tflops_forward", "tflops_backward", "bandwidth_gb_s", "network_gb_s"])
    check_at_least(options, ["latency_us", "taken", "network_latency_us", "launch_us", "issue_us"], 0)
    check_heads(options)


def _near(options: argparse.Namespace, transport: str) -> Link:
    given = {"gb_s": options.bandwidth_gb_s, "latency_us": options.latency_us, "taken": options.taken}
    return replace(NEAR[transport], **{name: value for name, value in given.items() if value is not None})


def _machine(options: argparse.Namespace, transport: str) -> Machine:
    return Machine(
        tflops_forward=options.tflops_forward,
        tflops_backward=options.tflops_backward,
        launch_us=options.launch_us,
        issue_us=options.issue_us,
        near=_near(options, transport),
        far=replace(FAR, gb_s=options.network_gb_s, latency_us=options.network_latency_us),
        gpus_a_host=options.gpus_a_host,
    )


def _transports(split: Split, options: argparse.Namespace) -> list[str]:
    """Returns the transports that can join the ring. GPUs of two hosts cannot access each other's memory."""
    one_ring_in_a_host = split.inner is None and not split.crosses(options.gpus_a_host)
    return ["symmetric", "nccl"] if one_ring_in_a_host else ["nccl"]


def _shape(seqlen: int, options: argparse.Namespace) -> Shape:
    heads = options.nheads, options.nheads_kv, options.headdim
    return Shape(options.batch, seqlen, *heads, causal=True, itemsize=DTYPES[options.dtype].itemsize)


def _row(seqlen: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the predicted row of the split, layout and transport in the options."""
    split = Split(world_size, options.head_split, options.inner_ring)
    split.check(_shape(seqlen, options))
    possible = _transports(split, options)
    transport = possible[0] if options.transport == "auto" else options.transport
    if transport not in possible:
        row = {"seqlen": seqlen, "world_size": world_size, "layout": options.layout, "transport": transport}
        return row | {"split": str(split), "failed": "symmetric is for one ring in a host"}
    prediction = predict(_shape(seqlen, options), split, options.layout, _machine(options, transport))
    return _figures(seqlen, split, options.layout, transport, prediction, options)


def _figures(
    seqlen: int, split: Split, layout: str, transport: str, prediction: Prediction, options: argparse.Namespace
) -> dict[str, Any]:
    flops = FLOPS * options.batch * seqlen**2 * options.nheads * options.headdim
    row: dict[str, Any] = {"seqlen": seqlen, "world_size": split.world_size, "layout": layout, "transport": transport}
    row |= {"split": str(split), "heads": split.heads, "inner_ring": split.inner}
    row["forward_ms"] = round(prediction.forward.total * 1e3, 3)
    row["forward_backward_ms"] = round(prediction.seconds * 1e3, 3)
    row["tflops_per_gpu"] = round(flops / prediction.seconds / split.world_size / 1e12, 1)
    row["efficiency"] = round(prediction.efficiency, 4)
    for name, of in (("forward", prediction.forward), ("backward", prediction.backward)):
        for what in ("compute", "message", "exposed"):
            row[f"{name}_{what}_us"] = round(getattr(of, what) * 1e6, 1)
    row["exchange_ms"] = round((prediction.forward.exchange + prediction.backward.exchange) * 1e3, 3)
    return row


def _choose(seqlen: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of the fastest choice, with the time of the fastest choice of each family."""
    best: dict[str, dict[str, Any]] = {}
    for split in _splits(world_size, options):
        if seqlen < world_size:
            break
        family = "heads" if split.heads > 1 else "rings" if split.inner else "ring"
        for layout in LAYOUTS:
            for transport in _transports(split, options):
                prediction = predict(_shape(seqlen, options), split, layout, _machine(options, transport))
                row = _figures(seqlen, split, layout, transport, prediction, options)
                if family not in best or row["forward_backward_ms"] < best[family]["forward_backward_ms"]:
                    best[family] = row
    if not best:
        return {"seqlen": seqlen, "world_size": world_size, "failed": "fewer tokens than GPUs"}
    families = {f"{family}_ms": row["forward_backward_ms"] for family, row in best.items()}
    return min(best.values(), key=lambda row: row["forward_backward_ms"]) | families


def _splits(world_size: int, options: argparse.Namespace) -> Iterator[Split]:
    """Yields rings, heads x rings, and rings of rings that fill hosts."""
    for heads in range(1, min(world_size, options.nheads) + 1):
        if world_size % heads or options.nheads % heads:
            continue
        yield Split(world_size, heads)
        inner = options.gpus_a_host // heads  # ranks of a host in one ring
        fills_hosts = options.gpus_a_host % heads == 0 and world_size % options.gpus_a_host == 0
        if inner > 1 and fills_hosts and world_size > options.gpus_a_host:
            yield Split(world_size, heads, inner)


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns our causal rings from the JSON of a ring benchmark, with all keys that a prediction needs.

    Graphs are left out. A ring with grouped hops is replaced by its variant "ring", if that was measured.

    Raises:
        ArgumentError: the file is missing or has another content, or a row lacks a key.
    """
    try:
        given = json.loads(path.read_text())
        named = {(row["seqlen"], row["name"]): row for row in given["rows"]}
        plain = [row for row in named.values() if row["name"].startswith("ringflash ") and "," not in row["name"]]
        rings = [named.get((row["seqlen"], f"{row['name']}, ring")) if _is_grouped(row) else row for row in plain]
        rows = [{**of, **row} for of, row in zip(plain, rings, strict=True) if row and "forward_backward_ms" in row]
        ranks = given["device"].partition(" x ")[0]
        filled = [
            row
            | {"world_size": int(row.get("world_size") or ranks), "transport": row.get("transport", "nccl")}
            | {"layout": row.get("layout") or row["name"].split()[1]}
            for row in rows
            if row.get("mask", "causal") == "causal"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_rings(f"{path}: {type(error).__name__}") from error
    for row in filled:
        if lacking := [name for name in MEASURED if name not in row]:
            raise _not_rings(f"{path}: {row['name']!r} of {row['seqlen']} tokens without {', '.join(lacking)}")
        if row["dtype"] not in DTYPES or row["layout"] not in (*LAYOUTS, "balanced"):
            raise _not_rings(f"{path}: {row['name']!r} of layout {row['layout']!r} and dtype {row['dtype']!r}")
    return filled


def _not_rings(got: str) -> ArgumentError:
    remedy = "Pass what `ringflash bench ring --json` wrote."
    return ArgumentError("--measured", expected="JSON of the ring benchmark", got=got, remedy=remedy)


def _measured(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the measured and the predicted times of a ring."""
    transport = row["transport"]
    heads = {name: row[name] for name in ("nheads", "nheads_kv", "headdim")}
    shape = Shape(1, row["seqlen"], **heads, causal=True, itemsize=DTYPES[row["dtype"]].itemsize)
    machine = _machine(options, transport if transport in NEAR else "nccl")
    prediction = predict(shape, Split(row["world_size"]), row["layout"], machine)
    figures = {name: row[name] for name in ("seqlen", "world_size", "layout", "transport")}
    for part, predicted in (("forward", prediction.forward.total), ("forward_backward", prediction.seconds)):
        figures[f"{part}_ms"] = row[f"{part}_ms"]
        figures[f"{part}_predicted_ms"] = round(predicted * 1e3, 3)
    return figures


def _is_grouped(row: dict[str, Any]) -> bool:
    return row.get("schedule") == "grouped"


PLACE: list[Column] = [("GPUs", "world_size", "d"), ("tokens", "seqlen", "d")]  # of a table's rows
RATES: list[Column] = [
    ("forward +\nbackward ms", "forward_backward_ms", ",.2f"),
    ("TFLOP/s\na GPU", "tflops_per_gpu", ".0f"),
    ("of one\nkernel", "efficiency", ".1%"),
]
WHERE = "{world_size} GPUs, {seqlen} tokens"


def _print_predictions(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    heads = f"{options.nheads}:{options.nheads_kv} heads of {options.headdim}, {options.dtype}, batch {options.batch}"
    columns: list[Column] = [*PLACE, ("transport", "transport", ""), ("split", "split", "")]
    columns += [("forward\nms", "forward_ms", ",.2f"), *RATES]
    for what in ("compute", "message", "exposed"):
        columns.append((f"{what}\nus a hop", lambda row, what=what: _both(row, what), ">"))
    print_table(f"Predicted, {options.layout}, causal: {heads}", columns, rows, WHERE)


def _both(row: Row, what: str) -> str:
    return f"{row[f'forward_{what}_us']:,.0f} / {row[f'backward_{what}_us']:,.0f}"


def _print_beside(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    columns: list[Column] = [*PLACE, ("layout", "layout", ""), ("transport", "transport", "")]
    for part, title in (("forward", "forward"), ("forward_backward", "forward + backward")):
        columns += [
            (f"{title}\nms", f"{part}_ms", ",.2f"),
            (f"{title}\npredicted", f"{part}_predicted_ms", ",.2f"),
            (f"{title}\noff by", lambda row, part=part: row[f"{part}_predicted_ms"] / row[f"{part}_ms"] - 1, "+.1%"),
        ]
    print_table(f"Measured, {options.measured.name}", columns, rows)


def _print_choices(rows: Sequence[dict[str, Any]]) -> None:
    columns: list[Column] = [*PLACE, *((name, name, "") for name in ("layout", "transport", "split")), *RATES]
    columns += [(f"best {title}\nms", f"{family}_ms", ",.2f") for family, title in FAMILIES.items()]
    print_table("The fastest predicted", columns, rows, WHERE)
