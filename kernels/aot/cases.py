"""Kernels that are compiled ahead of time, each by a call of its launcher.

A case calls the same launcher as attention does, with small tensors of the right dtypes and strides. The arguments, and
the specializations that Triton derives from their values, therefore equal those on a GPU. To add a case, add a line to
`_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ringflash.kernels.contract import (
    BackwardArguments,
    DqSum,
    ForwardArguments,
    PendingDelta,
    ScoreConfig,
    TileProblem,
    Tiling,
)
from ringflash.kernels.decode_step import Step, sight_of
from ringflash.kernels.triton.backend import TRITON
from ringflash.kernels.triton.config import LONG_KEYS, fuses_dq
from ringflash.layouts.layout import Chunk
from ringflash.masks import BlockSparse, Causal, Documents, Full, Mask, SlidingWindow, Tree
from ringflash.state import AttentionState, lse_dtype

BATCH, SEQLEN, NHEADS, NHEADS_KV = 2, 256, 8, 2
LONG_SEQLEN = LONG_KEYS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "table": Causal() & SlidingWindow(64, 64),
    "window": Causal() & SlidingWindow(LONG_SEQLEN // 2, 0),
    "packed": Causal() & Documents([0, SEQLEN // 2 + 72, SEQLEN]),  # bounds on both sides, like a window, but no window
    "band": SlidingWindow(SEQLEN - 56, SEQLEN - 56),  # a window for tiles of 128; "table" is one for tiles of 64
    "documents": Causal() & Documents([0, SEQLEN // 2, SEQLEN]),  # of whole tiles: the causal rule within spans
    "listed": Causal() & BlockSparse(torch.ones(2, 2, dtype=torch.bool), 128),
    "tree": Tree([-1, 0, 0, 1, 1, 2, 2, 3]),
}

# Changes of the score config in each mode. Some modes change other things:
# "carried" is a ring's hop between others: two chunks, a state in and out, and gradients that are added to.
# "first", "middle" and "last" are the forwards of a ring's hops. Modes with "long" have LONG_SEQLEN rows.
# "parts" cuts the query heads of a KV head in parts.
# "mha" has equal numbers of query and KV heads. "dlse" has a gradient of lse. "split" cuts the keys of a decoding step.
# "ordered" adds dq in the order of keys, with counters.
# "ragged" has a length that is no multiple of a tile, so loads check bounds.
OTHERS = (
    *("alone", "carried", "first", "middle", "last", "long", "long first", "long middle", "long last"),
    *("mha", "dlse", "split", "ordered", "ragged", "parts"),
)
MODES: dict[str, dict[str, Any]] = {name: {} for name in OTHERS} | {
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi_slopes": torch.ones(1, NHEADS)},
    "sinks": {"sinks": torch.zeros(NHEADS)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 7},
}


@dataclass(frozen=True)
class Case:
    """One call of a launcher.

    Args:
        kernel: a key of `LAUNCHES`.
        dtype: dtype of q, k and v, a key of `DTYPES`.
        headdim: width of q and k.
        mask: a key of `MASKS`.
        mode: a key of `MODES`.
        headdim_v: width of v; None means headdim.
        arch: compute capability to compile for, 90 for sm_90.
    """

    kernel: str
    dtype: str
    headdim: int
    mask: str
    mode: str = "alone"
    headdim_v: int | None = None
    arch: int = 90

    @property
    def name(self) -> str:
        """Name of the case in the record."""
        headdim = f"d{self.headdim}" + (f"/{self.headdim_v}" if self.headdim_v else "")
        return f"sm_{self.arch} {self.kernel} {self.dtype} {headdim} {self.mask} {self.mode}"


TILE_KERNELS = ("forward", "dq", "dkdv", "single_pass")
HOPPER_BACKWARDS = ("hopper_backward", "hopper_ordered")


def cases() -> list[Case]:
    """Returns every case, the slowest to compile first."""
    shipped = [case for case in _cases() if case.kernel != "single_pass" or _has_single_pass(case)]
    return sorted(dict.fromkeys(shipped), key=lambda case: (case.dtype != "float32", -case.headdim))


def _has_single_pass(case: Case) -> bool:
    return fuses_dq(case.headdim, case.headdim_v or case.headdim, listed=MASKS[case.mask].bitmap() is not None)


def _cases() -> Iterator[Case]:
    for kernel, headdim, mask, arch in product(TILE_KERNELS, (64, 128, 256), ("full", "causal", "table"), (90, 80)):
        yield Case(kernel, "bfloat16", headdim, mask, arch=arch)
    for kernel, headdim in product(TILE_KERNELS, (64, 128, 256)):
        yield Case(kernel, "bfloat16", headdim, "listed")
        yield Case(kernel, "bfloat16", headdim, "causal", "carried")
        yield Case(kernel, "bfloat16", headdim, "full", "carried")
        yield Case(kernel, "float16", headdim, "table")
        yield Case(kernel, "float32", headdim, "table")
    for kernel in TILE_KERNELS:
        yield Case(kernel, "bfloat16", 96, "causal")  # tiles of 128 columns, loads masked past 96
        yield Case(kernel, "bfloat16", 192, "causal", headdim_v=128)
        yield Case(kernel, "bfloat16", 128, "causal", "carried", arch=80)
        yield Case(kernel, "float32", 128, "causal", "carried")
        for headdim, mask in product((64, 128), ("causal", "table")):
            yield Case(kernel, "bfloat16", headdim, mask, "ragged")
        for mode in ("softcap", "alibi", "dropout"):
            yield Case(kernel, "bfloat16", 128, "causal", mode)
    for kernel in ("forward", "dkdv"):
        yield Case(kernel, "bfloat16", 64, "documents")
    for dtype in ("float16", "float32"):
        yield Case("single_pass", dtype, 64, "listed")
    for kernel in ("dkdv", "single_pass"):
        yield Case(kernel, "float32", 64, "listed", "dropout")
    yield Case("single_pass", "bfloat16", 64, "listed", "ragged")
    yield Case("single_pass", "bfloat16", 64, "listed", arch=80)
    yield Case("forward", "bfloat16", 128, "causal", "sinks")
    for mask in ("full", "causal"):
        yield Case("forward", "bfloat16", 128, mask, "long")
        yield Case("forward", "bfloat16", 128, mask, "long middle")
    for dtype, headdim in product(DTYPES, (64, 128, 256)):
        yield Case("delta", dtype, headdim, "full")
    yield Case("delta", "bfloat16", 128, "full", "dlse")
    yield Case("delta", "bfloat16", 128, "full", arch=80)
    for dtype, headdim in product(DTYPES, (64, 128, 256)):
        yield Case("decode", dtype, headdim, "full", "split")
    for mask in ("full", "causal", "tree"):
        yield Case("decode", "bfloat16", 128, mask)
    for mode in ("softcap", "alibi", "sinks"):
        yield Case("decode", "bfloat16", 128, "causal", mode)
    yield Case("decode", "bfloat16", 192, "causal", headdim_v=128)
    yield Case("decode", "bfloat16", 128, "full", "split", arch=80)
    yield from _hopper_cases()


def _hopper_cases() -> Iterator[Case]:
    for headdim, mask in product((64, 96, 128, 256), ("full", "causal", "table")):
        yield Case("hopper_forward", "bfloat16", headdim, mask)
    for headdim, mask, mode in product((64, 96, 128), ("full", "causal", "table"), ("first", "middle", "last")):
        yield Case("hopper_forward", "bfloat16", headdim, mask, mode)
    yield Case("hopper_forward", "float16", 128, "causal")
    for mode in ("long", "long first", "long middle", "long last"):  # tile sizes for many tiles of keys
        yield Case("hopper_forward", "bfloat16", 64, "causal", mode)
    for mode in ("long", "long middle"):
        yield Case("hopper_forward", "bfloat16", 64, "window", mode)
    for mask in ("full", "causal", "window"):
        yield Case("hopper_forward", "bfloat16", 96, mask, "long")
    for headdim, mode in product((64, 96, 128, 256), ("alone", "dlse", "ordered")):
        yield Case("hopper_prepare", "bfloat16", headdim, "full", mode)
    for mode in ("alone", "ordered"):
        yield Case("documents", "bfloat16", 128, "packed", mode)
    for kernel in HOPPER_BACKWARDS:
        for headdim, mask in product((64, 96, 128, 256), ("full", "causal", "table")):
            yield Case(kernel, "bfloat16", headdim, mask)
        for headdim, mode in product((64, 96, 128, 256), ("mha", "carried")):
            yield Case(kernel, "bfloat16", headdim, "causal", mode)
        yield Case(kernel, "bfloat16", 128, "packed")
        yield Case(kernel, "bfloat16", 64, "band")
        yield Case(kernel, "float16", 128, "causal")
    yield Case("hopper_ordered", "bfloat16", 64, "causal", "parts")


def launch(case: Case) -> None:
    """Calls the launcher of the case's kernel."""
    LAUNCHES[case.kernel](_Inputs(case))


