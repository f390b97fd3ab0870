"""What is installed, which devices and process groups there are, and which kernels attention would run on."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ringflash.errors import ArgumentError
from ringflash.kernels import backend, eager

PACKAGES = ("ringflash", "torch", "triton", "lightning", "jsonargparse", "numpy", "safetensors", "matplotlib")
OPTIONAL = {
    "tensorboard": "extra logging: event files beside the CSV log",
    "tokenizers": "extra data: `ringflash prepare` with more than bytes",
    "pyarrow": "extra data: `ringflash prepare` of Parquet files",
    "transformers": "extra hf: its models on a ring; tests compare the decoder with its Llama",
    "ring-flash-attn": "extra bench: a peer of `ringflash bench ring`",
}


def report(console: Console | None = None) -> None:
    """Prints a table of what this machine and environment offer."""
    table = Table(title="ringflash doctor", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts().items():
        table.add_row(name, value)
    (console or Console()).print(table)


def facts() -> dict[str, str]:
    """The rows of the table."""
    rows = {"python": platform.python_version()}
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
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str:
    from torch.cuda import nccl  # not an attribute of every build

    return ".".join(map(str, nccl.version()))


def _backend(device: str, dtype: torch.dtype) -> str:
    try:
        chosen = backend.choose("auto", torch.empty(1, 1, 1, 64, device=device, dtype=dtype))
    except ArgumentError as error:
        return f"none: {error}"
    if chosen is eager:
        return "eager kernels"
    from ringflash.kernels.hopper import backend as hopper  # here: Triton is imported late

    missing = hopper.why_not(torch.device(device))
    return "Gluon kernels for sm_90" if missing is None else f"Triton kernels; not those for sm_90: {missing}"
