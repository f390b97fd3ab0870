"""Tables of the kernel benchmark and of the ring benchmark."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ringflash.bench.ring.accuracy import TENSORS

WIDTH = 170  # columns, if the output is not a terminal


def print_cells(rows: Sequence[Mapping[str, Any]], missing: Sequence[str], device: str) -> None:
    """Prints one table a cell: the rates, memory and errors of every contender, or the reason for a failure."""
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


def print_ring(rows: Sequence[Mapping[str, Any]], device: str) -> None:
    """Prints a table of the times, rates and memory of every contender.

    The reasons for failures follow, and the errors if they were measured.
    """
    first = rows[0]
    heads = f"{first['nheads']}:{first['nheads_kv']} heads of {first['headdim']}, {first['dtype']}"
    table = Table(title=f"Ring attention, {first['mask']}: {heads}, {device}")
    table.add_column("seqlen", justify="right")
    table.add_column("contender", no_wrap=True)
    beside = ("of_one_kernel", "of one\nkernel") if first["mask"] == "causal" else ("over_flops", "over its\nFLOPs")
    for part in ("forward", "both passes"):
        for what in ("ms", "TFLOP/s\na GPU", beside[1]):
            table.add_column(f"{part}\n{what}", justify="right")
    for column in ("exposed us a hop\nforward / backward", "GiB"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [str(row["seqlen"]), row["name"]]
        for part in () if "failed" in row else ("forward", "forward_backward"):
            share = row.get(f"{part}_{beside[0]}")
            cells += [f"{row[f'{part}_ms']:.2f}", f"{row[f'{part}_tflops_per_gpu']:.0f}"]
            cells.append("" if share is None else f"{share:.2f}" if beside[0] == "over_flops" else f"{share:.1%}")
        if "failed" not in row:
            exposed = [row.get(f"{part}_exposed_us_a_hop") for part in ("forward", "backward")]
            cells.append("" if None in exposed else f"{exposed[0]:.0f} / {exposed[1]:.0f}")
            cells.append(f"{row['gib']:.2f}")
        table.add_row(*cells)
    console = _console()
    console.print(table)
    for row in rows:
        if "failed" in row:
            console.print(f"  {row['seqlen']}, {row['name']}: {row['failed']}", markup=False)
        if "errors_over_plain" in row:
            console.print(f"{row['seqlen']}: errors over plain {row['dtype']} attention's: {row['errors_over_plain']}")


def _rate(tflops: float) -> str:
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.2g}"


def print_traffic(rows: Sequence[Mapping[str, Any]], kernels: str) -> None:
    """Prints HBM bytes in MiB: compulsory, computed for the tiles of `kernels`, measured, and of standard attention.

    The bytes of the tiles are computed without a cache.
    """
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