class _Inputs:
    """Arguments of one case's launcher."""

    def __init__(self, case: Case) -> None:
        self.mask, self.mode = MASKS[case.mask], case.mode
        self.carried = case.mode == "carried"
        self.role = next((role for role in ("first", "middle", "last") if role in case.mode), "alone")
        self.seqlen = LONG_SEQLEN if "long" in case.mode else SEQLEN
        in_ring = self.carried or self.role != "alone"
        self.nheads_kv = NHEADS if case.mode == "mha" else NHEADS_KV
        self._dtype = DTYPES[case.dtype]
        self._headdim, self._headdim_v = case.headdim, case.headdim_v or case.headdim
        self.q, self.k, self.v = self.keys(NHEADS), self.keys(self.nheads_kv), self.values(self.nheads_kv)
        self.score_config = ScoreConfig(**{"softmax_scale": case.headdim**-0.5} | MODES[case.mode])
        whole = (Chunk(0, self.seqlen - 3 if case.mode == "ragged" else self.seqlen),)
        halves = Chunk(0, self.seqlen // 2), Chunk(3 * self.seqlen // 2, self.seqlen // 2)
        chunks = halves if in_ring else whole  # a ring's layout is zigzag
        self.problem = TileProblem(chunks, chunks, self.mask, self.score_config)

    def keys(self, nheads: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(BATCH, self.seqlen, nheads, self._headdim, dtype=dtype or self._dtype)

    def values(self, nheads: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(BATCH, self.seqlen, nheads, self._headdim_v, dtype=dtype or self._dtype)

    def rows(self) -> Tensor:
        return torch.empty(BATCH, NHEADS, self.seqlen)

    @property
    def lse(self) -> Tensor:
        return self.rows().to(lse_dtype(self._dtype))

    @property
    def state(self) -> AttentionState:
        return AttentionState(self.rows(), self.rows(), self.values(NHEADS, torch.float32))

    @property
    def gradients(self) -> torch.dtype | None:
        """Dtype of gradients: float32 if they pass from hop to hop, else None, because the kernel rounds them."""
        return torch.float32 if self.carried else None

    @property
    def of_backward(self) -> BackwardArguments:
        return BackwardArguments(self.values(NHEADS), self.q, self.k, self.v, self.lse, self.rows(), self.problem)

    def of_forward(self, *, first: bool, last: bool) -> ForwardArguments:
        state = None if first and last else self.state
        return ForwardArguments(self.q, self.k, self.v, self.problem, state, self.values(NHEADS), self.lse, first, last)


def _forward(x: _Inputs) -> None:
    in_ring = x.carried or x.role == "middle"
    TRITON.forward(x.of_forward(first=not in_ring, last=not in_ring))


def _dq(x: _Inputs) -> None:
    TRITON.backward_dq(x.of_backward, x.keys(NHEADS, x.gradients), accumulate=x.carried)


def _dkdv(x: _Inputs, dq: DqSum | None = None) -> None:
    dk, dv = x.keys(x.nheads_kv, x.gradients), x.values(x.nheads_kv, x.gradients)
    TRITON.backward_dkdv(x.of_backward, dk, dv, accumulate=x.carried, dq=dq)


def _single_pass(x: _Inputs) -> None:
    _dkdv(x, dq=TRITON.new_dq(x.q, hops=1, deterministic=False))


def _delta(x: _Inputs) -> None:
    out = x.values(NHEADS)
    TRITON.delta(out, out, x.rows() if x.mode == "dlse" else None)


def _decode(x: _Inputs) -> None:
    seqlen_q = 1 if isinstance(x.mask, Full) else 8
    lengths = torch.full((BATCH,), SEQLEN, dtype=torch.int32)
    step = Step(x.score_config, sight_of(x.mask, seqlen_q, SEQLEN), splits=4 if x.mode == "split" else 1)
    TRITON.decode(x.q[:, :seqlen_q].contiguous(), x.k, x.v, lengths, step)


def _hopper_forward(x: _Inputs) -> None:
    from ringflash.kernels.hopper.calls import forward  # imported here, because the other cases do not need Gluon

    forward(x.of_forward(first=x.role in ("alone", "first"), last=x.role in ("alone", "last")))


def _hopper_backward(x: _Inputs, *, ordered: bool = False) -> None:
    from ringflash.kernels.hopper import calls
    from ringflash.kernels.hopper.dq_accumulator import DqAccumulator

    cut = x.mode == "parts"
    # With two hops dq is added in order only if `ordered`, however short they are.
    total = DqAccumulator(x.q, hops=1 if cut else 2, ordered=ordered)
    dk, dv = x.keys(x.nheads_kv, x.gradients), x.values(x.nheads_kv, x.gradients)
    with mock.patch.object(calls, "head_parts", return_value=2) if cut else nullcontext():  # as on a large GPU
        calls.backward(x.of_backward, dk, dv, accumulate=x.carried, dq=total)
    total.finish()


def _hopper_prepare(x: _Inputs) -> None:
    from ringflash.kernels.hopper.dq_accumulator import DqAccumulator
    from ringflash.kernels.hopper.vectors import prepared_vectors

    out, in_turns = x.values(NHEADS), x.mode == "ordered"
    delta = PendingDelta(out, x.rows() if x.mode == "dlse" else None)
    dq = DqAccumulator(x.q, hops=1, ordered=in_turns)
    total = dq.tiles(1.0, in_turns=in_turns, is_cleared=False)
    prepared_vectors(out, x.lse, delta, -1.0, torch.zeros(4, dtype=torch.int32)[1:], total, dq.counters)


def _documents(x: _Inputs) -> None:
    from ringflash.kernels.document_tables import document_tables, rising_ends, table_spec

    assert x.mask.packing is not None
    (ends,) = x.mask.packing.documents.spec[1]
    rising_ends(ends[None], x.seqlen)
    ordered = x.mode == "ordered"
    tiling = Tiling(128, 64, by_keys=ordered, ordered=ordered)
    left, right, documents = x.mask.packing
    document_tables(documents, table_spec(tiling, left, right, x.seqlen, x.seqlen, ends.device))


LAUNCHES: dict[str, Callable[[_Inputs], None]] = {
    "forward": _forward,
    "dq": _dq,
    "dkdv": _dkdv,
    "single_pass": _single_pass,
    "delta": _delta,
    "decode": _decode,
    "hopper_forward": _hopper_forward,
    "hopper_backward": _hopper_backward,
    "hopper_ordered": partial(_hopper_backward, ordered=True),
    "hopper_prepare": _hopper_prepare,
    "documents": _documents,
}
