"""Host side of the Hopper kernels: the tables, sizes and constants of a launch, made once for calls that repeat."""

# Triton's DSL is not Python to a type checker.
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from ringflash.kernels.contract import BackwardArguments, DqSum, ForwardArguments, PendingDelta, TileProblem, Tiling
from ringflash.kernels.hopper.backward import KERNEL as BACKWARD_KERNEL
from ringflash.kernels.hopper.backward import BackwardConstants
from ringflash.kernels.hopper.config import (
    ROWS,
    ForwardConfig,
    adds_in_turns,
    backward_config,
    forward_config,
    head_parts,
)
from ringflash.kernels.hopper.dkdv_store import PART_BYTES, add_head_parts, new_head_parts
from ringflash.kernels.hopper.dq_accumulator import DqAccumulator
from ringflash.kernels.hopper.forward import KERNEL as FORWARD_KERNEL
from ringflash.kernels.hopper.forward import ForwardConstants
from ringflash.kernels.hopper.launch import (
    Sizes,
    constants,
    new_counter,
    rows_view,
    tile_view,
    vector_view,
    work_arguments,
)
from ringflash.kernels.hopper.mask_tables import Intervals, intervals
from ringflash.kernels.hopper.vectors import prepared_vectors, vectors
from ringflash.kernels.launch import Launches, layout
from ringflash.kernels.triton.config import FUSED, processors
from ringflash.masks.base import Packing
from ringflash.state import LOG2E

_OPTIONS = {"num_warps": 4, **FUSED}
_forwards, _backwards = Launches(), Launches()


def tiling(
    problem: TileProblem, headdim: int, device: torch.device, *, alone: bool = True
) -> tuple[ForwardConfig, Intervals]:
    """Chooses the tiling of the forward, and makes its mask tables.

    The tiling depends on the number of processed tiles, which is counted with the tiling for short spans. Tables that
    the GPU has made are of that tiling. `alone` is as in `forward_config`.
    """
    if problem.tiling is not None:
        either = (forward_config(headdim, masked=True, visits=visits) for visits in (0, math.inf))
        config = next(config for config in either if config.consumers * ROWS == problem.tiling.own_block)
        return config, _made_tables(problem, problem.tiling, covers=True)

    def tables(config: ForwardConfig) -> Intervals:
        own = config.consumers * ROWS
        return intervals(problem.mask, problem.q_chunks, problem.k_chunks, own, config.block_n, device, by_keys=False)

    short = forward_config(headdim, masked=True, visits=0)
    known = tables(short)
    config = forward_config(headdim, masked=known.masked, visits=known.visits, alone=alone)
    if config == short:
        return short, known
    longer = tables(config)  # under longer tiles more of them may need a mask
    if forward_config(headdim, masked=longer.masked, visits=known.visits, alone=alone) != config:
        return short, known
    return config, longer


def _made_tables(problem: TileProblem, tiling: Tiling, *, covers: bool) -> Intervals:
    """Returns the tables that the GPU has made."""
    tables, device = list(problem.tables), problem.tables[0].device
    _, _, _, ordered, below, above, skew = tiling
    return Intervals(below, above, 0.0, skew, covers, ordered, host=[], device=device, on_device=tables)


