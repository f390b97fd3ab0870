"""Logged metrics and configuration of a run, read from the files in its folder."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from ringflash.errors import DataError
from ringflash.train.callbacks.loss_by_position import PREFIX

METRICS, CONFIG = "metrics.csv", "config.yaml"
LAST_ROWS = 10  # logged rows to average for a last value, because one step's loss comes from one batch

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class RunLog:
    """Log of a run: (optimizer step from 1, value) by metric name, and the run's configuration, if it was saved."""

    name: str
    metrics: Mapping[str, Points]
    config: Mapping[str, Any]

    def points(self, name: str) -> Points:
        """Returns the points of metric `name`, empty if it was never logged."""
        return self.metrics.get(name, [])

    @property
    def steps(self) -> int:
        """Last logged step."""
        return max((points[-1][0] for points in self.metrics.values() if points), default=0)

    def by_position(self, first: int = -LAST_ROWS, last: int | None = None) -> list[tuple[int, int, float]]:
        """Returns (first position, last position, mean loss of logged rows `first` to `last`), ordered by position."""
        found = []
        for name, points in self.metrics.items():
            if name.startswith(PREFIX) and (part := points[first:last]):
                start, end = map(int, name.removeprefix(PREFIX).split("-"))
                found.append((start, end, fmean(value for _, value in part)))
        return sorted(found)


def read_run(folder: Path) -> RunLog:
    """Reads the log of a finished or running run.

    Raises:
        DataError: the folder has no log, or its configuration is no YAML.
    """
    log = folder / METRICS
    if not log.is_file():
        got = f"no {METRICS} in it" if folder.is_dir() else "no such folder"
        remedy = "Pass a run's folder, as in runs/tiny-cpu; the log is there from the first logged step on."
        raise DataError(str(folder), expected="the folder of a run with a CSV log", got=got, remedy=remedy)
    text = log.read_text()
    whole_lines = text[: text.rfind("\n") + 1]  # the run may still be writing the last line
    metrics: dict[str, Points] = {}
    for row in csv.DictReader(whole_lines.splitlines()):
        step = int(row["step"])
        for name, value in row.items():
            if name not in ("step", "epoch") and value:
                metrics.setdefault(name, []).append((step + 1, float(value)))
    path = folder / CONFIG
    try:
        config = yaml.safe_load(path.read_text()) if path.is_file() else {}
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
        remedy = "Move it away: a report can do without."
        raise DataError(str(path), expected="the configuration as YAML", got=problem, remedy=remedy) from error
    return RunLog(folder.absolute().name, metrics, config if isinstance(config, dict) else {})
