"""Runs a plan whose hops are grouped into one: every rank gets all KV that it sees at once, and computes in one launch.

For sequences so short that a ring's launches and messages take longer than its work, and for masks that show a rank
little of what others have. Each rank sends of its own KV to each other what that one sees, in one batch of messages,
and puts what it has and gets in the order of positions, so that kernels meet one key side. In the backward the same
happens again, and the gradients of all these keys then go to their owners in one more batch; an owner adds to its own
share those of the others in rank order, in the state's dtype, and rounds once.

In memory a row of KV is (batch, nheads_kv, headdim + headdim_v), so that a rank's rows are one message, and what
comes from all ranks is sorted in one launch.
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
    """Rows of KV, or of its gradients, in a vector: this rank's own first, then those of other owners."""

    memory: Tensor
    batch: int
    nheads_kv: int
    headdims: tuple[int, int]
    width: int  # elements of a row

    @staticmethod
    def allocate(channel: int, k: Tensor, v: Tensor, dtype: torch.dtype, most: int, transport: Transport) -> _Rows:
        """Memory of `most` rows, the same number on all ranks, whose messages are of `channel`."""
        batch, _, nheads_kv, headdim = k.shape
        width = batch * nheads_kv * (headdim + v.shape[3])
        memory = transport.allocate((channel, 0), most * width, k, dtype)
        return _Rows(memory, batch, nheads_kv, (headdim, v.shape[3]), width)

    def part(self, first: int, rows: int) -> Tensor:
        """Some rows, as a vector."""
        return self.memory[first * self.width : (first + rows) * self.width]

    def pair(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (batch, rows, nheads_kv, headdim) and values (.., headdim_v) of a vector of whole rows, as views."""
        rows = part.view(-1, self.batch, self.nheads_kv, sum(self.headdims)).transpose(0, 1)
        keys, values = rows.split_with_sizes(self.headdims, dim=3)
        return keys, values

    def seen(self, exchange: Exchange) -> Tensor:
        """The rows that this rank sees, as a vector."""
        first = 0 if exchange.sees_own else exchange.own_rows
        return self.part(first, exchange.rows - first)


@device_tables(maxsize=256)
def _orders(exchange: Exchange, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the rows that a rank computes with: where each position's row is, and its inverse; int64."""
    order = positions(exchange.held, "cpu").argsort()
    return uploaded(order, device), uploaded(order.argsort(), device)


def _exchange_of(plan: Plan) -> Exchange:
    exchange = plan.hops[0].exchange
    assert exchange is not None, "hops are not grouped"
    return exchange


def _gathered(
    k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport
) -> Generator[None, None, tuple[Tensor, Tensor, TileProblem]]:
    """All keys and values that this rank sees, in the order of their positions, and who meets them."""
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
    if rows.width * k.itemsize % 8 == 0:  # the widest word that is copied at a time
        seen = seen.view(torch.int64)
    return *rows.pair(seen.index_select(0, order).view(k.dtype).view(-1)), problem


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel_run: KernelRun, transport: Transport
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """As `ring.forward`, of a plan whose hops are grouped."""
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
    """As `ring.backward_from_delta`, of a plan whose hops are grouped."""
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
    """Sends gradients of all keys that this rank sees to their owners, and returns the sum of its own's shares."""
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
    total = rows.part(0, exchange.own_rows)  # nobody else reads these
    if not exchange.sees_own:
        total.zero_()
    for part, share in zip(exchange.sent, shares, strict=True):
        total[part.first * rows.width : (part.first + part.rows) * rows.width] += share
    return rows.pair(total)
