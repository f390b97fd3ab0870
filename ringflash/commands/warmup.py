"""`ringflash warmup`: compiles the attention kernels of a training run ahead of time, in parallel.

    ringflash warmup --config configs/h200-4.yaml --processes 8

It needs a GPU of the run, because the GPU decides on the kernels, but only one of them. Ranks that start later on this
host, or with the same TRITON_CACHE_DIR, load what it compiled.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ringflash as rf
from ringflash.commands.options import (
    PRINTED,
    Described,
    add_run_options,
    add_shared,
    check_at_least,
    config_arguments,
    parser_of,
    put_json,
)
from ringflash.errors import ArgumentError, ConfigError
from ringflash.masks import Mask

if TYPE_CHECKING:
    from ringflash.compile_once import Compilations
    from ringflash.kernels.variants import Outcome, Variant

PACKED_BATCHES = 4  # batches whose documents are looked at: bounds decide on constants, but few kinds of them occur
MOST_PROCESSES = 16  # each has a CUDA context of half a GiB, to load what it compiled
WIDTH = 110  # columns, if the output is not a terminal


@dataclass(frozen=True)
class Calls:
    """Attention calls of a training run that differ in their kernels.

    Args:
        seqlen: tokens of a whole sequence.
        batch: sequences of a rank's micro-batch.
        nheads: query heads.
        nheads_kv: KV heads.
        headdim: width of a head.
        dtype: dtype of q, k and v.
        masks: the masks of all layers, under several batches of packed documents.
        world_size: ranks that share a sequence; 0 without a ring.
        layout: cut of the sequence.
        hops: as in `ContextParallel`.
        deterministic: whether gradients are bitwise repeatable.
    """

    seqlen: int
    batch: int
    nheads: int
    nheads_kv: int
    headdim: int
    dtype: torch.dtype
    masks: tuple[Mask, ...]
    world_size: int
    layout: str = "zigzag"
    hops: str = "auto"
    deterministic: bool = False

    def run(self, device: torch.device) -> None:
        """Calls attention forward and backward, all ranks of the ring in this process, and forward for validation.

        The shapes are those of the run. Triton derives constants from sizes and strides, so smaller ones could differ.
        """
        shape = (self.batch, self.seqlen)
        q = torch.empty(*shape, self.nheads, self.headdim, dtype=self.dtype, device=device, requires_grad=True)
        k, v = (
            torch.empty(*shape, self.nheads_kv, self.headdim, dtype=self.dtype, device=device, requires_grad=True)
            for _ in range(2)
        )
        context = rf.ContextParallel.local(self.world_size, self.layout, hops=self.hops) if self.world_size else None
        options = rf.AttentionOptions(deterministic=self.deterministic)
        for mask in self.masks:
            for training in (True, False):
                with torch.set_grad_enabled(training):
                    if context is None:
                        out = rf.flash_attention(q, k, v, mask=mask, options=options)
                    else:
                        out = rf.ring_attention(q, k, v, context, mask=mask, options=options)
                    assert isinstance(out, torch.Tensor)
                    if training:
                        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))


def main(argv: Sequence[str]) -> int:
    """Compiles what is not in the cache, and prints a table or JSON; returns 1 if a kernel cannot be compiled."""
    options, overrides = _parser().parse_known_args(argv)
    check_at_least(options, ["processes"])
    calls = calls_of([*config_arguments(options), *overrides])
    if not torch.cuda.is_available():
        raise ArgumentError(
            "warmup",
            expected="a GPU of the kind that will train, because it decides on the kernels",
            got="no GPU that torch can use",
            remedy="Run it on a host of the run, before training; `ringflash doctor` shows the GPUs.",
        )
    folder = check_cache()
    started = time.perf_counter()
    variants = variants_of(calls, torch.device("cuda", torch.cuda.current_device()))
    processes = min(options.processes or len(os.sched_getaffinity(0)), MOST_PROCESSES, max(len(variants), 1))
    outcomes = compile_all(variants, processes)
    seconds = time.perf_counter() - started
    if options.json:
        kernels = [asdict(outcome) for outcome in outcomes]
        compiled = sum(outcome.compiled for outcome in outcomes)
        figures = {"kernels": kernels, "compiled": compiled, "seconds": seconds, "processes": processes}
        put_json(options.json, figures | {"cache": str(folder)})
    if options.json != PRINTED:
        _show(outcomes, seconds, processes, folder)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "warmup",
        "Compiles the attention kernels of a training run into Triton's cache, so that its ranks only load "
        "them. Needs a GPU of the run. Other arguments change the configuration, as in `ringflash train fit`: "
        "--trainer.devices=4. What torch.compile makes (compile_blocks) is not included.",
    )
    add_run_options(parser)
    add_shared(parser, processes=Described(f"one a core, at most {MOST_PROCESSES}"))
    return parser


def calls_of(arguments: Sequence[str]) -> Calls:
    """Returns the attention calls of `ringflash train fit` with these arguments; the run itself is not started.

    Raises:
        ConfigError: as `ringflash train`; or the run is for CPUs, where no kernel is compiled.
        DataError: documents are packed, and there is no corpus to pack.
    """
    from ringflash.train.commands.configured import configured
    from ringflash.train.lightning.strategy import RingAttentionStrategy, resolve_sizes

    cli = configured(arguments)
    if cli.accelerator == "cpu":
        remedy = "Train right away, or pass the configuration of a run on GPUs."
        raise ConfigError("trainer.accelerator", expected="gpu", got="cpu: nothing is compiled", remedy=remedy)
    data_parallel, world_size, rest = cli.ranks, 0, {}
    if isinstance(strategy := cli.strategy, RingAttentionStrategy):
        data_parallel, world_size = resolve_sizes(*strategy.asked_sizes, cli.ranks)
        rest = {"layout": strategy.layout, "hops": strategy.hops}
    model: Any = cli.model
    shape = cli.shape
    windows = dict.fromkeys(shape.window(layer) for layer in range(shape.n_layers))
    layers = [rf.Causal() if w is None else rf.Causal() & rf.SlidingWindow(w - 1) for w in windows]
    batch = max(cli.datamodule.batch_size // data_parallel, 1)
    documents = [*_documents(cli.datamodule, batch)]
    return Calls(
        seqlen=cli.datamodule.context_length,
        batch=batch,
        nheads=shape.n_heads,
        nheads_kv=shape.n_kv_heads,
        headdim=shape.headdim,
        dtype=torch.bfloat16 if model.compute_dtype == "auto" else getattr(torch, model.compute_dtype),
        masks=tuple(layer & each for layer in layers for each in documents) if documents else tuple(layers),
        world_size=world_size,
        deterministic=cli.deterministic,
        **rest,
    )


def _documents(data: Any, batch: int) -> Iterator[rf.Documents]:
    """Yields the documents of a few batches; nothing if a sequence is one text."""
    from ringflash.train.lightning.batch import documents_of

    if data.documents == "joined":
        return
    data.prepare_data()
    data.setup("fit")
    samples = data.train_samples()
    for first in range(0, min(len(samples), PACKED_BATCHES * batch), batch):
        documents = documents_of(samples[[i % len(samples) for i in range(first, first + batch)]])
        assert documents is not None
        yield documents


def check_cache() -> Path:
    """Returns the folder of Triton's cache, or raises ArgumentError if it cannot be written."""
    from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        expected = "a folder that this user can write"
        remedy = "Set TRITON_CACHE_DIR to one, here and for the run."
        raise ArgumentError("TRITON_CACHE_DIR", expected=expected, got=f"{folder}: {error}", remedy=remedy) from error
    return folder


