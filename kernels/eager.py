"""The tile kernels in blocked PyTorch: the same contract on any device, in float64 too, and in O(seqlen) memory.

Shapes: q, out, dout, dq (batch, seqlen_q, nheads, headdim); k, v, dk, dv (batch, seqlen_k, nheads_kv, headdim);
lse, delta (batch, nheads, seqlen_q). A block of q is folded to (batch, nheads_kv, group * rows, headdim), so that every
query head of a group meets its KV head in one matmul and KV is not repeated. Half precisions are computed in float32,
float32 in float64: these kernels are what the others are judged by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.kernels.meeting import Meeting
from ringflash.layout import Chunk
from ringflash.state import LOG2E, AttentionState

BLOCK_Q = 256
BLOCK_K = 1024


@dataclass(frozen=True)
class _Block:
    """Rows `[begin, end)` of storage, the first at global position `position`."""

    begin: int
    end: int
    position: int


def _blocks(chunks: Sequence[Chunk], size: int) -> Iterator[_Block]:
    base = 0
    for chunk in chunks:
        for offset in range(0, chunk.length, size):
            yield _Block(base + offset, base + min(offset + size, chunk.length), chunk.start + offset)
        base += chunk.length


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The next precision, which is also what is computed in: the result's own rounding is all that remains."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _rows(x: Tensor, block: _Block) -> Tensor:
    """Rows of a KV-side tensor: (batch, nheads_kv, rows, headdim) in the dtype computed in."""
    return x[:, block.begin : block.end].transpose(1, 2).to(state_dtype(x.dtype))


def _fold(x: Tensor, block: _Block, nheads_kv: int) -> Tensor:
    """Rows of a query-side tensor: (batch, nheads_kv, group * rows, headdim) in the dtype computed in."""
    batch, _, nheads, headdim = x.shape
    rows = x[:, block.begin : block.end].transpose(1, 2).to(state_dtype(x.dtype))
    return rows.reshape(batch, nheads_kv, nheads // nheads_kv * (block.end - block.begin), headdim)


def _fold_rows(x: Tensor, block: _Block, nheads_kv: int) -> Tensor:
    """A number a row, from (batch, nheads, seqlen_q) to (batch, nheads_kv, group * rows)."""
    return x[:, :, block.begin : block.end].reshape(x.shape[0], nheads_kv, -1)


def _unfold(x: Tensor, block: _Block, nheads: int) -> Tensor:
    """Inverse of `_fold`: (batch, rows, nheads, headdim)."""
    return x.reshape(x.shape[0], nheads, block.end - block.begin, x.shape[-1]).transpose(1, 2)


class _Visibility:
    """What the rows of one block of queries see."""

    def __init__(self, meeting: Meeting, block: _Block, group: int, device: torch.device) -> None:
        rows = torch.arange(block.position, block.position + block.end - block.begin, device=device)
        lo, hi = meeting.mask.bounds(rows, max((chunk.stop for chunk in meeting.k_chunks), default=0))
        lo, hi = torch.broadcast_tensors(lo, hi)
        self._none = not bool((hi > lo).any())
        self._lo_min, self._lo_max = int(lo.min()), int(lo.max())
        self._hi_min, self._hi_max = int(hi.min()), int(hi.max())
        self._lo, self._hi = (x.repeat(1, group)[:, None, :, None] for x in (lo, hi))
        # For each sequence, between which keys any of its rows sees one: what lies outside may hold anything.
        live = hi > lo
        self._first = lo.where(live, hi.max()).amin(1)[:, None, None, None] if lo.shape[0] > 1 else None
        self._last = hi.where(live, 0).amax(1)[:, None, None, None] if lo.shape[0] > 1 else None

    def of(self, keys: _Block) -> _Block | None:
        """The keys of a block that any row may see, None when there are none; the rest is never read."""
        skip = max(self._lo_min - keys.position, 0)
        length = min(keys.end - keys.begin, self._hi_max - keys.position)
        if self._none or length <= skip:
            return None
        return _Block(keys.begin + skip, keys.begin + length, keys.position + skip)

    def rows(self, x: Tensor, keys: _Block) -> Tensor:
        """Rows of a KV-side tensor as `_rows` gives them, zeros where a sequence's rows see none of them."""
        rows = _rows(x, keys)
        if self._first is None or self._last is None:
            return rows
        columns = torch.arange(keys.position, keys.position + keys.end - keys.begin, device=x.device)[:, None]
        return rows.masked_fill((columns < self._first) | (columns >= self._last), 0.0)

    def hide(self, x: Tensor, keys: _Block, value: float) -> Tensor:
        """`x` (batch, nheads_kv, group * rows, keys) with `value` where the key is not seen, in place."""
        stop = keys.position + keys.end - keys.begin
        if self._lo_max <= keys.position and stop <= self._hi_min:
            return x
        columns = torch.arange(keys.position, stop, device=x.device)
        return x.masked_fill_((columns < self._lo) | (columns >= self._hi), value)

    def over(self, chunks: Sequence[Chunk]) -> list[_Block]:
        """Blocks of the keys of `chunks` that any row may see."""
        return [seen for keys in _blocks(chunks, BLOCK_K) if (seen := self.of(keys)) is not None]


