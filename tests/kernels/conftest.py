"""A compiled kernel of Triton's that runs nowhere, for tests of launches on a machine without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringflash.kernels import c_launcher, launch


class Compiled:
    """Stands for Triton's compiled kernel, and keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.function: int | None = 1
        self.packed_metadata = (2,)
        self.metadata = SimpleNamespace(tensordesc_meta=["tiles"])
        self.launches: list[tuple[Any, ...]] = []
        scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
        self.run = SimpleNamespace(**scratch, launch_cooperative_grid=False, launch_pdl=False)


def _shared(compiled: Compiled) -> None:
    """Gives the kernel the C function of Triton 3.7 and later, which takes a signature and the kernel's arguments."""
    compiled.run.kernel_signature, compiled.run.arg_annotations = b"signature", ["annotations"]

    def launch(*given: Any) -> None:
        *rest, annotations, signature, arguments = given
        assert (annotations, signature, rest[5:7], rest[8:]) == (["annotations"], b"signature", [False] * 2, [None] * 5)
        compiled.launches.append((*rest[:5], rest[7], *arguments))

    active: Any = c_launcher.driver.active
    active.utils = SimpleNamespace(launch=launch)


class _Own:
    """A C function of Triton 3.6 for one kernel: to Python, it is no function of Python."""

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self._launches = launches

    def __call__(self, *given: Any) -> None:
        assert (given[5:9], given[10:13]) == ((False, False, None, None), (None, None, None))
        self._launches.append((*given[:5], given[9], *given[13:]))


def _own(compiled: Compiled) -> None:
    """Gives the kernel a C function of its own as in Triton 3.6, for a kernel without descriptors."""
    compiled.run.launch = _Own(compiled.launches)


def _wrapped(compiled: Compiled) -> None:
    """Gives the kernel a C function of its own, within Triton's Python function that expands descriptors."""
    launcher = _Own(compiled.launches)
    compiled.run.launch = lambda *given: launcher(*given)


@pytest.fixture(params=[_shared, _own, _wrapped])
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Compiled:
    """Returns the compiled kernel of `_kernel`, on a machine without a GPU."""
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    streams = set[int]()  # the stream of this driver must not reach the tables of a GPU
    monkeypatch.setattr(launch, "readers", lambda device: streams)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    for module in (launch, c_launcher):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    expand = lambda descriptor, metadata: [(descriptor.base.data_ptr(), metadata), *descriptor.shape]  # noqa: E731
    monkeypatch.setattr(c_launcher, "_expand", lambda: expand)
    made = Compiled()
    request.param(made)
    return made
