"""Tables of the kernel benchmark."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ringflash.bench.accuracy import TENSORS

WIDTH = 170  # where the output is no terminal


def print_cells(rows: Sequence[Mapping[str, Any]], missing: Sequence[str], device: str) -> None:
    """One table a cell: every contender's rates, memory and errors, or why it has none."""
    console = _console()
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["headdim"], not row["causal"], row["seqlen"]), []).append(row)
    for _, cell in sorted(cells.items()):
        first = cell[0]
        table = Table(
            title=f"seqlen {first['seqlen']}, headdim {first['headdim']}, {'causal' if first['causal'] else 'full'}: "
            f"batch {first['batch']}, {first['nheads']}:{first['nheads_kv']} heads, {first['dtype']}, {device}, "
            f"matmul {_rate(first['matmul_tflops'])} TFLOP/s"
        )
        table.add_column("contender")
        for part in ("forward", "backward"):
            for what in ("ms", "TFLOP/s", "of matmul"):
                table.add_column(f"{part}\n{what}", justify="right")
        for column in ("peak\nMiB", "bytes\na token", "RMS error\nout dq dk dv", "of plain\nout dq dk dv"):
            table.add_column(column, justify="right")
        for row in cell:
            table.add_row(*_cells(row))
        console.print(table)
        for row in cell:
            if "failed" in row:
                console.print(f"  {row['name']}: {row['failed']}", markup=False)
    if missing:
        console.print(f"Not measured, out of time: {'; '.join(missing)}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "failed" in row:
        return [row["name"], "-"]
    cells = [row["name"]]
    for part in ("forward", "backward"):
        cells += [f"{row[f'{part}_ms']:.3f}", _rate(row[f"{part}_tflops"]), f"{row[f'{part}_share']:.0%}"]
    peak, errors = row.get("peak_bytes"), row.get("errors")
    cells += ["", ""] if peak is None else [f"{peak / 2**20:,.0f}", f"{row['peak_bytes_per_token']:,.0f}"]
    if errors is not None:
        cells.append(" ".join(f"{errors[name]['rms']:.1e}" for name in TENSORS))
        cells.append(" ".join(f"{errors[name]['rms_ratio']:.2f}" for name in TENSORS))
    return cells


def _rate(tflops: float) -> str:
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.2g}"


def print_traffic(rows: Sequence[Mapping[str, Any]], kernels: str) -> None:
    """HBM bytes in MiB: compulsory, with the tiles of `kernels` and no cache, measured, and standard attention's."""
    table = Table(title=f"HBM traffic of the {kernels} kernels in MiB; computed, but for the columns that say measured")
    for column in ("cell", "pass", "compulsory", "tiled, no cache", "measured", "standard attention"):
        table.add_column(column, justify="left" if column in ("cell", "pass") else "right")
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        for what, tiled in row["tiled"].items():
            part, measured = what.split()[0], row["measured"].get(what)
            table.add_row(
                f"{mask} headdim {row['headdim']} seqlen {row['seqlen']} batch {row['batch']}",
                what,
                *(f"{size / 2**20:,.1f}" for size in (row["compulsory"][part], tiled)),
                "" if measured is None else f"{measured / 2**20:,.1f}",
                f"{row['standard'][part] / 2**20:,.1f}",
            )
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)
