"""Choice of the backend that computes a call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.errors import ArgumentError
from ringflash.kernels.backend import Backend
from ringflash.kernels.contract import Tiling
from ringflash.kernels.eager.backend import EAGER
from ringflash.masks import Documents

if TYPE_CHECKING:
    from ringflash.kernels.replay import Replays

BACKENDS = ("auto", "hopper", "triton", "eager")


def kernels_of(x: Tensor) -> AbstractContextManager[None]:
    """Returns a context for kernels: the device of `x`, without autocast, so that their matmuls keep their dtype."""
    # Asking takes less time than ending an autocast that is not on.
    return _without_autocast(x) if torch.is_autocast_enabled(x.device.type) else torch.cuda.device_of(x)


@contextmanager
def _without_autocast(x: Tensor) -> Generator[None, None, None]:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        yield


def new_replays(backend: Backend, q: Tensor) -> Replays | None:
    """Returns an empty set of recorded calls; None if `backend` makes no launches for tensors like `q`."""
    if not q.is_cuda or backend.name == "eager":
        return None
    from ringflash.kernels.replay import Replays  # here, so that CPU users never import Triton

    return Replays()


def table_makers(
    tilings: Sequence[Tiling], left: int, right: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> list[Callable[[Documents], Sequence[Tensor]]]:
    """Returns for each tiling the function that returns the tables of documents, for backends of Triton."""
    from ringflash.kernels.document_tables import document_tables, table_spec  # as in `new_replays`

    wanted = (table_spec(tiling, left, right, seqlen_q, seqlen_k, device) for tiling in tilings)
    return [partial(document_tables, wanted=each) for each in wanted]


def choose(name: str, q: Tensor) -> Backend:
    """Returns the backend for `q`, always the same instance, because keys of calls and of CUDA graphs hold it.

    "triton" and "eager" are the backends of these names. "hopper" uses the kernels for sm_90, and Triton's for calls
    that those do not support. "auto" uses the first of hopper, triton and eager that device and dtype allow. If
    that is hopper, it leaves backwards of little work to Triton's kernels.

    Raises:
        ArgumentError: if the name is unknown, or the named backend does not support the device or dtype.
    """
    if name not in BACKENDS:
        raise ArgumentError("backend", expected=f"one of {BACKENDS}", got=repr(name), remedy="Choose one of these.")
    if name == "eager" or (name == "auto" and not (q.is_cuda and q.dtype != torch.float64)):
        return EAGER
    return _in_triton(name, q.device, q.dtype)


@lru_cache(maxsize=256)
def _in_triton(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Returns one of the other backends; cached, because the checks give the same result in every call."""
    from ringflash.kernels import fallback
    from ringflash.kernels.triton.backend import TRITON, check_supported  # here, so that CPU users never import Triton

    check_supported(device, dtype)
    missing = None if name == "triton" else fallback.why_not(device)
    if name == "hopper" and missing is not None:
        remedy = 'Choose "auto" or "triton".'
        raise ArgumentError("backend", expected="what the hopper kernels run on", got=missing, remedy=remedy)
    if missing is not None:
        fallback.report_device(missing, fallback.remedy(device))
    if name == "triton" or missing is not None:
        return TRITON
    from ringflash.kernels.hopper.backend import AUTO, HOPPER  # here, because other versions of Triton lack its Gluon

    return HOPPER if name == "hopper" else AUTO
