"""Processes of a command: one, or the processes of torchrun in a ring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import ringflash as rf
from ringflash.errors import ArgumentError
from ringflash.train.lightning.shutdown import Shutdown

DEVICES = ("auto", "cpu", "cuda")


@contextmanager
def ranks(device: str) -> Iterator[tuple[torch.device, rf.ContextParallel | None]]:
    """Yields this process's device, and the ring of all processes of torchrun; None without torchrun.

    Args:
        device: "cpu", "cuda", or "auto", which is a GPU if there is one.

    Raises:
        ArgumentError: another device, or CUDA without a GPU for each process of this host.
    """
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if device not in DEVICES or (device == "cuda" and not gpus):
        got = f"{device}, without a CUDA device here" if device == "cuda" else device
        raise ArgumentError("--device", expected="auto, cpu or cuda", got=got, remedy="Leave --device out.")
    kind = ("cuda" if gpus else "cpu") if device == "auto" else device
    if kind == "cuda" and local >= gpus:
        expected, remedy = f"at most {gpus}, one a GPU", "Start fewer, or pass --device cpu."
        raise ArgumentError("processes", expected=expected, got=f"{local + 1} or more", remedy=remedy)
    place = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    if "RANK" not in os.environ:
        yield place, None
        return
    if kind == "cuda":
        torch.cuda.set_device(place)
    if dist.is_initialized():  # a program that calls the command made the group and destroys it
        yield place, rf.ContextParallel(dist.group.WORLD)
        return
    shutdown = Shutdown()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=place if kind == "cuda" else None)
    try:
        yield place, rf.ContextParallel(dist.group.WORLD)
    except BaseException:
        shutdown.fail()  # this rank does not wait for the others at exit
        raise


def inference_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which models compute on `device` outside training."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def is_first(context: rf.ContextParallel | None) -> bool:
    """Returns whether this process prints for all ranks."""
    return context is None or context.rank == 0
