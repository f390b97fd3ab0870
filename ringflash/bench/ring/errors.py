"""The accuracy benchmark: errors against float64 over ring size and over depth, by three ways to merge hops.

    ringflash bench accuracy --json accuracy.json --png accuracy.png

All ranks of a ring are in this process, so one device suffices. Errors are root mean squares over those of the exact
result: of out, dq, dk and dv of one attention over ring size, and of the gradient of the input over depth. A layer
there is a normalisation, attention with four square products, and a residual. All but attention is in float64, so that
only the errors of attention add up. `merging.py` describes the ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ringflash.bench.common.plot import dress
from ringflash.bench.common.problem import Problem
from ringflash.bench.common.record import Run
from ringflash.bench.common.report import Column, print_table
from ringflash.bench.ring.accuracy import TENSORS, plain_by_rows
from ringflash.bench.ring.merging import Attention, ways
from ringflash.commands.options import DTYPES, Described, add_shared, check_at_least, parser_of
from ringflash.commands.picture import picture
from ringflash.errors import ArgumentError

GPU = {
    "seqlen": 8192,
    "world_sizes": [1, 2, 4, 8, 16, 32, 64],
    "layer_counts": [1, 2, 4, 8, 16, 32],
    "depth_seqlen": 2048,
}
CPU = {
    "seqlen": 512,
    "world_sizes": [1, 2, 4, 8, 16, 32, 64],
    "layer_counts": [1, 2, 4, 8, 16, 32],
    "depth_seqlen": 256,
}
HEADS, HEADDIM = 2, 64
DEPTH_RANKS = 8
GRADIENT = "gradient of the input"


def main(argv: Sequence[str]) -> int:
    """Computes and prints the errors."""
    run = Run.begin(_parser(), argv, GPU, CPU)
    options, device = run.options, run.device
    check_at_least(options, ["seqlen", "depth_seqlen"])
    for name, seqlen, sizes in (
        ("--world-sizes", options.seqlen, options.world_sizes),
        ("--depth-seqlen", options.depth_seqlen, [DEPTH_RANKS]),
    ):
        wrong = [size for size in sizes if size < 1 or seqlen % size]
        if wrong:
            expected = f"divisors of the {seqlen} tokens, because each rank has a part of the same length"
            raise ArgumentError(name, expected=expected, got=wrong[0], remedy="Choose powers of two.")
    dtype = DTYPES[options.dtype]
    rows = [*_over_ring_size(options.seqlen, options.world_sizes, device, dtype)]
    rows += _over_depth(options.depth_seqlen, options.layer_counts, device, dtype)
    _print(rows, run.device_name)
    run.write(rows)
    if options.png is not None:
        draw(options.png, rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "Computes errors of rings against float64, by three ways to merge their hops."
    parser = parser_of("bench accuracy", description)
    add_shared(parser, seqlen=Described("8192, on a CPU 512"), world_sizes=Described("1 to 64, doubling"))
    text = f"numbers of layers, measured on {DEPTH_RANKS} ranks (default: 1 to 32, doubling)"
    parser.add_argument("--layer-counts", type=int, nargs="+", metavar="N", help=text)
    text = "length of the sequence that goes through layers (default: 2048, on a CPU 256)"
    parser.add_argument("--depth-seqlen", type=int, metavar="N", help=text)
    add_shared(parser, "json", "png", dtype="bfloat16", choices={"dtype": ("bfloat16", "float16")})
    return parser


def _over_ring_size(
    seqlen: int, world_sizes: Sequence[int], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Returns the errors of out, dq, dk and dv, a row for each way and ring size."""
    problem = Problem.random(seqlen, HEADS, HEADS, HEADDIM, device, dtype)
    exact = plain_by_rows(problem, torch.float64)
    rows: list[dict[str, Any]] = []
    for world_size in world_sizes:
        for name, attend in ways(world_size).items():
            q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
            out = attend(q, k, v)
            results = out.detach(), *torch.autograd.grad(out, (q, k, v), problem.dout)
            errors = {x: _relative(y, z) for x, y, z in zip(TENSORS, results, exact, strict=True)}
            rows.append({"name": name, "world_size": world_size, **_shape(seqlen, dtype), "errors": errors})
    return rows


def _over_depth(seqlen: int, layers: Sequence[int], device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Returns the errors of the input's gradient, a row for each way and number of layers."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float64)

    width = HEADS * HEADDIM
    x, dout = draw(1, seqlen, width), draw(1, seqlen, width)
    weights = [draw(4, width, width) / width**0.5 for _ in range(max(layers))]
    rows: list[dict[str, Any]] = []
    for count in layers:
        exact = _gradient(x, dout, weights[:count], _plain, torch.float64)
        for name, attend in ways(DEPTH_RANKS).items():
            gradient = _gradient(x, dout, weights[:count], attend, dtype)
            errors = {GRADIENT: _relative(gradient, exact)}
            rows.append(
                {"name": name, "world_size": DEPTH_RANKS, "layers": count, **_shape(seqlen, dtype), "errors": errors}
            )
    return rows


def _gradient(x: Tensor, dout: Tensor, weights: Sequence[Tensor], attend: Attention, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of x through layers whose attention takes and returns tensors of `dtype`."""
    x = hidden = x.detach().requires_grad_()
    for to_q, to_k, to_v, to_out in weights:
        rows = functional.rms_norm(hidden, hidden.shape[-1:])
        q, k, v = ((rows @ weight).unflatten(-1, (HEADS, HEADDIM)).to(dtype) for weight in (to_q, to_k, to_v))
        hidden = hidden + attend(q, k, v).to(hidden.dtype).flatten(2) @ to_out
    (gradient,) = torch.autograd.grad(hidden, x, dout)
    return gradient


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _shape(seqlen: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"seqlen": seqlen, "nheads": HEADS, "headdim": HEADDIM, "dtype": str(dtype).removeprefix("torch.")}


def _relative(result: Tensor, exact: Tensor) -> float:
    """Returns the root mean square of the errors over that of the exact values."""
    return ((result.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def _print(rows: Sequence[Mapping[str, Any]], device: str) -> None:
    """Prints a table over ring size and one over depth."""
    for key, title in (("world_size", "ranks"), ("layers", "layers")):
        shown = [row for row in rows if ("layers" in row) == (key == "layers")]
        if not shown:
            continue
        first = shown[0]
        columns: list[Column] = [(title, key, "d"), ("way", "name", "")]
        columns += [(name, lambda row, name=name: row["errors"][name], ".2e") for name in first["errors"]]
        print_table(f"relative RMS error, {first['seqlen']} tokens, {first['dtype']}, {device}", columns, shown)


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws the errors over ring size and over depth to `path`."""
    panels = [("world_size", name) for name in TENSORS] + [("layers", GRADIENT)]
    with picture(path, (3.0 * len(panels), 3.4)) as figure:
        handles: dict[str, Any] = {}
        for ax, (key, tensor) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for name in dict.fromkeys(row["name"] for row in rows):
                of = [row for row in rows if row["name"] == name and ("layers" in row) == (key == "layers")]
                xs, ys = [row[key] for row in of], [row["errors"][tensor] for row in of]
                handles[name] = ax.plot(xs, ys, "o-", ms=3.5)[0]
            dress(ax, tensor)
            ax.set_xlabel("ranks" if key == "world_size" else f"layers, {DEPTH_RANKS} ranks")
            ax.set_xscale("log", base=2)
        figure.suptitle("Relative RMS error against float64", fontsize=11)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=9)
