"""Picture of the training benchmark: tokens/s a GPU over contexts, with a panel per shape and a curve per contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringflash.bench.common.plot import length_axis
from ringflash.commands.picture import picture


def draw(path: Path, rows: Sequence[Mapping[str, Any]], device: str) -> None:
    """Draws `rows` of the benchmark to `path`, without failed rows. Points are labelled with their MFU."""
    shapes, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("shape", "name"))
    with picture(path, (1.0 + 5.0 * len(shapes), 4.2)) as figure:
        for ax, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
            for name in names:
                shown = [r for r in rows if r["shape"] == shape and r["name"] == name and "failed" not in r]
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
            ax.set_title(f"{shape} shape", fontsize=10)
            length_axis(ax, contexts, "tokens of context, over all GPUs")
            ax.set_ylabel("tokens/s a GPU")
            ax.margins(0.1, 0.15)  # leaves room for the labels
            ax.set_ylim(bottom=0)
            ax.grid(alpha=0.3)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(fontsize=8)
        figure.suptitle(f"Training, {rows[0]['dtype']}, on {device}; labelled with MFU", fontsize=11)
