"""Picture of a run: its losses, speed, memory, gradients and loss by position over optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ringflash.commands.picture import picture
from ringflash.train.callbacks.loss_by_position import PREFIX
from ringflash.train.callbacks.run_log import Points, RunLog

COLUMNS = 3
TRAIN, HELD_OUT, OTHER = "#4c78a8", "#e45756", "#54a24b"


def draw(run: RunLog, path: Path) -> None:
    """Draws a panel for each kind of logged metric; an empty log gives an empty loss panel."""
    panels: list[tuple[bool, Callable[[Any, RunLog], None]]] = [
        (True, _losses),
        (bool(run.by_position()), _by_position),
        (bool(run.points("train/tokens_per_second/per_rank")), _throughput),
        (bool(run.points("train/peak_memory_gib")), _memory),
        (bool(run.points("train/grad_norm")), _gradient_norm),
        (bool(run.points("train/learning_rate")), _learning_rate),
    ]
    shown = [panel for there, panel in panels if there]
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    with picture(path, (4.8 * columns, 3.4 * rows), 120) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax, panel in zip(axes, shown, strict=False):
            ax.set_xlabel("optimizer step")
            ax.grid(alpha=0.25)
            panel(ax, run)
            ax.spines[["top", "right"]].set_visible(False)
        for ax in axes[len(shown) :]:
            ax.set_visible(False)
        figure.suptitle(run.name)


def draw_by_position(curves: Sequence[tuple[str, Sequence[tuple[int, int, float]]]], path: Path) -> None:
    """Draws loss by position alone: a curve for each (label, [(first position, last position, loss in nats), ...])."""
    with picture(path, (7, 4.5), 120) as figure:
        ax = figure.subplots()
        for index, (label, rows) in enumerate(curves):
            _curve(ax, rows, color=f"C{index}", label=label)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and up to `window - 1` values before it."""
    sums = [0.0, *accumulate(values)]
    starts = (max(0, end - window) for end in range(1, len(sums)))
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]


def _losses(ax: Any, run: RunLog) -> None:
    train, held_out = run.points("train/loss"), run.points("val/loss")
    if train:
        _smoothed(ax, train, TRAIN, "train")
    if held_out:
        ax.plot(*zip(*held_out, strict=True), color=HELD_OUT, marker="o", markersize=4, label="held out")
    if train or held_out:
        ax.legend(frameon=False)
    ax.set(title="loss (nats a token)")


def _by_position(ax: Any, run: RunLog) -> None:
    # Early and late curves: the right end falls when the model learns to use distant tokens.
    rows = max(len(points) for name, points in run.metrics.items() if name.startswith(PREFIX))
    if rows >= 4:
        _curve(ax, run.by_position(0, rows // 4), color=TRAIN, alpha=0.4, label="first quarter")
    _curve(ax, run.by_position(), color=TRAIN, label="last rows logged")
    ax.set(title="train loss by position", ylabel="")


def _curve(ax: Any, rows: Sequence[tuple[int, int, float]], **style: Any) -> None:
    """Draws the loss of each bucket at its end, where its context is longest."""
    if rows:
        ax.plot([last + 1 for _, last, _ in rows], [loss for *_, loss in rows], marker="o", markersize=4, **style)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="position in the document, up to", ylabel="loss (nats a token)")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False)


def _throughput(ax: Any, run: RunLog) -> None:
    rate, mfu = run.points("train/tokens_per_second/per_rank"), run.points("train/mfu")
    title = "tokens/s a rank"
    ax.plot(*zip(*rate, strict=True), color=TRAIN)
    ax.set_ylim(bottom=0)
    if mfu:
        twin = ax.twinx()
        twin.plot([step for step, _ in mfu], [100 * value for _, value in mfu], color=OTHER, linestyle="--")
        twin.set_ylim(bottom=0)
        twin.spines["top"].set_visible(False)
        title += "; dashed: MFU, %"
    ax.set(title=title)


def _memory(ax: Any, run: RunLog) -> None:
    ax.plot(*zip(*run.points("train/peak_memory_gib"), strict=True), color=OTHER)
    ax.set_ylim(bottom=0)
    ax.set(title="peak memory of a rank (GiB)")


def _gradient_norm(ax: Any, run: RunLog) -> None:
    points = run.points("train/grad_norm")
    _smoothed(ax, points, TRAIN, None)
    if all(value > 0 for _, value in points):
        ax.set_yscale("log")
    ax.set(title="gradient norm, before clipping")


def _learning_rate(ax: Any, run: RunLog) -> None:
    ax.plot(*zip(*run.points("train/learning_rate"), strict=True), color=OTHER)
    ax.set_ylim(bottom=0)
    ax.set(title="learning rate")


def _smoothed(ax: Any, points: Points, color: str, label: str | None) -> None:
    steps, values = zip(*points, strict=True)
    ax.plot(steps, values, color=color, linewidth=0.8, alpha=0.4)
    ax.plot(steps, running_mean(values, max(1, len(values) // 16)), color=color, label=label)