def variants_of(calls: Calls, device: torch.device) -> list[Variant]:
    """Returns the kernel variants that the calls launch, in the order of first launch; runs none of them.

    Raises:
        ArgumentError: the tensors of all ranks of a ring do not fit the GPU.
    """
    from ringflash.kernels.variants import recorded

    try:
        with recorded() as variants:
            calls.run(device)
    except torch.OutOfMemoryError as error:
        raise ArgumentError(
            "warmup",
            expected="one GPU with room for the attention of all ranks of a sequence, one layer of it",
            got=f"{calls.batch} x {calls.seqlen} tokens of {calls.nheads} heads: {str(error).splitlines()[0]}",
            remedy="Free the GPU, or let the run compile its kernels itself: once a host.",
        ) from error
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the processes that compile need a little memory each
    return variants


def compile_all(variants: Sequence[Variant], processes: int, arch: int | None = None) -> list[Outcome]:
    """Compiles the variants in parallel, each in the next free process, and returns outcomes in the same order.

    Args:
        variants: what to compile.
        processes: number of processes.
        arch: compute capability to compile for without loading; None is that of this process's GPU.

    Raises:
        ArgumentError: a process was killed, as for want of memory.
    """
    place = None if arch is not None else torch.cuda.current_device()
    spawn = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    backwards = [*enumerate(variants)][::-1]  # backward kernels are launched last and take longest, so they come first
    try:
        with ProcessPoolExecutor(processes, spawn) as pool:
            futures = [(i, pool.submit(_compile, variant, place, arch)) for i, variant in backwards]
            return [future.result() for _, future in sorted(futures, key=lambda each: each[0])]
    except BrokenProcessPool as error:
        raise ArgumentError(
            "--processes",
            expected=f"memory for {processes} processes",
            got="one that was killed while it compiled",
            remedy="Pass fewer, and run it again: what is compiled stays.",
        ) from error


def _compile(variant: Variant, place: int | None, arch: int | None) -> Outcome:
    from ringflash.kernels.variants import compile_variant

    return compile_variant(variant, _prepare_process(place, arch), load=arch is None)


@cache
def _prepare_process(place: int | None, arch: int | None) -> Compilations:
    """Prepares a process that compiles, at its first kernel, and returns the record of its compilations."""
    from triton.runtime import driver

    from ringflash.compile_once import compile_once_a_host

    torch.set_num_threads(1)
    if place is not None:
        torch.cuda.set_device(place)
    if arch is not None:
        from ringflash.kernels.aot.compiler import TargetDriver

        driver.set_active(TargetDriver(arch))
    return compile_once_a_host()


def _show(outcomes: Sequence[Outcome], seconds: float, processes: int, folder: Path) -> None:
    """Prints a row for each variant, and a line in all."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Attention kernels of the run", title_justify="left")
    table.add_column("kernel")
    table.add_column("s", justify="right")
    table.add_column("", overflow="fold")
    for each in outcomes:
        state = each.error or ("compiled" if each.compiled else "was in the cache")
        table.add_row(each.name, f"{each.seconds:.1f}", state)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    compiled = [each for each in outcomes if each.compiled]
    console.print(
        f"{len(compiled)} of {len(outcomes)} kernels compiled: {sum(each.seconds for each in compiled):.1f} s of work, "
        f"{seconds:.1f} s with {processes} processes. Cache: {folder}",
        markup=False,
        soft_wrap=True,
    )