def packed_tilings(q: Tensor, k: Tensor, packing: Packing, *, ordered: bool) -> tuple[Tiling, Tiling]:
    """Returns the tilings of forward and backward under packed documents; see `Backend.packed_tilings`.

    They are those that `tiling` and `backward` choose, up to estimates of the processed tiles.
    """
    (_, seqlen_q, nheads, headdim), (seqlen_k, nheads_kv) = q.shape, k.shape[1:3]
    short, backwards = forward_config(headdim, masked=True, visits=0), backward_config(headdim)
    mean, most = (keys / short.block_n for keys in (packing.mean_keys(seqlen_k), packing.most_keys(seqlen_k)))
    visits, lengths, skew = mean + 1, packing.documents.lengths, 2.0  # tiles cross borders of documents
    if lengths.mean != lengths.longest:
        skew = 2.0 ** round(math.log2((most + 1) / visits))  # few values: few forms
    elif packing.documents.on_gpu is None:  # equal documents, most likely of whole tiles
        skew = max(most / (mean + 0.5), 1.0)
    sees_before, sees_after = packing.left >= seqlen_k, packing.right >= seqlen_k

    def tiled(own_block: int, block: int, *, by_keys: bool, ordered: bool = False) -> Tiling:
        """Returns a tiling, whose rows see whole tiles where all documents begin at borders of tiles."""
        borders = packing.documents.lengths.alignment % math.lcm(own_block, block)
        rest = seqlen_k % block + by_keys * (seqlen_k % own_block)
        of_whole = seqlen_q == seqlen_k and borders == rest == 0
        first, last = (sees_after, sees_before) if by_keys else (sees_before, sees_after)
        return Tiling(own_block, block, by_keys, ordered, not (of_whole and first), not (of_whole and last), skew)

    def forwards(config: ForwardConfig) -> Tiling:
        return tiled(config.consumers * ROWS, config.block_n, by_keys=False)

    forward = forwards(short)
    if not (forward.below or forward.above):
        forward = forwards(forward_config(headdim, masked=False, visits=visits))
    if forward.below or forward.above:
        forward = forwards(forward_config(headdim, masked=True, visits=visits))
    ordered = ordered or adds_in_turns(max(seqlen_q, seqlen_k), nheads, nheads_kv, headdim)
    return forward, tiled(backwards.keys, backwards.block_m, by_keys=True, ordered=ordered)


def _tensors(given: ForwardArguments) -> tuple[Tensor, ...]:
    q, k, v, _, state, out, lse, *_ = given
    return (q, k, v, out, lse) if state is None else (q, k, v, out, lse, state.m, state.l, state.o)


def repeat_forward(given: ForwardArguments) -> bool:
    """Repeats an earlier `forward` of the same problem and layouts; returns whether there was one."""
    q, k, v, problem, state, _, _, first, last = given
    launch = _forwards.find(problem.launch_key(first, last, state is None, *layout(q, k, v)))
    if launch is None:
        return False
    return launch((*_tensors(given), new_counter(launch.grid[0], q.device).following, *problem.tables))


def forward(given: ForwardArguments) -> None:
    """Launches the forward of one hop; see `Backend.forward`."""
    q, k, v, problem, state, out, lse, first, last = given
    batch, seqlen_q, nheads, headdim = q.shape
    config, known = tiling(problem, headdim, q.device, alone=first and last)
    group = nheads // k.shape[2]  # query heads that stream the same keys and values
    streamed = 2 * k.shape[1] * headdim * k.itemsize // group
    waves = 1.5 * known.skew  # with `skew` waves alone, the longest tiles of the last heads begin too late
    tables, _, sizes, programs = work_arguments(known, batch, nheads, streamed, waves, q.device)
    tensors = _tensors(given)
    m, l, o = tensors[5:] or (lse, lse, out)  # noqa: E741 - not accessed then
    kind = ForwardConstants(
        FIRST=first,
        LAST=last,
        MASKED=known.masked,
        LOOPS=1 + known.masked,
        BELOW=known.below,
        ABOVE=known.above,
        GROUP=group,
        BLOCK_D=config.block_d,
        WIDTHS=config.widths,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        CONSUMERS=config.consumers,
        REGISTERS=config.registers,
        OUT_IN_Q=config.out_in_q,
        TURNS=config.turns,
        OVERLAPS=config.overlaps,
        # With both bounds, registers do not suffice.
        PASS_OVER=(config.turns or config.consumers > 2) and known.above and not known.below,
        ROWS=ROWS,
    )
    layouts, changing, grid = layout(q, k, v), (*tensors, tables.counter, *problem.tables), (programs,)
    to_base2, kept = problem.score_config.to_base2, () if problem.tiling is not None else tables[:3]
    key = problem.launch_key(first, last, state is None, *layouts)
    family = kind, to_base2, state is None, len(kept), *layouts
    if _forwards.bind(key, family, grid, changing, kept, sizes):
        return
    arguments = (
        tile_view(q, ROWS, config.block_d),
        *(tile_view(x, config.block_n, config.block_d) for x in (k, v)),
        *(tile_view(x, ROWS, config.block_d) for x in (out, o)),
        m, l, lse, seqlen_q, to_base2, tables, *sizes, constants(kind),
    )  # fmt: skip
    numbers = _places_of_sizes(arguments)
    _forwards.first(key, FORWARD_KERNEL, grid, arguments, _OPTIONS, changing, kept, numbers, family=family)


