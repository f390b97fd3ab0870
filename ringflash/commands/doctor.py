"""Report of the installed packages and of the kernels that attention uses, with a self-test on each device."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash import __version__, reference
from ringflash.commands.options import PRINTED, add_shared, parser_of, put_json
from ringflash.errors import ArgumentError
from ringflash.kernels import select
from ringflash.masks import Causal
from ringflash.ops.attention import flash_attention

PACKAGES = ("torch", "triton", "numpy")
OPTIONAL = {
    "lightning": "extra train: the trainer",
    "jsonargparse": "extra train: configurations of the trainer",
    "safetensors": "extra train: weights",
    "rich": "extra train or plot: tables of commands",
    "matplotlib": "extra plot: pictures",
    "tensorboard": "extra logging: event files beside the CSV log",
    "tokenizers": "extra data: `ringflash prepare` with more than bytes",
    "pyarrow": "extra data: `ringflash prepare` of Parquet files",
    "transformers": "extra hf: its models on a ring; tests compare the decoder with its Llama",
    "peft": "extra peft: LoRA in `ringflash finetune` and `ringflash dpo`",
    "bitsandbytes": "extra qlora: LoRA on 4-bit base weights",
    "ring-flash-attn": "extra bench: a peer of `ringflash bench ring`",
}

# Bounds on the relative RMS error: above the error of rounding, below the error of a wrong kernel.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def main(argv: Sequence[str]) -> int:
    """Prints the installed packages, the devices and the self-tests, as a table or as one JSON object.

    Returns:
        0 if nothing needed is missing and attention passed its self-test on each device, else 1.
    """
    text = "Shows what is installed and tests attention; exits with 1 when something is missing or fails."
    parser = parser_of("doctor", text)
    add_shared(parser, "json", "debug")
    options = parser.parse_args(argv)
    rows = facts()
    found = [name for name, value in rows.items() if value.startswith(("MISSING", "FAILED"))]
    if options.json:
        put_json(options.json, {"ok": not found, "problems": found, "facts": rows})
    if options.json != PRINTED:
        _print_table(rows)
    return 1 if found else 0


def _print_table(rows: dict[str, str]) -> None:
    if find_spec("rich") is None:  # it is missing, and the rows say so
        print("\n".join(f"{name}: {value}" for name, value in rows.items()))
        return
    from rich.console import Console  # imported here, because the report is plain text without rich
    from rich.table import Table

    table = Table(title="ringflash doctor", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def facts() -> dict[str, str]:
    """Returns the rows of the report."""
    rows = {"python": platform.python_version(), "ringflash": __version__}  # a checkout has no metadata to read
    rows |= {name: _version(name) or "MISSING" for name in PACKAGES}
    rows |= {name: _version(name) or f"not installed ({use})" for name, use in OPTIONAL.items()}
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    described = [f"{g.name}, {g.total_memory / 2**30:.0f} GiB, sm_{g.major}{g.minor}" for g in gpus]
    rows["GPUs"] = "\n".join(described) or "none"
    rows["CUDA"] = torch.version.cuda or "torch is built without it"
    rows["NCCL"] = _nccl_version() if dist.is_nccl_available() and gpus else "unavailable"
    rows["gloo"] = "available" if dist.is_gloo_available() else "unavailable"
    for device, dtype in (("cpu", torch.float32), *([("cuda", torch.bfloat16)] if gpus else [])):
        rows[f"attention on {device}"] = f"{_backend(device, dtype)} ({str(dtype).removeprefix('torch.')})"
    tested = [(torch.device("cpu"), torch.float32)]
    tested += [(torch.device("cuda", i), torch.bfloat16) for i in range(len(gpus))]
    return rows | {f"self-test on {device}": _self_test(device, dtype) for device, dtype in tested}


def _self_test(device: torch.device, dtype: torch.dtype) -> str:
    """Compares a small causal attention and its gradients with the plain formula in float64."""
    try:
        errors = _errors(device, dtype)
    except Exception as error:  # kernels may fail to compile or to load in many ways
        return f"FAILED: {type(error).__name__}: {error}"
    name = max(errors, key=lambda name: errors[name])
    what = f"largest relative RMS error {errors[name]:.1e}, of {name}, in {str(dtype).removeprefix('torch.')}"
    return f"passed: {what}" if all(error <= BOUNDS[dtype] for error in errors.values()) else f"FAILED: {what}"


def _errors(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Returns the relative RMS errors of the output and of each gradient, with infinity in place of NaN."""
    generator = torch.Generator().manual_seed(0)  # private, so the caller's random numbers do not change
    shapes = ((1, 128, 4, 64), (1, 128, 2, 64), (1, 128, 2, 64), (1, 128, 4, 64))
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    expected = [x.double().requires_grad_() for x in (q, k, v)]
    exact, _ = reference.attention(*expected, mask=Causal())
    exact.backward(dout.double())
    inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
    out = flash_attention(*inputs, mask=Causal())
    out.backward(dout.to(device))
    pairs = {"out": (out, exact)}
    pairs |= {name: (x.grad, y.grad) for name, x, y in zip(("dq", "dk", "dv"), inputs, expected, strict=True)}
    return {name: _relative_rms(got, want) for name, (got, want) in pairs.items()}


def _relative_rms(got: Tensor | None, exact: Tensor | None) -> float:
    if got is None or exact is None:
        return float("inf")
    error = ((got.detach().cpu().double() - exact).norm() / exact.norm()).item()
    return error if error == error else float("inf")  # NaN differs from itself


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str:
    from torch.cuda import nccl  # not every build of torch has it

    return ".".join(map(str, nccl.version()))


def _backend(device: str, dtype: torch.dtype) -> str:
    try:
        chosen = select.choose("auto", torch.empty(1, 1, 1, 64, device=device, dtype=dtype))
    except ArgumentError as error:
        return f"FAILED: {error}"
    if chosen.name == "eager":
        return "eager kernels"
    from ringflash.kernels.fallback import why_not  # imported here, because it imports Triton

    missing = why_not(torch.device(device))
    return "Gluon kernels for sm_90" if missing is None else f"Triton kernels; not those for sm_90: {missing}"
