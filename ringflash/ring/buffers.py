"""Buffers of KV, and of its gradients, by the slot numbers of a plan: in a ring, and in a grouped plan.

In a ring's buffer keys come first and values follow, so that kernels read both as they arrived. In the buffer of a
grouped plan a row is (batch, nheads_kv, headdim + headdim_v). The rows for one rank are thus one message, and one
launch sorts the rows of all ranks by position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.kernels.device_tables import add_reader, device_tables, uploaded
from ringflash.layouts.layout import positions
from ringflash.ring.plan import Hop, Kind, Plan
from ringflash.transport.base import Slot, Span, Transport

_VIEWS = 64  # views that are kept of a slot
Pair = tuple[Tensor, Tensor]  # keys (batch, rows, nheads_kv, headdim) and values (.., headdim_v), or their gradients


class _Buffers:
    """Slots of one rank.

    Args:
        own: keys and values of this rank.
        dtype: dtype of the buffers.
        kind: KV, or GRADIENT for dK and dV.
        plan: the plan of this rank.
        transport: allocates the slots that all ranks have.
    """

    def __init__(self, own: Pair, dtype: torch.dtype, kind: Kind, plan: Plan, transport: Transport) -> None:
        self._own, self._dtype, self._kind, self._plan, self._transport = own, dtype, kind, plan, transport
        self._shared = plan.kv_slots if kind is Kind.KV else plan.gradient_slots
        keys, values = own
        self._widths = (
            keys.shape[0] * keys.shape[2] * keys.shape[3],
            values.shape[0] * values.shape[2] * values.shape[3],
        )
        self._width = sum(self._widths)  # elements of a row
        self._shapes = keys.shape, values.shape  # memory that is kept serves calls of any shapes
        self._slots: dict[int, Slot] = {}

    def _allocate(self, slot: int, rows: int) -> Slot:
        """Allocates a slot: memory that peers may read if all ranks have the slot, otherwise ordinary memory."""
        like, numel = self._own[0], rows * self._width
        if slot < self._shared:
            return self._transport.allocate((int(self._kind), slot), numel, like, self._dtype)
        return Slot(like.new_empty(numel, dtype=self._dtype), {})

    def _slot(self, slot: int, rows: int) -> Slot:
        """Returns a slot; in a grouped plan one that this rank alone has is allocated with `rows` rows."""
        found = self._slots.get(slot)
        if found is None:
            few = self._plan.grouped and slot >= self._shared
            found = self._slots[slot] = self._allocate(slot, rows if few else self._plan.slot_rows)
        return found

    def _views(self, slot: int, rows: range) -> Pair:
        """Returns keys and values in `rows` of a slot."""
        found = self._slots.get(slot) or self._slot(slot, len(rows))
        key = rows, self._shapes, self._plan.grouped  # a ring and a grouped plan divide shared memory differently
        pair = found.views.get(key)
        if pair is None:
            if len(found.views) == _VIEWS:
                found.views.clear()
            with torch.inference_mode(False):  # else only inference mode could write to it
                pair = found.views[key] = self._pair(rows, found.memory)
        return pair

    def _pair(self, rows: range, memory: Tensor) -> Pair:
        """Returns keys (batch, rows, nheads_kv, headdim) and values (.., headdim_v) as views of a slot's memory."""
        raise NotImplementedError

    def message(self, slot: int, rows: range) -> Span:
        """Returns `rows` of a slot."""
        memory = (self._slots.get(slot) or self._slot(slot, len(rows))).memory
        return Span(memory, rows.start * self._width, len(rows) * self._width)

    def load(self, slot: int) -> None:
        """Copies this rank's keys and values to a slot."""
        for target, source in zip(self._own_rows(slot), self._own, strict=True):
            target.copy_(source)

    def _own_rows(self, slot: int) -> Pair:
        return self._views(slot, range(self._own[0].shape[1]))

    def free(self, slot: int) -> None:
        """Frees a slot that no later step uses."""
        del self._slots[slot]

    def scratch(self, hop: Hop) -> Pair:
        """Returns new memory for this rank's share of dK and dV at `hop`."""
        dk, dv = (x.new_empty((x.shape[0], len(hop.rows), *x.shape[2:]), dtype=self._dtype) for x in self._own)
        return dk, dv


