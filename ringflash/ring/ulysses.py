"""A ring of groups of ranks: a group exchanges rows for heads before the ring, and heads for rows after the ring.

Before the exchange a rank holds some rows of all heads. After the exchange it holds all rows of the group's shard for
its heads. An exchange sends each rank of the group one message for all tensors of one dtype and headdim.

Shapes: a rank stores (batch, rows, heads, headdim); shard_rows counts the rows of the whole group.
Source: Jacobs et al. 2023, "DeepSpeed Ulysses"; Fang and Zhao 2024, "USP".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from ringflash.ring import schedule
from ringflash.ring.plan import Plan
from ringflash.ring.tiles import KernelRun, sinks_gradient
from ringflash.transport.all_to_all import HeadsTransport
from ringflash.transport.base import Transport

_HeadsOf = Callable[[int], range]  # from a rank of the group to its heads


@dataclass(frozen=True)
class Group:
    """The ranks that split heads with one another, as one of them sees the group.

    Args:
        rank: this rank's index in the group.
        rows: tokens that each rank of the group stores.
        transport: carries messages within the group.
    """

    rank: int
    rows: tuple[int, ...]
    transport: HeadsTransport


@dataclass(frozen=True)
class HeadSplit:
    """Split of heads over `ranks` ranks: each rank has consecutive query heads, and the KV heads that they use.

    A KV head goes to every rank that has one of its query heads. With fewer KV heads than ranks, a rank therefore has
    one KV head, or two if its query heads use both.
    """

    nheads: int
    nheads_kv: int
    ranks: int

    def queries(self, rank: int) -> range:
        """Returns the query heads of `rank`."""
        count = self.nheads // self.ranks
        return range(rank * count, (rank + 1) * count)

    def keys(self, rank: int) -> range:
        """Returns the KV heads of `rank`."""
        group, queries = self.nheads // self.nheads_kv, self.queries(rank)
        return range(queries.start // group, (queries.stop - 1) // group + 1)

    def copies(self, rank: int) -> list[int]:
        """Returns how often `rank` stores each of its KV heads; all once unless its query heads share them unevenly.

        Kernels need the same number of query heads for every KV head.
        """
        group, queries = self.nheads // self.nheads_kv, self.queries(rank)
        edges = [max(queries.start, head * group) for head in self.keys(rank)] + [queries.stop]
        runs = [after - before for before, after in pairwise(edges)]
        return [run // gcd(*runs) for run in runs]

    @property
    def shares_keys(self) -> bool:
        """Returns whether several ranks have the same KV head, so that their gradients are summed."""
        return sum(len(self.keys(rank)) for rank in range(self.ranks)) > self.nheads_kv


@lru_cache
def most_kv_heads(nheads: int, nheads_kv: int, ranks: int) -> int:
    """Returns the largest number of KV heads of a rank; cached, because every call needs it."""
    split = HeadSplit(nheads, nheads_kv, ranks)
    return max(len(split.keys(rank)) for rank in range(ranks))


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport, group: Group | None
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Computes the attention of this rank's rows for all heads, by a plan of any kind.

    Args:
        q: (batch, rows, nheads, headdim).
        k: (batch, rows, nheads_kv, headdim).
        v: (batch, rows, nheads_kv, headdim_v).
        plan: the steps of this rank's ring, over the shards of groups.
        kernel_run: kernels, and the score settings of all heads.
        transport: carries messages between the ranks of the ring.
        group: the ranks that split heads; None for a ring without groups.

    Returns:
        out (batch, rows, nheads, headdim_v) and lse (batch, nheads, rows), as `schedule.forward`.
    """
    if group is None:
        return schedule.forward(q, k, v, plan, kernel_run, transport)
    return _forward_of_heads(q, k, v, plan, kernel_run, transport, group)


