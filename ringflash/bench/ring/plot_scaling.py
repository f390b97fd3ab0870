"""Picture of the scaling benchmark: rates over lengths, and strong and weak scaling over GPUs, with a row per pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringflash.bench.common.plot import length_axis, short
from ringflash.bench.common.ranks import PARTS
from ringflash.commands.picture import picture

Rows = Sequence[Mapping[str, Any]]


def draw(path: Path, rows: Rows, device: str) -> None:
    """Draws `rows` of the benchmark to `path`, without failed rows."""
    shown = [row for row in rows if "failed" not in row]
    counts, lengths = (sorted({row[key] for row in shown}) for key in ("gpus", "seqlen"))
    with picture(path, (14, 7)) as figure:
        axes = figure.subplots(len(PARTS), 3, squeeze=False)
        for line, part in enumerate(PARTS):
            name = part.replace("_", " + ")
            rates, strong, weak = axes[line]
            rates.set_title(f"{name}: TFLOP/s a GPU", fontsize=10)
            for count in counts:
                points = [(row["seqlen"], row[f"{part}_tflops_per_gpu"]) for row in shown if row["gpus"] == count]
                rates.plot(*zip(*sorted(points), strict=True), "o-", ms=3.5, label=f"{count} GPU{'s' * (count > 1)}")
            length_axis(rates, lengths, "tokens in all")
            _curves(strong, shown, f"{part}_strong", lambda row: row["seqlen"])
            strong.set_title(f"{name}: strong scaling, by tokens in all", fontsize=10)
            _curves(weak, shown, f"{part}_weak", lambda row: row["seqlen"] // row["gpus"])
            weak.set_title(f"{name}: weak scaling, by tokens a GPU", fontsize=10)
            for ax in (rates, strong, weak):
                ax.set_ylim(bottom=0)
                ax.grid(alpha=0.3)
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


def _curves(ax: Any, rows: Rows, key: str, length: Any) -> None:
    """Draws a curve for every length that was measured on several numbers of GPUs."""
    for tokens in sorted({length(row) for row in rows}):
        points = sorted((row["gpus"], row[key]) for row in rows if length(row) == tokens and key in row)
        if len(points) > 1:
            ax.plot(*zip(*points, strict=True), "o-", ms=3.5, label=short(tokens))