class RingBuffers(_Buffers):
    """Buffers of a ring, with whose tensors kernels compute in place."""

    def __init__(self, own: Pair, dtype: torch.dtype, kind: Kind, plan: Plan, transport: Transport) -> None:
        super().__init__(own, dtype, kind, plan, transport)
        self._own_gradient: Pair | None = None
        for slot in range(self._shared):  # all ranks allocate what they share in the same order
            self._slot(slot, plan.slot_rows)

    def _pair(self, rows: range, memory: Tensor) -> Pair:
        start, pair = int(memory.storage_offset()), list[Tensor]()  # rows of a ring's messages begin at 0
        for x, width in zip(self._own, self._widths, strict=True):
            batch, _, nheads, headdim = x.shape
            row = nheads * headdim
            # In a single step, because more steps take noticeable time for short sequences.
            shape, strides = (batch, len(rows), nheads, headdim), (len(rows) * row, row, headdim, 1)
            pair.append(memory.as_strided(shape, strides, start))
            start += len(rows) * width
        return pair[0], pair[1]

    def keys_and_values(self, hop: Hop) -> Pair:
        """Returns the keys and values of `hop`."""
        return self._own if hop.kv_slot is None else self._views(hop.kv_slot, hop.rows)

    def gradient(self, hop: Hop) -> Pair:
        """Returns dK and dV of `hop`: uninitialised if `hop.starts`, otherwise the sum over earlier ranks."""
        if hop.gradient_slot is not None:
            return self._views(hop.gradient_slot, hop.rows)
        if self._own_gradient is None:
            self._own_gradient = self.scratch(hop)
        return self._own_gradient

    def store(self, hop: Hop, share: Pair | None) -> None:
        """Adds a share in `scratch` to the sum of earlier ranks. Without a share, a gradient that starts is zero."""
        if share is None and hop.starts and hop.rows:
            for gradient in self.gradient(hop):
                gradient.zero_()
        elif share is not None and share is not (total := self.gradient(hop)):
            for gradient, addend in zip(total, share, strict=True):
                gradient += addend

    def add_returned(self, slot: int, rows: range, own_row: int) -> None:
        """Adds gradients of this rank's KV, which have arrived in `slot`, to those that returned before."""
        arrived = self._views(slot, rows)
        if self._own_gradient is None:
            self._own_gradient = arrived
            return
        for total, share in zip(self._own_gradient, arrived, strict=True):
            total += share

    def own_gradient(self, dtype: torch.dtype) -> Pair:
        """Returns the finished dK and dV of this rank's KV in `dtype`.

        They have separate storages, because results of a custom operator may not alias each other.
        """
        assert self._own_gradient is not None
        dk, dv = (gradient.to(dtype) for gradient in self._own_gradient)
        return dk, dv.clone() if dv.untyped_storage().data_ptr() == dk.untyped_storage().data_ptr() else dv


class GatheredBuffers(_Buffers):
    """Buffers of a grouped plan. Kernels get the rows that a rank sees sorted by position, as one tensor of keys.

    Slots are allocated at their first use, and the buffer of KV is freed once its rows are sorted.
    """

    def _pair(self, rows: range, memory: Tensor) -> Pair:
        batch, _, nheads_kv, headdim = self._own[0].shape
        both = self._width // (batch * nheads_kv)
        shape, strides = (batch, len(rows), nheads_kv), (both * nheads_kv, self._width, both, 1)
        start = int(memory.storage_offset()) + rows.start * self._width
        keys = memory.as_strided((*shape, headdim), strides, start)
        return keys, memory.as_strided((*shape, both - headdim), strides, start + headdim)

    def keys_and_values(self, hop: Hop) -> Pair:
        """Returns the keys and values that this rank sees, sorted by position."""
        assert hop.kv_slot is not None
        order, _ = _orders(hop, self._own[0].device)
        add_reader(order.device)
        seen = self.message(hop.kv_slot, hop.rows).vector.view(-1, self._width)
        if self._width * seen.itemsize % 8 == 0:  # copies move at most 8 bytes at a time
            seen = seen.view(torch.int64)
        self.free(hop.kv_slot)
        return self._pair(range(len(hop.rows)), seen.index_select(0, order).view(self._dtype))

    def gradient(self, hop: Hop) -> Pair:
        """Returns memory for dK and dV of the keys that this rank sees, sorted by position."""
        return self.scratch(hop)

    def store(self, hop: Hop, share: Pair | None) -> None:
        """Puts dK and dV back into the order of the buffer. Own rows that this rank does not see start as zero."""
        assert hop.gradient_slot is not None
        seen = self._views(hop.gradient_slot, hop.rows)  # all ranks allocate the slot here
        if share is not None:
            _, inverse = _orders(hop, share[0].device)
            add_reader(inverse.device)
            for target, source in zip(seen, share, strict=True):
                torch.index_select(source, 1, inverse, out=target)
        if hop.rows.start:
            for gradient in self._own_rows(hop.gradient_slot):
                gradient.zero_()

    def add_returned(self, slot: int, rows: range, own_row: int) -> None:
        """Adds another rank's share of the gradients of this rank's KV, which has arrived in `slot`."""
        # No peer reads the own rows, so they can be added to in place.
        total = self.message(0, range(own_row, own_row + len(rows))).vector
        total += self.message(slot, rows).vector

    def own_gradient(self, dtype: torch.dtype) -> Pair:
        """Returns the finished dK and dV of this rank's KV in `dtype`, with separate storages."""
        dk, dv = (x.to(dtype, memory_format=torch.contiguous_format, copy=True) for x in self._own_rows(0))
        return dk, dv


Buffers = RingBuffers | GatheredBuffers


def buffers_of(own: Pair, dtype: torch.dtype, kind: Kind, plan: Plan, transport: Transport) -> Buffers:
    """Returns the buffers of KV or of gradients that `plan` uses; see `_Buffers`."""
    return (GatheredBuffers if plan.grouped else RingBuffers)(own, dtype, kind, plan, transport)


@device_tables(maxsize=256)
def _orders(hop: Hop, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the permutation from position order to buffer rows of the KV held, and its inverse; int64."""
    order = positions(hop.held, "cpu").argsort().numpy()
    there, back = uploaded((order, order.argsort()), device, torch.int64)
    return there, back