def _capped(product: Tensor, meeting: Meeting) -> Tensor:
    """tanh of the scaled product where there is a softcap, in place; else the product as it is."""
    return product.mul_(meeting.before_tanh).tanh_() if meeting.softcap else product


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meeting: Meeting,
    *,
    state: AttentionState | None,
    out: Tensor,
    lse: Tensor,
    first: bool,
    last: bool,
) -> None:
    """One hop: continues the online softmax of `state` over these keys, in place.

    `first` starts from the identity without reading the state; `last` writes `out` and `lse` instead of it.
    With both, no state is needed.
    """
    batch, _, nheads, _ = q.shape
    nheads_kv = k.shape[2]
    group = nheads // nheads_kv
    for queries in _blocks(meeting.q_chunks, BLOCK_Q):
        sees = _Visibility(meeting, queries, group, q.device)
        seen = sees.over(meeting.k_chunks)
        if not (seen or first or last):
            continue  # the state stays as it is
        q_block = _fold(q, queries, nheads_kv)
        if first:
            m = q_block.new_full(q_block.shape[:3], -math.inf)
            row_sum, acc = torch.zeros_like(m), torch.zeros_like(q_block)
        else:
            assert state is not None
            m, row_sum = (_fold_rows(x, queries, nheads_kv).to(q_block.dtype) for x in (state.m, state.l))
            acc = _fold(state.o, queries, nheads_kv).to(q_block.dtype)
        for keys in seen:
            scores = _capped(q_block @ sees.rows(k, keys).transpose(-1, -2), meeting).mul_(meeting.to_base2)
            scores = sees.hide(scores, keys, -math.inf)
            m_new = torch.maximum(m, scores.amax(dim=-1))
            origin = m_new.masked_fill(m_new == -math.inf, 0.0)
            weights = scores.sub_(origin[..., None]).exp2_()
            rescale = torch.exp2(m - origin)
            row_sum = row_sum * rescale + weights.sum(dim=-1)
            acc = acc * rescale[..., None] + weights @ sees.rows(v, keys)
            m = m_new
        rows = slice(queries.begin, queries.end)
        shape = (batch, nheads, queries.end - queries.begin)
        part = AttentionState(m.reshape(shape), row_sum.reshape(shape), _unfold(acc, queries, nheads))
        if last:
            out[:, rows], lse[:, :, rows] = part.finalize(out.dtype)
        else:
            assert state is not None
            state.m[:, :, rows], state.l[:, :, rows], state.o[:, rows] = part.m, part.l, part.o


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse: what the softmax's backward subtracts; (batch, nheads, seqlen_q)."""
    product = torch.einsum("bshd,bshd->bhs", out.double(), dout.double())  # float64: what is left after cancellation
    return (product if dlse is None else product - dlse).to(state_dtype(out.dtype))


