"""Variants of the Triton and Gluon kernels: recorded from launches that do not happen, and compiled in any process.

A variant is a kernel with its compile-time constants and the types of its arguments. Triton asks a hook before it
compiles one, and the hook may decline: the launch is then left out. Calls of attention thereby name their variants in a
moment, and Triton itself derives the keys of its cache. Checked with Triton 3.6 to 3.9.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import triton
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import

from ringflash.compile_once import Compilations, kernel_name
from ringflash.kernels.cache_keys import settle


@dataclass(frozen=True, eq=False)
class Variant:
    """One kernel to compile, as plain values, so that another process can.

    Args:
        module: the module of the kernel.
        function: the kernel's name there.
        signature: type of each argument.
        constants: value of each compile-time constant, by its place.
        attributes: what is known of arguments, such as divisibility, by their places.
        options: Triton's options, such as num_warps.
    """

    module: str
    function: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel and of its file."""
        return kernel_name(self.module, self.function)


@dataclass(frozen=True)
class Outcome:
    """Outcome of compiling a variant.

    Args:
        name: the variant's name.
        seconds: how long its process took, loading it included.
        compiled: whether it was compiled; False if the cache had it, or another process was faster.
        error: why it cannot be compiled or loaded; empty if it can.
    """

    name: str
    seconds: float
    compiled: bool
    error: str = ""


@contextlib.contextmanager
def recorded() -> Iterator[list[Variant]]:
    """Records the variants that launches within the context need, each once; no kernel runs, so results hold garbage.

    A kernel that this process has launched before is not recorded: it runs.
    """
    found: dict[tuple[str, str, str], Variant] = {}

    def decline(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002 - Triton's name
        module = fn.jit_function.module
        options = json.loads(compile["specialization_data"])["options"]
        (attributes,) = compile["configs"]
        values = compile["signature"], compile["constants"], attributes, options
        found.setdefault((module, fn.name, key), Variant(module, fn.name, *values))
        return True

    variants: list[Variant] = []
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = decline  # pyright: ignore[reportAttributeAccessIssue] - reads a part of them
        yield variants
    variants += found.values()


def compile_variant(variant: Variant, compilations: Compilations, *, load: bool = True) -> Outcome:
    """Compiles a variant for the current device into Triton's cache; with `load`, also builds its launcher."""
    started, before = time.perf_counter(), len(compilations.kernels)
    error = ""
    try:
        kernel: Any = getattr(import_module(variant.module), variant.function)
        settle(kernel)
        _, _, target, _, _ = kernel.create_binder()  # also sets ASTSource, which Triton's and Gluon's kernels differ in
        # The options went through JSON, which has no tuples.
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in variant.options.items()}
        source = kernel.ASTSource(kernel, variant.signature, variant.constants, variant.attributes)
        compiled = triton.compile(source, target=target, options=options)
        if load:
            _ = compiled.run  # the property builds the launcher, and raises if the GPU lacks shared memory
    except Exception as failure:  # from Triton, LLVM, ptxas or the driver; some of these cannot be pickled
        lines = f"{type(failure).__name__}: {failure}".strip().splitlines()
        error = " ".join(dict.fromkeys((lines[0], lines[-1].strip())))[:400]  # the lines between quote the kernel
    return Outcome(variant.name, time.perf_counter() - started, len(compilations.kernels) > before, error)