def _places_of_sizes(arguments: tuple[object, ...]) -> range:
    """Returns the places of `Sizes` in the arguments of a kernel, before the last one."""
    return range(len(arguments) - 1 - len(Sizes._fields), len(arguments) - 1)


def _adds_in_turns(inputs: BackwardArguments, dq: DqAccumulator) -> bool:
    """Returns whether tiles are added to dq in the order of their keys."""
    if inputs.problem.tiling is not None:
        return inputs.problem.tiling.ordered
    (_, seqlen_q, nheads, headdim), (seqlen_k, nheads_kv) = inputs.q.shape, inputs.k.shape[1:3]
    return dq.ordered or (dq.hops == 1 and adds_in_turns(max(seqlen_q, seqlen_k), nheads, nheads_kv, headdim))


def _dq_tiles(inputs: BackwardArguments, dq: DqAccumulator) -> Tensor:
    """Returns the sum of dq; with a pending delta it is not cleared yet."""
    in_turns, is_cleared = _adds_in_turns(inputs, dq), not isinstance(inputs.delta, PendingDelta)
    return dq.tiles(inputs.problem.score_config.softmax_scale, in_turns=in_turns, is_cleared=is_cleared)


def _of_rows(
    inputs: BackwardArguments, factor: float, lost: Tensor, total: Tensor, dq: DqAccumulator
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `vectors` of a hop; with a pending delta the same launch computes delta and clears the sum of dq."""
    dout, _, _, _, lse, delta, problem = inputs
    if isinstance(delta, PendingDelta):
        return prepared_vectors(dout, lse, delta, factor, lost, total, dq.counters)
    return vectors(lse, delta, factor, lost, problem.cache)


def _backward_key(inputs: BackwardArguments, dk: Tensor, dv: Tensor, accumulate: bool, dq: DqAccumulator) -> Hashable:
    in_turns, layouts = _adds_in_turns(inputs, dq), layout(*inputs[:4], dk, dv)
    return inputs.problem.launch_key(accumulate, dq.hops > 1, in_turns, dk.dtype, dv.dtype, *layouts)


def repeat_backward(inputs: BackwardArguments, dk: Tensor, dv: Tensor, *, accumulate: bool, dq: DqSum) -> bool:
    """Repeats an earlier `backward` of the same problem and layouts; returns whether there was one."""
    assert isinstance(dq, DqAccumulator)
    launch = _backwards.find(_backward_key(inputs, dk, dv, accumulate, dq))
    if launch is None:
        return False
    factor, parts = launch.note
    total = _dq_tiles(inputs, dq)
    counter = new_counter(launch.grid[0] if dq.counters is None else 0, inputs.q.device)
    of_rows = _of_rows(inputs, factor, counter.lost, total, dq)
    semaphores = () if dq.counters is None else (dq.counters,)
    targets = new_head_parts(dk, dv, parts)
    if not launch((*inputs[:4], *targets, *of_rows, total, counter.following, *semaphores, *inputs.problem.tables)):
        return False
    if parts > 1:
        add_head_parts(*targets, dk, dv)
    return True


def backward(inputs: BackwardArguments, dk: Tensor, dv: Tensor, *, accumulate: bool, dq: DqSum) -> None:
    """Launches the backward of one hop; see `Backend.backward_dkdv`."""
    assert isinstance(dq, DqAccumulator)
    dout, q, k, v, *_, problem = inputs
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, nheads_kv = k.shape[1:3]
    config = backward_config(headdim)
    total = _dq_tiles(inputs, dq)
    ordered = dq.counters is not None  # `in_turns` or deterministic: `tiles` made counters
    if problem.tiling is not None:
        known = _made_tables(problem, problem.tiling, covers=seqlen_q == seqlen_k)
    else:
        q_chunks, k_chunks, blocks = problem.q_chunks, problem.k_chunks, (config.keys, config.block_m)
        known = intervals(problem.mask, q_chunks, k_chunks, *blocks, q.device, by_keys=True, ordered=ordered)
    parts = 1
    if dq.hops == 1 and not accumulate and dk.is_contiguous() and dv.is_contiguous():
        ntiles = known.order.numel() * batch * nheads_kv
        parts = head_parts(nheads // nheads_kv, ntiles, known.skew, processors(q.device))
    heads, group = nheads_kv * parts, nheads // nheads_kv // parts
    streamed = 2 * seqlen_q * headdim * q.itemsize * group  # bytes of q and dout for one of these heads
    waves = min(known.skew, 2.0)  # with more heads mixed, their inputs and dq no longer fit in L2
    tables, lost, sizes, programs = work_arguments(known, batch, heads, streamed, waves, q.device, in_order=ordered)
    preloaded = config.preloaded_masked if known.masked else config.preloaded
    factor = -1.0 / problem.score_config.softmax_scale if preloaded else -LOG2E
    minus_lse, minus_delta, lost = _of_rows(inputs, factor, lost, total, dq)
    kind = BackwardConstants(
        MASKED=known.masked,
        BELOW=known.below,
        ABOVE=known.above,
        CHECKED=known.masked and (dq.hops > 1 or not known.covers),
        ORDERED=ordered,
        DESCENDING=ordered or config.descending,
        BY_HEADS=ordered and group > 1 and known.shifted,
        ACCUMULATE=accumulate,
        GROUP=group,
        HEAD_PARTS=parts,
        PRELOADED=preloaded,
        BLOCK_D=config.block_d,
        WIDTHS=config.widths,
        BLOCK_M=config.block_m,
        DOUT_STAGES=config.dout_stages,
        DS_STAGES=config.ds_stages,
        BY_GRADIENT=config.by_gradient,
        KEY_PARTS=config.keys // ROWS,
        PIECES=config.pieces,
        ROWS=ROWS,
    )
    key, grid = _backward_key(inputs, dk, dv, accumulate, dq), (programs,)
    semaphores = () if dq.counters is None else (dq.counters,)
    targets = new_head_parts(dk, dv, parts)
    changing = (dout, q, k, v, *targets, minus_lse, minus_delta, lost, total, tables.counter, *semaphores)
    changing = (*changing, *problem.tables)
    kept, scales = (
        () if problem.tiling is not None else (*tables[:3], known.turns),
        (problem.score_config.to_base2, problem.score_config.softmax_scale),
    )
    family = kind, scales, len(kept), dk.dtype, dv.dtype, known.turns_stride, *layout(dout, q, k, v, dk, dv)
    if not _backwards.bind(key, family, grid, changing, kept, sizes, note=(factor, parts)):
        arguments = (
            *(tile_view(x, config.block_m, config.block_d) for x in (q, dout)),
            *(tile_view(x, ROWS, config.block_d) for x in (k, v)),
            *(vector_view(x, config.block_m) for x in (minus_lse, minus_delta)), lost,
            rows_view(total, *config.dq_box), *(tile_view(x, ROWS, PART_BYTES // x.itemsize) for x in targets),
            dq.counters, known.turns, known.turns_stride, minus_lse.shape[2], seqlen_k, *scales,
            tables, *sizes, constants(kind),
        )  # fmt: skip
        places, note = _places_of_sizes(arguments), (factor, parts)
        _backwards.first(key, BACKWARD_KERNEL, grid, arguments, _OPTIONS, changing, kept, places, note, family)
    if parts > 1:
        add_head_parts(*targets, dk, dv)
