"""Attention on one device: a checked call, its kernels and its only tile problem, ready to run forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.kernels import select
from ringflash.kernels.contract import BackwardArguments, ForwardArguments, TileProblem
from ringflash.kernels.mask_tables import row_intervals
from ringflash.layouts.layout import Chunk
from ringflash.masks import Full, Mask, mask_from_spec, spec_of
from ringflash.ops.call import AttentionCall
from ringflash.ops.packed import PackedForm, packed_form
from ringflash.recent_calls import RecentCalls
from ringflash.ring.tiles import KernelRun, sinks_gradient
from ringflash.state import contiguous, lse_dtype


class OneDevice:
    """Attention on one device, for tensors of the shapes, dtype and device that it was made for.

    It holds no tensor of a call except the mask's, sinks and slopes. Several threads may use it at once. Attention of a
    packed form serves every mask of packed documents of the same form: each call gives its mask, and reads tables that
    the GPU makes of it.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        kernel_run: KernelRun,
        problem: TileProblem | None,
        fuses_dq: bool,
        form: PackedForm | None = None,
    ) -> None:
        """Keeps a checked call, and the shapes of its tensors.

        Args:
            q: queries of a call.
            k: its keys.
            v: its values.
            call: parameters of the call, without tensors except the mask's.
            kernel_run: kernels and score settings.
            problem: positions of the queries and keys; None if no query sees any key.
            fuses_dq: whether one kernel computes dq, dk and dv.
            form: the packed form, if the attention is of one.
        """
        self.form = form
        if form is not None:
            seqlens = q.shape[1], k.shape[1]
            self._make_tables = select.table_makers(form.tilings, form.left, form.right, *seqlens, q.device)
        self.call, self._kernel_run, self._problem, self._fuses_dq = call, kernel_run, problem, fuses_dq
        self._is_eager, self._lse_dtype = kernel_run.kernels.name == "eager", lse_dtype(q.dtype)
        self._replays = select.new_replays(kernel_run.kernels, q)
        batch, seqlen_q, nheads, _ = q.shape
        self._q, self._k, self._v = map(contiguous, (q.shape, k.shape, v.shape))
        self._out = contiguous((batch, seqlen_q, nheads, v.shape[3]))
        self._lse = contiguous((batch, nheads, seqlen_q))

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> OneDevice | PackedCall:
        """Returns attention for `call`, whatever its context, made now or before.

        Raises:
            ArgumentError: a mask that does not fit the number of keys.
        """
        mask = form = None
        if call.mask_tensors and call.sinks is None and call.alibi_slopes is None and call.dropout_seed is None:
            mask = mask_from_spec(call.mask, call.mask_tensors)
            form = packed_form(mask, q, k, v, call.softcap, call.backend, deterministic=call.deterministic)
        key = call.key(q, k, v, form or mask)
        known = None if key is None else _operators.get(key)
        if known is None:
            known = OneDevice.new(q, k, v, call, form)
            if key is not None:
                _operators.put(key, known)
        return known if mask is None or form is None else PackedCall(known, mask)

    @staticmethod
    def new(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, form: PackedForm | None = None) -> OneDevice:
        """Makes attention for `call`, or for any call of its packed `form`, for callers that keep it themselves.

        Raises:
            ArgumentError: a mask that does not fit the number of keys.
        """
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        q_chunks, k_chunks = (Chunk(seqlen_k - seqlen_q, seqlen_q),), (Chunk(0, seqlen_k),)
        call, kernel_run = call._replace(context=""), call.kernel_run(q)
        mask = Full() if form is not None else call.mask_of(seqlen_k)  # each call of a form has a mask of its own
        problem = None
        if form is not None or bool(row_intervals(mask, q_chunks).seeing.any()):
            # `place` is new with each problem. No cache, because that of a pass would keep its tensors alive.
            problem = TileProblem(q_chunks, k_chunks, mask, kernel_run.score_config, place=object())
        if form is not None:
            call = call._replace(mask="", mask_tensors=())
            return OneDevice(q, k, v, call, kernel_run, problem, fuses_dq=True, form=form)
        fuses_dq = kernel_run.single_pass(q, v, mask, hops=1)
        return OneDevice(q, k, v, call.without_tensors(), kernel_run, problem, fuses_dq)

    context = None  # of `BoundCall`: a single device has none

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
        """Returns out and lse, as the operator `attention`; `mask` is that of a packed form."""
        if self._needs_guard(q):
            with select.kernels_of(q):
                return self._forward(q, k, v, mask=mask)
        if self._replays is None:
            return self._forward(q, k, v, mask=mask)
        procedure, tensors = self._forward, (q, k, v)
        if mask is not None:
            procedure, tensors = partial(procedure, mask=mask), (q, k, v, *self._tables(mask, by_keys=False))
        out, lse = self._replays((q.stride(), k.stride(), v.stride()), procedure, tensors)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns dq, dk, dv and dsinks, as the operator `attention_backward`, but None for dsinks without sinks."""
        tensors = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
        if self._needs_guard(q):
            with select.kernels_of(q):
                return self._backward(*tensors, mask=mask)
        if self._replays is None or self._kernel_run.score_config.sinks is not None:
            return self._backward(*tensors, mask=mask)
        key = tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])  # hooks may change saved ones
        procedure = self._gradients
        if mask is not None:
            procedure = partial(self._packed_gradients, mask, len(tensors))
            tensors = (*tensors, *self._tables(mask, by_keys=True))
        dq, dk, dv = self._replays(key, procedure, tensors)
        return dq, dk, dv, None

    def _tables(self, mask: Mask, *, by_keys: bool) -> Sequence[Tensor]:
        """Returns the tables that the GPU makes of the mask of a call."""
        assert mask.packing is not None
        return self._make_tables[by_keys](mask.packing.documents)

    def _needs_guard(self, q: Tensor) -> bool:
        """Returns whether kernels need another current device, or matmuls without autocast."""
        if self._is_eager and torch.is_autocast_enabled(q.device.type):
            return True
        return q.is_cuda and q.get_device() != torch.cuda.current_device()

    def _packed(self, mask: Mask, tables: Sequence[Tensor], *, by_keys: bool) -> TileProblem:
        """Returns the problem of a call with its mask; without `tables` they are looked up."""
        assert self._problem is not None
        assert self.form is not None
        tables = tuple(tables or self._tables(mask, by_keys=by_keys))
        return replace(self._problem, mask=mask, tiling=self.form.tilings[by_keys], tables=tables)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor, mask: Mask | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty_strided(*self._out), q.new_empty_strided(*self._lse, dtype=self._lse_dtype)
        problem = self._problem if mask is None else self._packed(mask, tables, by_keys=False)
        if problem is None:
            return out.zero_(), lse.fill_(-torch.inf)
        self._kernel_run.kernels.forward(ForwardArguments(q, k, v, problem, None, out, lse, first=True, last=True))
        return out, lse

    def _gradients(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, _ = self._backward(*tensors)
        return dq, dk, dv

    def _packed_gradients(self, mask: Mask, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients for `count` tensors, which tables follow."""
        dq, dk, dv, _ = self._backward(*tensors[:count], tables=tensors[count:], mask=mask)
        return dq, dk, dv

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None = None,
        *,
        tables: Sequence[Tensor] = (),
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        kernels = self._kernel_run.kernels
        problem = self._problem if mask is None else self._packed(mask, tables, by_keys=True)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # the gradient of a sum is one expanded number
        lse = lse.to(self._lse_dtype).contiguous()  # kernels read one vector a head; a saved tensor's hook may round it
        dk, dv = k.new_empty_strided(*self._k), v.new_empty_strided(*self._v)
        sinks = self._kernel_run.score_config.sinks
        if problem is None:
            return q.new_zeros(q.shape), dk.zero_(), dv.zero_(), None if sinks is None else lse.new_zeros(sinks.shape)
        may_wait = self._fuses_dq and sinks is None  # the gradient of sinks needs delta now
        delta = (kernels.delta_of_one_hop if may_wait else kernels.delta)(out, dout, dlse)
        dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta)
        inputs = BackwardArguments(dout, q, k, v, lse, delta, problem)
        if self._fuses_dq:
            total = self._kernel_run.new_dq(q, hops=1)
            kernels.backward_dkdv(inputs, dk, dv, accumulate=False, dq=total)
            return total.finish(), dk, dv, dsinks
        dq = q.new_empty_strided(*self._q)
        kernels.backward_dq(inputs, dq, accumulate=False)
        kernels.backward_dkdv(inputs, dk, dv, accumulate=False)
        return dq, dk, dv, dsinks


class PackedCall(NamedTuple):
    """Attention of a packed form, with the mask of one call."""

    attention: OneDevice
    mask: Mask

    context = None

    @property
    def call(self) -> AttentionCall:
        """Parameters of the call."""
        words, tensors = spec_of(self.mask)
        return self.attention.call._replace(mask=words, mask_tensors=tensors)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `OneDevice.forward`."""
        return self.attention.forward(q, k, v, self.mask)

    def backward(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns `OneDevice.backward`."""
        return self.attention.backward(*tensors, mask=self.mask)  # pyright: ignore[reportArgumentType]


_operators: RecentCalls[OneDevice] = RecentCalls()
