"""Tables of the benchmarks' figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]
# A header, the key of a figure or a function of the row, and the format of the cell. Text on the left has no format, or
# "<" if it never wraps: in a narrow terminal the other columns then become narrower.
Column = tuple[str, str | Callable[[Row], Any], str]

WIDTH = 170  # columns, if the output is not a terminal


def heads(row: Row) -> str:
    """Returns the heads of a row for titles: "32:8 heads of 128"."""
    return f"{row['nheads']}:{row['nheads_kv']} heads of {row['headdim']}"


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Row], failed: str = "") -> None:
    """Prints a table with a line for each row, and below it why rows failed.

    Args:
        title: title of the table.
        columns: columns of the table; a figure that a row lacks is a dash.
        rows: rows of the benchmark.
        failed: name of a row that failed, with keys of the row in braces.
    """
    table = Table(title=title)
    for header, _, form in columns:
        table.add_column(header, justify="left" if form in ("", "<") else "right", no_wrap=form == "<")
    for row in rows:
        table.add_row(*(_cell(row, key, form) for _, key, form in columns))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    for row in rows:
        for why in {"failed", "unavailable"} & row.keys():
            console.print(f"  {failed.format(**row)}: {row[why]}", markup=False)


def _cell(row: Row, key: str | Callable[[Row], Any], form: str) -> str:
    try:
        return format(key(row) if callable(key) else row[key], form)
    except KeyError:
        return "-"