def _forward_of_heads(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport, group: Group
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    split, queries, keys, kernel_run = _split(q, k, kernel_run, group)
    q, k, v = yield from _to_heads([q, k, v], [queries, keys, keys], group)
    k, v = (_repeated(x, split.copies(group.rank)) for x in (k, v))
    out, lse = yield from schedule.forward(q, k, v, plan, kernel_run, transport)
    out, lse = yield from _to_rows([out, _as_heads(lse)], [queries, queries], [split.nheads] * 2, group)
    return out, _as_numbers(lse)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    kernel_run: KernelRun,
    transport: Transport,
    group: Group | None,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Computes the gradients of `forward`: dq, dk, dv in the shapes of q, k, v, and dsinks (nheads,).

    dsinks is the share of this rank's rows, and is empty without sinks. If several ranks have the same KV head, each
    sends its share of the gradient, in the state's dtype, to the rank that stores the row. That rank adds the shares in
    rank order and rounds once.
    """
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # the gradient of a sum is one expanded number
    lse = lse.contiguous()  # kernels read lse and delta as one vector a head
    kernels, sinks = kernel_run.kernels, kernel_run.score_config.sinks
    if group is None and sinks is None and len(plan.hops) == 1:
        pending = kernels.delta_of_one_hop(out, dout, dlse)
        grads = yield from schedule.backward_from_delta(dout, q, k, v, lse, pending, plan, kernel_run, transport)
        return *grads, lse.new_empty(0)
    delta = kernels.delta(out, dout, dlse)  # before the exchange, which then sends delta instead of out
    dsinks = sinks_gradient(sinks, lse, delta)
    if group is None:
        grads = yield from schedule.backward_from_delta(dout, q, k, v, lse, delta, plan, kernel_run, transport)
        return *grads, dsinks
    dtype = q.dtype
    split, queries, keys, kernel_run = _split(q, k, kernel_run, group)
    dout, q, k, v, lse, delta = yield from _to_heads(
        [dout, q, k, v, _as_heads(lse), _as_heads(delta)], [queries, queries, keys, keys, queries, queries], group
    )
    copies = split.copies(group.rank)
    k, v = (_repeated(x, copies) for x in (k, v))
    lse, delta = _as_numbers(lse), _as_numbers(delta)
    grads = yield from schedule.backward_from_delta(
        dout, q, k, v, lse, delta, plan, kernel_run, transport, wide_kv=split.shares_keys
    )
    dq, dk, dv = grads[0], *(_summed(x, copies) for x in grads[1:])
    nheads = [split.nheads, split.nheads_kv, split.nheads_kv]
    grads = yield from _to_rows([dq, dk, dv], [queries, keys, keys], nheads, group)
    dq, dk, dv = (x.to(dtype) for x in grads)
    return dq, dk, dv, dsinks


def _split(
    q: Tensor, k: Tensor, kernel_run: KernelRun, group: Group
) -> tuple[HeadSplit, _HeadsOf, _HeadsOf, KernelRun]:
    split = HeadSplit(q.shape[2], k.shape[2], len(group.rows))
    score_config = kernel_run.score_config.of_heads(split.queries(group.rank))
    return split, split.queries, split.keys, replace(kernel_run, score_config=score_config)


def _as_heads(x: Tensor) -> Tensor:
    """Returns one number a row, (batch, heads, rows), as heads of headdim 1: (batch, rows, heads, 1)."""
    return x.transpose(1, 2)[..., None]


def _as_numbers(x: Tensor) -> Tensor:
    """Returns the inverse of `_as_heads`, contiguous."""
    return x[..., 0].transpose(1, 2).contiguous()


def _repeated(x: Tensor, copies: list[int]) -> Tensor:
    """Returns the heads of `x`, head i repeated `copies[i]` times in place."""
    if max(copies) == 1:
        return x
    heads = zip(x.split(1, dim=2), copies, strict=True)
    return torch.cat([head.expand(-1, -1, count, -1) for head, count in heads], dim=2)


def _summed(x: Tensor, copies: list[int]) -> Tensor:
    """Returns the gradient of the input of `_repeated`: the sum over the copies of each head."""
    if max(copies) == 1:
        return x
    return torch.cat([part.sum(2, keepdim=True) for part in x.split(copies, dim=2)], dim=2)


def _messages(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Groups the indices of tensors that share a message: tensors of one dtype and headdim."""
    kinds: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, x in enumerate(tensors):
        kinds.setdefault((x.dtype, x.shape[3]), []).append(index)
    return list(kinds.values())


def _to_heads(
    tensors: Sequence[Tensor], heads_of: Sequence[_HeadsOf], group: Group
) -> Generator[None, None, list[Tensor]]:
    """Exchanges rows for heads: (batch, rows, all heads, headdim) to (batch, shard_rows, this rank's heads, headdim).

    The results are views of one tensor a message. `heads_of` gives for each tensor the heads that a rank of the group
    receives.
    """
    ranks, moving = range(len(group.rows)), []
    for message in _messages(tensors):
        counts = [[len(heads_of[i](rank)) for i in message] for rank in ranks]
        batch, rows, _, headdim = tensors[message[0]].shape
        outgoing = torch.cat(  # heads first, so that the elements for one rank are contiguous
            [_heads(tensors[i], heads_of[i](rank)).permute(2, 0, 1, 3) for rank in ranks for i in message]
        )
        received = [sum(counts[group.rank]) * batch * n * headdim for n in group.rows]
        incoming = outgoing.new_empty(sum(received))
        sent = [sum(count) * batch * rows * headdim for count in counts]
        handle = group.transport.start(outgoing.view(-1), sent, incoming, received)
        moving.append((message, counts[group.rank], (batch, headdim), incoming.split(received), outgoing, handle))
    yield
    result: dict[int, Tensor] = {}
    for message, count, (batch, headdim), parts, _, handle in moving:
        group.transport.finish(handle)
        blocks = [x.view(sum(count), batch, n, headdim) for x, n in zip(parts, group.rows, strict=True)]
        shard = torch.cat([block.permute(1, 2, 0, 3) for block in blocks], dim=1)
        result |= zip(message, shard.split(count, dim=2), strict=True)
    return [result[i] for i in range(len(tensors))]


def _to_rows(
    tensors: Sequence[Tensor], heads_of: Sequence[_HeadsOf], nheads: Sequence[int], group: Group
) -> Generator[None, None, list[Tensor]]:
    """Exchanges heads for rows: (batch, shard_rows, this rank's heads, headdim) to (batch, rows, nheads, headdim).

    This is the inverse of `_to_heads`, and its results are contiguous. A head that several ranks have is summed over
    them.
    """
    ranks, moving = range(len(group.rows)), []
    for message in _messages(tensors):
        counts = [[len(heads_of[i](rank)) for i in message] for rank in ranks]
        batch, _, _, headdim = tensors[message[0]].shape
        # Rows first, so that the elements for one rank are contiguous.
        outgoing = torch.cat([tensors[i].transpose(0, 1) for i in message], dim=2).contiguous()
        own_rows = group.rows[group.rank]
        received = [own_rows * batch * sum(count) * headdim for count in counts]
        incoming = outgoing.new_empty(sum(received))
        sent = [n * batch * sum(counts[group.rank]) * headdim for n in group.rows]
        handle = group.transport.start(outgoing.view(-1), sent, incoming, received)
        moving.append((message, counts, (own_rows, batch, headdim), incoming.split(received), outgoing, handle))
    yield
    result: dict[int, Tensor] = {}
    for message, counts, (own_rows, batch, headdim), parts, _, handle in moving:
        group.transport.finish(handle)
        of_ranks = [
            part.view(own_rows, batch, sum(count), headdim).transpose(0, 1).split(count, dim=2)
            for part, count in zip(parts, counts, strict=True)
        ]
        for place, i in enumerate(message):
            blocks = [blocks[place] for blocks in of_ranks]
            result[i] = _assembled(blocks, [heads_of[i](rank) for rank in ranks], nheads[i])
    return [result[i] for i in range(len(tensors))]


def _heads(x: Tensor, heads: range) -> Tensor:
    return x[:, :, heads.start : heads.stop]


def _assembled(blocks: Sequence[Tensor], heads: Sequence[range], nheads: int) -> Tensor:
    """Joins blocks of heads in rising order to (batch, rows, nheads, headdim); heads of several blocks are added."""
    if sum(map(len, heads)) == nheads:
        return torch.cat(list(blocks), dim=2).contiguous()
    batch, rows, _, headdim = blocks[0].shape
    total = blocks[0].new_zeros(batch, rows, nheads, headdim)
    for block, of in zip(blocks, heads, strict=True):
        _heads(total, of).add_(block)
    return total
