"""Triton without a GPU: launches compile for a named target and run nothing; ptxas reports each kernel's resources.

The same version of Triton and ptxas, with the same options and environment, always compiles the same IR to the same
code. If a known usage has the same IR, options and environment, the gate takes that usage. Only Triton's front end then
runs, which takes a sixth of the time.
"""

# Triton's base class says that its drivers return None.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import torch
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ringflash.kernels.aot.cases import Case, launch
from ringflash.kernels.aot.sass import disassemble, undefined_uniform_reads
from ringflash.kernels.versions import environment_of_compilations

SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")
REGISTERS = re.compile(r"Used (\d+) registers")
ADVICE = re.compile(r"\((C\d+)\)(.*)")


@dataclass(frozen=True)
class Usage:
    """Resources that one kernel takes on an SM, and the remarks of ptxas.

    Args:
        registers: registers of a thread.
        spills: bytes that a thread stores to and loads from local memory for want of registers.
        shared: bytes of shared memory of a program.
        matmul: "wgmma", "mma", or "" if the kernel uses neither instruction.
        serialised: codes of the warnings that its WGMMAs wait for each other.
        advice: codes of ptxas's other remarks.
        source: digest of the kernel's IR before any pass and of everything else that decides the code, except Triton's
            version.
    """

    registers: int
    spills: int
    shared: int
    matmul: str = ""
    serialised: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    source: str = ""


def parse_ptxas(log: str) -> dict[str, Any]:
    """Reads the registers, spills, serialised and advice of `Usage` from the log of `ptxas -v` for one kernel.

    Raises:
        ValueError: if the log has no registers.
    """
    registers, remarks = REGISTERS.findall(log), ADVICE.findall(log)
    if not registers:
        raise ValueError(f"ptxas tells no registers: {log[:200]!r}")
    serialised = {code for code, text in remarks if "wgmma" in text and "serialized" in text}
    return {
        "registers": max(map(int, registers)),
        "spills": sum(map(int, SPILLS.findall(log))),
        "serialised": tuple(sorted(serialised)),
        "advice": tuple(sorted({code for code, _ in remarks} - serialised)),
    }


class TargetDriver(DriverBase):
    """Driver that answers for an absent GPU what Triton asks before it compiles."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    @classmethod
    def is_active(cls) -> bool:
        """Returns False: Triton must never choose this driver by itself."""
        return False

    def get_current_target(self) -> GPUTarget:
        """Returns the GPU to compile for."""
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Returns the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Returns the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Returns the device of a case's tensors."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        """Raises, because only code that launches needs this."""
        raise NotImplementedError("nothing is launched")

    def get_benchmarker(self) -> NoReturn:
        """Raises, because only autotuning needs this."""
        raise NotImplementedError("nothing is launched")


class _Known(Exception):
    """Ends a compilation with a known result, which this carries; no error."""

    def __init__(self, usage: Usage) -> None:
        super().__init__()
        self.usage = usage


_MODULE = re.compile(r"ringflash\.(?:\w+\.)*")  # module paths in the IR: moving a file must not change digests


def prepare(cache: str, known: Mapping[str, Usage]) -> None:
    """Prepares this process for compilation.

    Args:
        cache: folder for compiled kernels; every kernel is compiled again, because only a compilation writes a log.
        known: usage of kernels that need no compilation, by `Usage.source`.
    """
    assert not knobs.runtime.interpret, "TRITON_INTERPRET=1: nothing would be compiled"
    knobs.cache.dir = cache
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    torch.set_num_threads(1)
    _known.clear()
    _known.update(known)


_known: dict[str, Usage] = {}  # of this process; see `prepare`


def compile_case(case: Case) -> dict[str, Usage] | str:
    """Returns the usage, by name, of every kernel that `case` launches, or the error that ended compilation.

    The name is the case's; if the case launches several kernels, the name of the kernel follows.
    """
    driver.set_active(TargetDriver(case.arch))
    try:
        with _launches_compiled() as compiled:
            launch(case)
    except Exception as error:  # from Triton, LLVM, ptxas or a launcher
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        return " ".join(dict.fromkeys((lines[0], lines[-1].strip())))[:400]  # the lines between quote the kernel
    if not compiled:
        return "it launches no kernel"
    return {case.name + (f" {kernel}" if len(compiled) > 1 else ""): usage for kernel, usage in compiled.items()}


@contextlib.contextmanager
def _launches_compiled() -> Iterator[dict[str, Usage]]:
    """Makes launches of Triton kernels only compile; yields a dict of usages by the kernel's name."""
    compiled: dict[str, Usage] = {}
    run, add_stages = JITFunction.run, CUDABackend.add_stages
    sources: list[str] = []

    def add_stages_after_lookup(
        self: CUDABackend, stages: dict[str, Callable[..., Any]], options: Any, *rest: Any
    ) -> None:
        add_stages(self, stages, options, *rest)
        first = next(iter(stages))
        lower = stages[first]

        def lower_unless_known(module: Any, metadata: dict[str, Any]) -> Any:
            rest = self.hash(), options.hash(), sorted(environment_of_compilations().items())
            text = f"{_MODULE.sub('', module.str_nodebug())}\n{rest}"
            sources.append(hashlib.sha256(text.encode()).hexdigest()[:16])
            if usage := _known.get(sources[-1]):
                raise _Known(usage)
            return lower(module, metadata)

        stages[first] = lower_unless_known

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.device_caches.clear()  # a kernel cached by an earlier case would write no log
        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                kernel: Any = run(self, *args, grid=grid, warmup=True, **kwargs)
            if wrong := undefined_uniform_reads(disassemble(kernel.asm["cubin"])):
                raise RuntimeError(f"ptxas compiled {self.__name__} wrong, it reads unwritten registers: {wrong[0]}")
        except _Known as known:
            usage = known.usage
        else:
            matmul, told = _matmul(kernel.asm["ptx"]), parse_ptxas(log.getvalue())
            usage = Usage(shared=kernel.metadata.shared, matmul=matmul, source=sources[-1], **told)
        name = self.__name__
        assert name not in compiled, f"one case launches {name} twice"
        compiled[name] = usage

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(CUDABackend, "add_stages", add_stages_after_lookup),
    ):
        yield compiled


def _matmul(ptx: str) -> str:
    if "wgmma.mma_async" in ptx:
        return "wgmma"
    return "mma" if "mma.sync" in ptx else ""
