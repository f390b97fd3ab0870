"""Pictures of the README and of docs/performance, drawn from the records in docs/benchmarks.

python -m ringflash.bench.common.pictures docs/benchmarks docs/images
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringflash.bench.attention.traffic import Shape
from ringflash.bench.common.plot import dress, length_axis, short
from ringflash.bench.cost_model.model import Machine, Split, predict
from ringflash.commands.picture import picture

Row = dict[str, Any]
Curve = list[tuple[int, float]]

GIB = "GiB a GPU"  # unit of a logarithmic axis
# The first record with a length wins.
RINGS = ("ring-4gpu-8k", "ring-4gpu-short", "ring-4gpu-ulysses", "ring-4gpu-long", "ring-4gpu-1m")
TRAINING = ("training-4gpu-8b-8k", "training-4gpu-8b-64k", "training-4gpu-8b-128k", "training-4gpu-8b-256k")
OURS, GRAPHS, PEER, TORCH = (
    "ringflash",
    "ringflash, CUDA graphs",
    "ring-flash-attn on FlashAttention-4",
    "torch context_parallel",
)
NAMES = {"ringflash zigzag": OURS, "ringflash zigzag, graphs": GRAPHS, "ring-flash-attn zigzag, FA4": PEER}
COLOURS = {OURS: "C0", GRAPHS: "C9", PEER: "C1", TORCH: "C2", "FlashAttention-4": "C1", "FlexAttention": "C4"}


class Records:
    """The rows of the records in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, *names: str) -> list[Row]:
        """Returns the rows of these records that have measured something, one record after the other."""
        return [row for name in names for row in json.loads((self.folder / f"{name}.json").read_text())["rows"]]

    def ring(self, key: str, best: Callable[..., float], names: Sequence[str] = RINGS) -> dict[str, Curve]:
        """Returns the values of `key` over the length of the sequence, one curve a contender.

        Args:
            key: the field of a row.
            best: chooses among the backends and rotations of torch's context_parallel: max or min.
            names: the records.
        """
        found: dict[str, dict[int, list[float]]] = {}
        drawn = set[int]()  # lengths of earlier records
        for record in names:
            rows = [row for row in self.rows(record) if row["seqlen"] not in drawn]
            drawn |= {row["seqlen"] for row in rows}
            for row in rows:
                name = TORCH if row["name"].startswith("torch") else NAMES.get(row["name"])
                if name is not None:
                    found.setdefault(name, {}).setdefault(row["seqlen"], []).append(row[key])
        return {name: sorted((n, best(values)) for n, values in curve.items()) for name, curve in found.items()}


def _curves(ax: Any, curves: dict[str, Curve], title: str, unit: str) -> None:
    for name, points in curves.items():
        width, order = (2.2, 3) if name.startswith("ringflash") else (1.4, 2)
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, "o-", ms=3.5, lw=width, zorder=order, color=COLOURS[name], label=name)
    lengths = sorted({length for points in curves.values() for length, _ in points})
    length_axis(ax, lengths, "tokens over all GPUs")
    dress(ax, title, unit, from_zero=unit != GIB)


def _bars(ax: Any, labels: Sequence[str], groups: dict[str, list[float]], title: str, unit: str) -> None:
    width = 0.8 / len(groups)
    for i, (name, values) in enumerate(groups.items()):
        places = [x + (i - (len(groups) - 1) / 2) * width for x in range(len(labels))]
        ax.bar(places, values, width, label=name, color=COLOURS[name])
    ax.set_xticks(range(len(labels)), labels, fontsize=8)
    dress(ax, title, unit, grid="y")


def _memory(ax: Any, records: Records, title: str) -> None:
    curves = records.ring("gib", min, RINGS[2:])  # the first records leave out the memory of CUDA graphs
    curves.pop(GRAPHS)
    _curves(ax, curves, title, GIB)
    ax.set_yscale("log", base=2)
    ticks = [0.25, 1, 4, 16]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def overview(axes: Sequence[Any], records: Records) -> None:
    """Draws the three claims of the README: the rate of rings, their memory, and the rate of training."""
    rates = records.ring("forward_backward_tflops_per_gpu", max)
    _curves(axes[0], rates, "Attention, forward and backward: rate", "TFLOP/s a GPU")
    _memory(axes[1], records, "Attention, forward and backward: memory")
    rows = records.rows(*TRAINING)
    groups = {name: [r["tokens_per_second_per_gpu"] for r in rows if r["name"] == name] for name in (OURS, TORCH)}
    contexts = [short(row["context"]) for row in rows if row["name"] == OURS]
    _bars(axes[2], contexts, groups, "Training steps of Llama's 8B shape", "tokens/s a GPU")
    axes[2].set_xlabel("tokens of context over all GPUs")


def ring(axes: Sequence[Any], records: Records) -> None:
    """Draws the rates of a ring on four GPUs: forward, and both passes."""
    for ax, part in zip(axes, ("forward", "forward_backward"), strict=True):
        curves = records.ring(f"{part}_tflops_per_gpu", max)
        _curves(ax, curves, part.replace("_", " and "), "TFLOP/s a GPU")


def memory(axes: Sequence[Any], records: Records) -> None:
    """Draws what both passes of a ring on four GPUs allocate."""
    _memory(axes[0], records, "forward and backward")


def masks(axes: Sequence[Any], records: Records) -> None:
    """Draws the milliseconds of both passes under masks, at headdim 128."""
    rows = [
        row for row in records.rows("masks") if row["headdim"] == 128 and row["name"] not in ("causal", "batch of 16")
    ]
    names = list(dict.fromkeys(row["name"] for row in rows))
    for ax, part in zip(axes, ("forward", "backward_fast"), strict=True):
        of = {(row["name"], row["by"]): row.get(f"{part}_ms", math.nan) for row in rows}
        groups = {by: [of[name, by] for name in names] for by in (OURS, "FlashAttention-4", "FlexAttention")}
        labels = [name.replace(" of ", "\nof ", 1) for name in names]
        _bars(ax, labels, groups, part.partition("_")[0], "milliseconds")


