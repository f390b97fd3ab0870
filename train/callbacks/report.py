"""Report on a run: its log and configuration as a Markdown page and a picture; also as a callback."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from ringflash.commands.options import Described, add_shared, parser_of
from ringflash.errors import ArgumentError, ConfigError
from ringflash.extras import MissingExtra
from ringflash.train.callbacks.loss_by_position import perplexity
from ringflash.train.callbacks.report_picture import draw
from ringflash.train.callbacks.run_log import CONFIG, LAST_ROWS, METRICS, RunLog, read_run

PAGE = "report.md"
TRAINER_KEYS = ("devices", "num_nodes", "strategy", "max_steps", "accumulate_grad_batches", "gradient_clip_val")


log = logging.getLogger(__name__)


def write_report(folder: Path, page: Path) -> Path | None:
    """Writes the Markdown `page` on the run in `folder`, and its picture next to it.

    Returns:
        The path of the picture. None if there is none, because matplotlib is not installed, which the log says.

    Raises:
        DataError: as in `read_run`.
    """
    run, picture = read_run(folder), picture_of(page)
    try:
        draw(run, picture)
    except MissingExtra as error:
        log.warning("The report has no picture. %s", error)
        picture = None
    page.write_text(markdown(run, None if picture is None else picture.name))
    return picture


def picture_of(page: Path) -> Path:
    """Returns the path of a page's picture."""
    return page.with_suffix(".png")


def markdown(run: RunLog, picture: str | None) -> str:
    """Returns the page: final values, picture if there is one, loss by position, configuration."""
    parts = [f"# {run.name}", _table(("", ""), figures(run))]
    if picture is not None:
        parts += [f"![Figures over optimizer steps]({picture})"]
    if by_position := run.by_position():
        rows = [(f"{first}-{last}", f"{loss:.4f}", f"{perplexity(loss):.4g}") for first, last, loss in by_position]
        parts += ["## Loss by position", _table(("position", "train loss (nats a token)", "perplexity"), rows)]
    settings = settings_of(run.config)
    parts += ["## Configuration", _table(("", ""), settings) if settings else f"No {CONFIG} in the run's folder."]
    return "\n\n".join(parts) + "\n"


def figures(run: RunLog) -> list[tuple[str, str]]:
    """Returns the final values of the run, with their units; only of logged metrics."""
    planned = (run.config.get("trainer") or {}).get("max_steps")
    of = f" of {planned}" if isinstance(planned, int) and planned > 0 else ""
    rows = [("last step logged", f"{run.steps}{of}")]
    if train := _values(run, "train/loss"):
        last = fmean(train[-LAST_ROWS:])
        rows.append(("train loss, first and last", f"{train[0]:.4f}, {last:.4f} (mean of {len(train[-LAST_ROWS:])})"))
    if held_out := _values(run, "val/loss"):
        text = f"{held_out[-1]:.4f}, perplexity {perplexity(held_out[-1]):.4g}"
        rows.append(("held-out loss", f"{text}; lowest {min(held_out):.4f}"))
    for name, label, text in (
        ("train/tokens_per_second", "tokens/s (median)", "{:,.0f}"),
        ("train/tokens_per_second/per_rank", "tokens/s a rank (median)", "{:,.0f}"),
        ("train/mfu", "MFU (median)", "{:.1%}"),
        ("train/exposed_communication", "exposed communication (median of traces)", "{:.1%}"),
        ("train/grad_norm", "gradient norm (median)", "{:.3g}"),
    ):
        if values := _values(run, name):
            rows.append((label, text.format(median(values))))
    if memory := _values(run, "train/peak_memory_gib"):
        rows.append(("peak memory of a rank", f"{max(memory):.2f} GiB"))
    if rates := _values(run, "train/learning_rate"):
        rows.append(("learning rate, highest and last", f"{max(rates):.3g}, {rates[-1]:.3g}"))
    return rows


def settings_of(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the entries of a saved configuration that describe its model, data and ranks."""
    trainer = config.get("trainer") or {}
    chosen = {
        "model": config.get("model"),
        "data": config.get("data"),
        "trainer": {key: trainer.get(key) for key in TRAINER_KEYS},
        "seed_everything": config.get("seed_everything"),
    }
    return [(name, f"`{value}`") for name, value in _flat(chosen)]


class Report(Callback):
    """Writes the report on a run into its folder at the end of fit, if there is a CSV log.

    Args:
        filename: name of the page; the picture has the same name with .png.
    """

    def __init__(self, filename: str = PAGE) -> None:
        if Path(filename).suffix != ".md" or Path(filename).name != filename:
            raise ConfigError("filename", expected="a name that ends in .md", got=filename, remedy=f"Try {PAGE}.")
        self.filename = filename

    @rank_zero_only
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the report."""
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.save()
                folder = Path(logger.log_dir)
                if (folder / METRICS).is_file():
                    write_report(folder, folder / self.filename)


def main(argv: Sequence[str]) -> int:
    """Writes the report on the given run, and prints the paths of the page and the picture."""
    parser = parser_of("report", "Draws a run's log, finished or not.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, as in runs/tiny-cpu")
    add_shared(parser, "debug", to=Described(f"the page RUN/{PAGE}"))
    options = parser.parse_args(argv)
    page: Path = options.to or options.run / PAGE
    if page.suffix != ".md":
        raise ArgumentError("--to", expected="a file that ends in .md", got=page, remedy=f"Name it {PAGE}.")
    picture = write_report(options.run, page)
    # Printed: the paths are the output of `ringflash report`, for scripts to read.
    print("\n".join(str(path) for path in (page, picture) if path is not None))
    return 0


def _values(run: RunLog, name: str) -> list[float]:
    return [value for _, value in run.points(name)]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [row for key, inner in value.items() for row in _flat(inner, f"{prefix}.{key}" if prefix else str(key))]
    return [] if value is None else [(prefix, value)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
