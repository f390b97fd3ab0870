"""Pictures of the figures of the benchmarks of kernels, scaling and training, and their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringflash.bench.common.ranks import PARTS
from ringflash.commands.picture import picture

Rows = Sequence[Mapping[str, Any]]

PANELS = (("forward", True), ("backward", True), ("forward", False), ("backward", False))


def draw_kernels(path: Path, rows: Rows, device: str) -> None:
    """Draws TFLOP/s over seqlen to `path`, with a column for each headdim and a row for each pass and mask.

    Failed contenders and passes that were not timed are left out.
    """
    headdims = sorted({row["headdim"] for row in rows})
    panels = [panel for panel in PANELS if any(row["causal"] == panel[1] for row in rows)]
    names = list(dict.fromkeys(row["name"] for row in rows))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(map(_mode, names)))}
    with picture(path, (1.5 + 4.2 * len(headdims), 1.0 + 2.7 * len(panels))) as figure:
        axes = figure.subplots(len(panels), len(headdims), sharex=True, sharey="row", squeeze=False)
        handles: dict[str, Any] = {}
        for line, (part, causal) in enumerate(panels):
            for column, headdim in enumerate(headdims):
                ax = axes[line][column]
                cell = [row for row in rows if row["headdim"] == headdim and row["causal"] == causal]
                key = f"{part}_tflops"
                for name in names:
                    points = sorted((row["seqlen"], row[key]) for row in cell if row["name"] == name and key in row)
                    twin = name.replace("deterministic", "fast")
                    if not points or (part == "forward" and name != twin and twin in names):
                        continue  # both modes have the same forward
                    width, order = (2.2, 3) if name.startswith("ringflash") else (1.2, 2)
                    style, colour = "o-" if name == _mode(name) else "o--", colours[_mode(name)]
                    xs, ys = zip(*points, strict=True)
                    handles[name] = ax.plot(xs, ys, style, color=colour, lw=width, zorder=order, ms=3.5)[0]
                rates = sorted({(row["seqlen"], row["matmul_tflops"]) for row in cell if row.get("matmul_tflops")})
                if rates:
                    xs, ys = zip(*rates, strict=True)
                    handles["large matmul, same run"] = ax.plot(xs, ys, ":", color="gray", lw=1)[0]
                length_axis(ax, sorted({row["seqlen"] for row in rows}), "seqlen" if line == len(panels) - 1 else "")
                mask = "causal" if causal else "full"
                dress(ax, f"{part}, {mask}, headdim {headdim}", "TFLOP/s" if column == 0 else "")
        first = rows[0]
        title = f"Attention on one {device}: {first['nheads']}:{first['nheads_kv']} heads, {first['dtype']}"
        figure.suptitle(f"{title}; causal counted as half, backward as 2.5 forwards", fontsize=11)
        ordered = [name for name in (*names, "large matmul, same run") if name in handles]
        figure.legend([handles[name] for name in ordered], ordered, loc="outside lower center", ncols=4, fontsize=9)


def _mode(name: str) -> str:
    """Returns the name without the name of the kernels, so that the same mode has the same colour."""
    return name.partition(", ")[0]


def draw_scaling(path: Path, rows: Rows, device: str) -> None:
    """Draws rates over lengths, and strong and weak scaling over GPUs, to `path`, with a row for each pass.

    Failed rows are left out.
    """
    shown = [row for row in rows if "failed" not in row]
    counts, lengths = (sorted({row[key] for row in shown}) for key in ("gpus", "seqlen"))
    with picture(path, (14, 7)) as figure:
        axes = figure.subplots(len(PARTS), 3, squeeze=False)
        for line, part in enumerate(PARTS):
            name = part.replace("_", " + ")
            rates, strong, weak = axes[line]
            for count in counts:
                points = [(row["seqlen"], row[f"{part}_tflops_per_gpu"]) for row in shown if row["gpus"] == count]
                rates.plot(*zip(*sorted(points), strict=True), "o-", ms=3.5, label=f"{count} GPU{'s' * (count > 1)}")
            length_axis(rates, lengths, "tokens in all")
            _scaling_curves(strong, shown, f"{part}_strong", lambda row: row["seqlen"])
            _scaling_curves(weak, shown, f"{part}_weak", lambda row: row["seqlen"] // row["gpus"])
            titles = "TFLOP/s a GPU", "strong scaling, by tokens in all", "weak scaling, by tokens a GPU"
            for ax, title in zip(axes[line], titles, strict=True):
                dress(ax, f"{name}: {title}")
                if ax.get_legend_handles_labels()[0]:
                    ax.legend(fontsize=7, ncols=2)
            for ax in (strong, weak):
                ax.axhline(1, color="gray", ls=":", lw=1)
                ax.set_xscale("log", base=2)
                ax.set_xticks(counts, [str(count) for count in counts])
                ax.set_xlabel("GPUs")
        first = rows[0]
        heads = f"{first['nheads']}:{first['nheads_kv']} heads of {first['headdim']}, {first['dtype']}"
        figure.suptitle(f"Ring attention on {device}, causal, {first['layout']}: {heads}; against one GPU", fontsize=11)


def _scaling_curves(ax: Any, rows: Rows, key: str, length: Any) -> None:
    """Draws a curve for every length that was measured on several numbers of GPUs."""
    for tokens in sorted({length(row) for row in rows}):
        points = sorted((row["gpus"], row[key]) for row in rows if length(row) == tokens and key in row)
        if len(points) > 1:
            ax.plot(*zip(*points, strict=True), "o-", ms=3.5, label=short(tokens))


def _contender(row: Mapping[str, Any]) -> str:
    linears = row.get("linears", "compute")
    return row["name"] if linears == "compute" else f"{row['name']}, {linears}"


def draw_training(path: Path, rows: Rows, device: str) -> None:
    """Draws tokens/s a GPU over contexts to `path`, with a panel for each shape and a curve for each contender.

    A contender with float8 linear layers has a curve of its own.

    Failed rows are left out. Points are labelled with their MFU.
    """
    shapes, names = list(dict.fromkeys(row["shape"] for row in rows)), list(dict.fromkeys(map(_contender, rows)))
    with picture(path, (1.0 + 5.0 * len(shapes), 4.2)) as figure:
        for ax, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
            for name in names:
                shown = [r for r in rows if r["shape"] == shape and _contender(r) == name and "failed" not in r]
                points = sorted((row["context"], row["tokens_per_second_per_gpu"]) for row in shown)
                if points:
                    ax.plot(*zip(*points, strict=True), "o-", ms=4, color=f"C{names.index(name)}", label=name)
                for row in shown:
                    if "mfu" in row:
                        at = row["context"], row["tokens_per_second_per_gpu"]
                        ax.annotate(
                            f"{row['mfu']:.0%}", at, (0, 5), textcoords="offset points", fontsize=7, ha="center"
                        )
            contexts = sorted({row["context"] for row in rows if row["shape"] == shape})
            length_axis(ax, contexts, "tokens of context, over all GPUs")
            ax.margins(0.1, 0.15)  # leaves room for the labels
            dress(ax, f"{shape} shape", "tokens/s a GPU")
            if ax.get_legend_handles_labels()[0]:
                ax.legend(fontsize=8)
        figure.suptitle(f"Training, {rows[0]['dtype']}, on {device}; labelled with MFU", fontsize=11)


def dress(ax: Any, title: str = "", unit: str = "", *, from_zero: bool = True, grid: str = "both") -> None:
    """Gives `ax` a title, the unit of its figures, and a grid; `from_zero` begins the axis of the figures at 0."""
    ax.set_title(title, fontsize=10)
    ax.set_ylabel(unit)
    ax.grid(alpha=0.3, axis=grid)
    if from_zero:
        ax.set_ylim(bottom=0)


def length_axis(ax: Any, lengths: Sequence[int], label: str) -> None:
    """Gives `ax` an axis of numbers of tokens, with a tick at each of `lengths`."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [short(length) for length in lengths], fontsize=8)
    ax.set_xlabel(label)


def short(seqlen: int) -> str:
    """Returns a label of `seqlen`, in units of 1024 tokens if it is a multiple of them."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)