def decode(axes: Sequence[Any], records: Records) -> None:
    """Draws the time of one decoding step in a CUDA graph."""
    rows = records.rows("decode")
    bars = axes[0].barh([row["name"] for row in rows], [row["graph_us"] for row in rows])
    axes[0].bar_label(bars, [f"{row['gb_s']:.0f} GB/s" for row in rows], padding=3, fontsize=8)
    axes[0].invert_yaxis()
    axes[0].margins(x=0.2)
    axes[0].set_xlabel("microseconds in a CUDA graph")
    axes[0].grid(alpha=0.3, axis="x")


def cost_model(axes: Sequence[Any], records: Records) -> None:
    """Draws the predicted rates of rings, with one kernel's rates at 131072 tokens, and the measured rates."""
    machine = Machine(tflops_forward=639.0, tflops_backward=592.0, issue_us=500.0)
    graphs = Machine(tflops_forward=639.0, tflops_backward=592.0, issue_us=0.0)
    lengths = [2**n for n in range(13, 21)]
    for name, options, style in (("predicted", machine, "-"), ("predicted, CUDA graphs", graphs, "--")):
        rates = []
        for length in lengths:
            shape = Shape(1, length, 32, 8, 128, causal=True)
            seconds = predict(shape, Split(4), "zigzag", options).seconds
            rates.append(7 * length**2 * 32 * 128 / 4 / seconds / 1e12)
        axes[0].plot(lengths, rates, style, color="gray", label=name)
    for name, variant, colour in (("measured", ", ring", "C0"), ("measured, captured", ", graph", "C9")):
        found = {row["seqlen"]: row for row in records.rows(*RINGS[1:]) if row["name"] == f"ringflash zigzag{variant}"}
        if variant == ", ring":
            found |= {row["seqlen"]: row for row in records.rows(*RINGS[2:]) if row["name"] == "ringflash zigzag"}
        values = [row["forward_backward_tflops_per_gpu"] for row in found.values()]
        axes[0].plot(list(found), values, "o", color=colour, label=name)
    length_axis(axes[0], lengths, "tokens over all GPUs")
    dress(axes[0], unit="TFLOP/s a GPU")


def float8(axes: Sequence[Any], records: Records) -> None:
    """Draws the losses of the first steps with linear layers in each dtype."""
    for row in records.rows("training-curves-fp8"):
        label = "bfloat16" if row["run"] == "compute" else row["run"]
        axes[0].plot(range(len(row["loss"])), row["loss"], label=label, linewidth=1)
    axes[0].set_xlabel("step")
    dress(axes[0], unit="loss", from_zero=False)


def traffic(axes: Sequence[Any], records: Records) -> None:
    """Draws counted and measured bytes of a forward and of the default backward."""
    labels = ["compulsory", "measured", "tiled", "standard"]
    for row, width in zip(records.rows("traffic"), (-0.4, 0.4), strict=True):
        for ax, part in zip(axes, ("forward", "backward"), strict=True):
            key = "forward" if part == "forward" else "backward fast"
            sizes = [row["compulsory"][part], row["measured"][key], row["tiled"][key], row["standard"][part]]
            label = "causal" if row["causal"] else "full"
            ax.bar(range(4), [size / 2**20 for size in sizes], width, align="edge", label=label)
            ax.set_xticks(range(4), labels, fontsize=8)
            ax.set_yscale("log", base=2)
            dress(ax, part, "MiB", from_zero=False, grid="y")


# Of each picture: the function, the number of panels, the title, and whether one legend serves all panels.
PICTURES: dict[str, tuple[Callable[[Sequence[Any], Records], None], int, str, bool]] = {
    "overview": (overview, 3, "Four H200, causal, bfloat16", True),
    "ring": (ring, 2, "Ring attention on four H200, causal, 32:8 heads, headdim 128, bfloat16", True),
    "memory": (memory, 1, "Ring attention on four H200, 32:8 heads, headdim 128", True),
    "masks": (masks, 2, "One H200, 32768 tokens, 16 heads, headdim 128, bfloat16", True),
    "cost-model": (cost_model, 1, "Forward and backward on four H200, 32:8 heads of 128", True),
    "traffic": (traffic, 2, "HBM traffic of 2 sequences of 8192 tokens, 16 heads of 128, on one H200", True),
    "float8": (float8, 1, "A model of 136M parameters, 16384 tokens, one H200", True),
    "decode": (decode, 1, "One token for 8 sequences of 131072 on one H200", False),
}


def draw(name: str, records: Path, to: Path) -> Path:
    """Draws the picture `name` from the records in a folder, and returns the path of the file in `to`."""
    function, panels, title, has_legend = PICTURES[name]
    path = to / f"{name}.png"
    with picture(path, (2.2 + 3.8 * panels, 3.8)) as figure:
        axes = figure.subplots(1, panels, squeeze=False)[0]
        function(axes, Records(records))
        figure.suptitle(title, fontsize=11)
        if has_legend:
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * panels), fontsize=9)
    return path


def main() -> None:
    """Draws every picture."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("records", type=Path, help="docs/benchmarks")
    parser.add_argument("to", type=Path, help="the folder of the pictures")
    args = parser.parse_args()
    for name in PICTURES:
        print(draw(name, args.records / "h200", args.to))


if __name__ == "__main__":
    main()