@dataclass(frozen=True)
class _Queries:
    """One block of queries as the backward needs it; scores as in the forward, so that they round alike."""

    sees: _Visibility
    q: Tensor
    dout: Tensor
    lse: Tensor  # in base 2; +inf for rows that saw nothing, so that their probabilities come out 0
    delta: Tensor
    meeting: Meeting

    def probabilities_and_gradient(self, keys: _Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """P = 2^(s - lse) and dS = P * (dout v^T - delta) over one block of keys."""
        capped = _capped(self.q @ self.sees.rows(k, keys).transpose(-1, -2), self.meeting)
        p = self.sees.hide(capped * self.meeting.to_base2, keys, -math.inf).sub_(self.lse[..., None]).exp2_()
        ds = (self.dout @ self.sees.rows(v, keys).transpose(-1, -2)).sub_(self.delta[..., None]).mul_(p)
        if self.meeting.softcap:
            ds.mul_(1.0 - capped.square())
        return p, self.sees.hide(ds, keys, 0.0)  # rows that see nothing may hold anything, NaN too


def _queries(
    block: _Block,
    sees: _Visibility,
    q: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    meeting: Meeting,
    nheads_kv: int,
) -> _Queries:
    lse_rows = _fold_rows(lse, block, nheads_kv)
    blind = lse_rows == -math.inf
    return _Queries(
        sees,
        _fold(q, block, nheads_kv).masked_fill(blind[..., None], 0.0),
        _fold(dout, block, nheads_kv).masked_fill(blind[..., None], 0.0),
        (lse_rows.double() * LOG2E).to(state_dtype(q.dtype)).masked_fill(blind, math.inf),
        _fold_rows(delta, block, nheads_kv),
        meeting,
    )


def backward_dq(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    meeting: Meeting,
    *,
    accumulate: bool,
) -> None:
    """dq = softmax_scale * dS k over these keys, added to `dq` when `accumulate`, else written over it."""
    nheads, nheads_kv = q.shape[2], k.shape[2]
    for queries in _blocks(meeting.q_chunks, BLOCK_Q):
        sees = _Visibility(meeting, queries, nheads // nheads_kv, q.device)
        rows = _queries(queries, sees, q, dout, lse, delta, meeting, nheads_kv)
        acc = torch.zeros_like(rows.q)
        for keys in sees.over(meeting.k_chunks):
            _, ds = rows.probabilities_and_gradient(keys, k, v)
            acc += ds @ sees.rows(k, keys)
        update = _unfold(acc * meeting.softmax_scale, queries, nheads)
        target = dq[:, queries.begin : queries.end]
        target.copy_(target + update if accumulate else update)


def backward_dkdv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    meeting: Meeting,
    *,
    accumulate: bool,
) -> None:
    """dk = softmax_scale * dS^T q and dv = P^T dout over these queries, added when `accumulate`, else written."""
    nheads, nheads_kv = q.shape[2], k.shape[2]
    queries_and_masks = [
        (queries, _Visibility(meeting, queries, nheads // nheads_kv, q.device))
        for queries in _blocks(meeting.q_chunks, BLOCK_Q)
    ]
    for block in _blocks(meeting.k_chunks, BLOCK_K):
        shape = (k.shape[0], nheads_kv, block.end - block.begin, k.shape[3])
        dk_acc, dv_acc = (k.new_zeros(shape, dtype=state_dtype(k.dtype)) for _ in range(2))
        for queries, sees in queries_and_masks:
            keys = sees.of(block)
            if keys is None:
                continue
            rows = _queries(queries, sees, q, dout, lse, delta, meeting, nheads_kv)
            p, ds = rows.probabilities_and_gradient(keys, k, v)
            seen = slice(keys.begin - block.begin, keys.end - block.begin)
            dv_acc[:, :, seen] += p.transpose(-1, -2) @ rows.dout
            dk_acc[:, :, seen] += ds.transpose(-1, -2) @ rows.q
        for total, acc in ((dk, dk_acc * meeting.softmax_scale), (dv, dv_acc)):
            target = total[:, block.begin : block.end]
            update = acc.transpose(1, 2)
            target.copy_(target + update if accumulate else update)
