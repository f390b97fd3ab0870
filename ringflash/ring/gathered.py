"""The executor of a grouped plan: a rank receives all KV that it sees at once, and computes in one launch.

It serves sequences so short that a ring's launches and messages take longer than its work. It also serves masks under
which a rank sees little of the other ranks' KV. In one batch of messages each rank sends every other rank the rows of
its KV that the other sees. Each rank then sorts its own and the received rows by position, so that kernels get one
tensor of keys. The backward repeats this. It then sends the gradients of all these keys to their owners in one more
batch. An owner adds the other ranks' shares to its own in rank order, in the state's dtype, and rounds once.

In the buffer a row of KV is (batch, nheads_kv, headdim + headdim_v). The rows for one rank are thus one message, and
one launch sorts the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.kernels.contract import TileProblem
from ringflash.kernels.device_tables import device_tables, uploaded
from ringflash.layouts.layout import positions
from ringflash.ring.exchange import Exchange
from ringflash.ring.plan import Plan
from ringflash.ring.schedule import GRADIENT, KV, KernelRun, empty_results
from ringflash.transport.base import Message, Transport


@dataclass(frozen=True)
class _Rows:
    """Buffer of KV rows, or of their gradients: this rank's own rows first, then the rows of other owners."""

    memory: Tensor
    batch: int
    nheads_kv: int
    headdims: tuple[int, int]
    width: int  # elements of a row

    @staticmethod
    def allocate(channel: int, k: Tensor, v: Tensor, dtype: torch.dtype, most: int, transport: Transport) -> _Rows:
        """Allocates a buffer of `most` rows, the same number on all ranks, for messages on `channel`."""
        batch, _, nheads_kv, headdim = k.shape
        width = batch * nheads_kv * (headdim + v.shape[3])
        memory = transport.allocate((channel, 0), most * width, k, dtype)
        return _Rows(memory, batch, nheads_kv, (headdim, v.shape[3]), width)

    def part(self, first: int, rows: int) -> Tensor:
        """Returns `rows` rows from row `first` on, as a vector."""
        return self.memory[first * self.width : (first + rows) * self.width]

    def pair(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys (batch, rows, nheads_kv, headdim) and values (.., headdim_v) as views of a vector of rows."""
        rows = part.view(-1, self.batch, self.nheads_kv, sum(self.headdims)).transpose(0, 1)
        keys, values = rows.split_with_sizes(self.headdims, dim=3)
        return keys, values

    def seen(self, exchange: Exchange) -> Tensor:
        """Returns the rows that this rank computes with, as a vector."""
        first = 0 if exchange.sees_own else exchange.own_rows
        return self.part(first, exchange.rows - first)


@device_tables(maxsize=256)
def _orders(exchange: Exchange, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the permutation from position order to buffer rows of the KV held, and its inverse; int64."""
    order = positions(exchange.held, "cpu").argsort()
    return uploaded(order, device), uploaded(order.argsort(), device)


def _exchange_of(plan: Plan) -> Exchange:
    exchange = plan.hops[0].exchange
    assert exchange is not None, "hops are not grouped"
    return exchange


def _gathered(
    k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport
) -> Generator[None, None, tuple[Tensor, Tensor, TileProblem]]:
    """Exchanges KV, and returns all keys and values that this rank sees by position, and the kernels' problem."""
    exchange = _exchange_of(plan)
    rows = _Rows.allocate(KV, k, v, k.dtype, exchange.most_rows, transport)
    for target, source in zip(rows.pair(rows.part(0, exchange.own_rows)), (k, v), strict=True):
        target.copy_(source)
    messages = [Message(part.rank, rows.part(part.first, part.rows), KV, sends=True, hop=0) for part in exchange.sent]
    for part in exchange.received:
        arriving, mirror = (rows.part(first, part.rows) for first in (part.place, part.first))
        messages.append(Message(part.rank, arriving, KV, sends=False, hop=0, mirror=mirror))
    moving = transport.start(messages)
    problem = kernel_run.problem(plan, plan.hops[0])
    order, _ = _orders(exchange, k.device)
    yield
    transport.finish(moving)
    seen = rows.seen(exchange).view(-1, rows.width)
    if rows.width * k.itemsize % 8 == 0:  # copies move at most 8 bytes at a time
        seen = seen.view(torch.int64)
    return *rows.pair(seen.index_select(0, order).view(k.dtype).view(-1)), problem


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Computes `schedule.forward` for a grouped plan."""
    keys, values, problem = yield from _gathered(k, v, plan, kernel_run, transport)
    out, lse = empty_results(q, v)
    if plan.hops[0].meets:
        kernel_run.kernels.forward(q, keys, values, problem, state=None, out=out, lse=lse, first=True, last=True)
    else:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def backward_from_delta(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    plan: Plan,
    kernel_run: KernelRun,
    transport: Transport,
    wide_kv: bool = False,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """Computes `schedule.backward_from_delta` for a grouped plan."""
    kernels = kernel_run.kernels
    keys, values, problem = yield from _gathered(k, v, plan, kernel_run, transport)
    wide = kernels.state_dtype(q.dtype)
    dk, dv = (x.new_empty(x.shape, dtype=wide) for x in (keys, values))
    inputs = (dout, q, keys, values, lse, delta)
    if not plan.hops[0].meets:
        dq = q.new_zeros(q.shape)
    elif kernel_run.single_pass(q, values, plan, hops=1):
        dq_sum = kernel_run.new_dq(q, hops=1)
        kernels.backward_dkdv(*inputs, dk, dv, problem, accumulate=False, dq=dq_sum)
        dq = dq_sum.finish()
    else:
        dq = q.new_empty(q.shape)
        kernels.backward_dq(*inputs, dq, problem, accumulate=False)
        kernels.backward_dkdv(*inputs, dk, dv, problem, accumulate=False)
    totals = yield from _returned(dk, dv, plan, transport)
    dtype = wide if wide_kv else k.dtype
    dk, dv = (torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format).copy_(x) for x in totals)
    return dq, dk, dv


def _returned(dk: Tensor, dv: Tensor, plan: Plan, transport: Transport) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Sends the gradients of all keys that this rank sees to their owners, and returns the sum for its own keys."""
    exchange = _exchange_of(plan)
    rows = _Rows.allocate(GRADIENT, dk, dv, dk.dtype, exchange.most_rows, transport)
    _, inverse = _orders(exchange, dk.device)
    for target, source in zip(rows.pair(rows.seen(exchange)), (dk, dv), strict=True):
        torch.index_select(source, 1, inverse, out=target)
    messages = [
        Message(part.rank, rows.part(part.place, part.rows), GRADIENT, sends=True, hop=0) for part in exchange.received
    ]
    shares = []
    for part in exchange.sent:
        shares.append(dk.new_empty(part.rows * rows.width))
        mirror = rows.part(part.place, part.rows)
        messages.append(Message(part.rank, shares[-1], GRADIENT, sends=False, hop=0, mirror=mirror))
    moving = transport.start(messages)
    yield
    transport.finish(moving)
    total = rows.part(0, exchange.own_rows)  # no peer reads these rows, so they can be added to in place
    if not exchange.sees_own:
        total.zero_()
    for part, share in zip(exchange.sent, shares, strict=True):
        total[part.first * rows.width : (part.first + part.rows) * rows.width] += share
    return rows.pair(total)
