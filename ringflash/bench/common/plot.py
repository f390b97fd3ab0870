"""Picture of the kernel benchmark: TFLOP/s over seqlen, with a column per headdim and a row per pass and mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringflash.commands.picture import picture

PANELS = (("forward", True), ("backward", True), ("forward", False), ("backward", False))


def draw(path: Path, rows: Sequence[Mapping[str, Any]], device: str) -> None:
    """Draws `rows` of the benchmark to `path`, without failed contenders and without passes that were not timed."""
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
                ax.set_title(f"{part}, {'causal' if causal else 'full'}, headdim {headdim}", fontsize=10)
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
                ax.set_ylim(bottom=0)
                ax.grid(alpha=0.3)
                if column == 0:
                    ax.set_ylabel("TFLOP/s")
        first = rows[0]
        title = f"Attention on one {device}: {first['nheads']}:{first['nheads_kv']} heads, {first['dtype']}"
        figure.suptitle(f"{title}; causal counted as half, backward as 2.5 forwards", fontsize=11)
        ordered = [name for name in (*names, "large matmul, same run") if name in handles]
        figure.legend([handles[name] for name in ordered], ordered, loc="outside lower center", ncols=4, fontsize=9)


def _mode(name: str) -> str:
    """Returns the name without the name of the kernels, so that the same mode has the same colour."""
    return name.partition(", ")[0]


def length_axis(ax: Any, lengths: Sequence[int], label: str) -> None:
    """Gives `ax` an axis of numbers of tokens, with a tick at each of `lengths`."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [short(length) for length in lengths], fontsize=8)
    ax.set_xlabel(label)


def short(seqlen: int) -> str:
    """Returns a label of `seqlen`, in units of 1024 tokens if it is a multiple of them."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)
