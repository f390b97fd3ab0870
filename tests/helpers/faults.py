"""Faults planted in ranks, and their outcomes as the test sees them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

import ringflash as rf
from ringflash.ring import tiles
from tests.helpers import distributed, one_gpu
from tests.helpers.accuracy import Problem, as_tensor
from tests.helpers.strict import make_warnings_errors


@dataclass
class Outcome:
    """Outcome of a rank's call: the exception's class, text and fields, and the duration in seconds.

    `usual` is the duration of an earlier call without a fault. The time limits of the tests start from `usual`,
    because the cores may be busy.
    """

    kind: str
    text: str
    fields: dict[str, Any]
    seconds: float
    usual: float = 0.0


def outcome_of(call: Callable[..., object], *args: Any, **kwargs: Any) -> Outcome:
    start = time.monotonic()
    try:
        call(*args, **kwargs)
    except BaseException as error:  # the parent decides how to treat it
        return Outcome(type(error).__name__, str(error), dict(vars(error)), time.monotonic() - start)
    return Outcome("", "", {}, time.monotonic() - start)


def call_ring(context: rf.ContextParallel, **options: Any) -> None:
    """Runs forward and backward of a small problem, and waits until a GPU has finished them."""
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    problem = Problem.random(seqlen=24, batch=1).mapped(lambda x: context.shard(x).to(device))
    q, k, v = (x.requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = as_tensor(rf.ring_attention(q, k, v, context, **options))
    torch.autograd.grad(out, (q, k, v), problem.dout)
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def planted(step: int, action: Callable[[], None], rank: int = 1) -> Iterator[None]:
    """Runs `action` on `rank` after the rank has started the messages of a hop and before it computes.

    Step 0 is the first hop of the forward. The hops of the backward continue the count.
    """
    call_ring(rf.ContextParallel.local(2))  # the first call of a process spends seconds on imports
    if dist.get_rank() != rank:
        yield
        return
    original, steps = tiles.KernelRun.problem, iter(range(100))

    def problem(*args: Any) -> Any:
        if next(steps) == step:
            action()
        return original(*args)

    setattr(tiles.KernelRun, "problem", problem)  # noqa: B010 - pyright rejects an assignment to a frozen class
    try:
        yield
    finally:
        setattr(tiles.KernelRun, "problem", original)  # noqa: B010


def usual_seconds() -> float:
    """Returns the duration of a call without a fault, in seconds, under the present load of the cores."""
    call_ring(rf.ContextParallel.local(2))  # the first call of a process also imports modules
    dist.barrier()
    return outcome_of(call_ring, rf.ContextParallel(dist.group.WORLD)).seconds


def raise_out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted: out of memory")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _served_by_rank_0(files: Store, rank: int, world: int) -> Store:
    """Returns a TCP store that dies with rank 0, like a launcher's; rank 0 publishes its port in `files`."""
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        files.set("port", str(store.port))
        return store
    return TCPStore("127.0.0.1", int(files.get("port")), world, is_master=False)


def _entry(
    rank: int, world: int, folder: str, backend: str, over_tcp: bool, function: Callable[..., Outcome], args: Any
) -> None:
    gc.freeze()  # as in `distributed`
    make_warnings_errors()
    torch.set_num_threads(1)
    store: Store = FileStore(f"{folder}/store", world)
    if over_tcp:
        store = _served_by_rank_0(store, rank, world)
    one_gpu.init_process_group(backend, rank, world, store, timedelta(seconds=60))
    outcome = function(*args)
    torch.save(outcome, f"{folder}/{rank}.pt")
    raise SystemExit(3 if outcome.kind else 0)


def run_to_their_ends(
    world: int, function: Callable[..., Outcome], *args: Any, backend: str = "gloo", over_tcp: bool = False
) -> tuple[list[int | None], list[Outcome | None]]:
    """Returns exit codes and outcomes of ranks that may die; fails if a rank still runs after five minutes.

    With `over_tcp`, rank 0 serves the group's store. Otherwise the store is a file.
    """
    multiprocessing.set_forkserver_preload(distributed.PRELOADED)
    with one_gpu.turn(backend, world), tempfile.TemporaryDirectory() as folder:
        ranks = [
            distributed.PROCESSES.Process(target=_entry, args=(rank, world, folder, backend, over_tcp, function, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + 300
        try:
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            left = [process.is_alive() for process in ranks]
            for process in ranks:
                process.kill()
        assert not any(left), left
        paths = [f"{folder}/{rank}.pt" for rank in range(world)]
        outcomes = [torch.load(path, weights_only=False) if os.path.exists(path) else None for path in paths]
        return [process.exitcode for process in ranks], outcomes
