"""Attention on one device: a checked call, its kernels and its only tile problem, ready to run forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash.kernels import select
from ringflash.kernels.contract import BackwardArguments, ForwardArguments, TileProblem
from ringflash.kernels.mask_tables import row_intervals
from ringflash.layouts.layout import Chunk
from ringflash.ops.call import AttentionCall
from ringflash.recent_calls import RecentCalls
from ringflash.ring.tiles import KernelRun, sinks_gradient
from ringflash.state import contiguous, lse_dtype


class OneDevice:
    """Attention on one device, for tensors of the shapes, dtype and device that it was made for.

    It holds no tensor of a call except the mask's, sinks and slopes. Several threads may use it at once.
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
        """
        self.call, self._kernel_run, self._problem, self._fuses_dq = call, kernel_run, problem, fuses_dq
        self._is_eager, self._lse_dtype = kernel_run.kernels.name == "eager", lse_dtype(q.dtype)
        self._replays = select.new_replays(kernel_run.kernels, q)
        batch, seqlen_q, nheads, _ = q.shape
        self._q, self._k, self._v = map(contiguous, (q.shape, k.shape, v.shape))
        self._out = contiguous((batch, seqlen_q, nheads, v.shape[3]))
        self._lse = contiguous((batch, nheads, seqlen_q))

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> OneDevice:
        """Returns attention for `call`, whatever its context, made now or before.

        Raises:
            ArgumentError: a mask that does not fit the number of keys.
        """
        key = call.key(q, k, v)
        if key is not None and (known := _operators.get(key)) is not None:
            return known
        made = OneDevice.new(q, k, v, call)
        return made if key is None else _operators.put(key, made)

    @staticmethod
    def new(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> OneDevice:
        """Makes attention for `call`, for callers that keep it themselves.

        Raises:
            ArgumentError: a mask that does not fit the number of keys.
        """
        call = call._replace(context="")
        mask = call.mask_of(k.shape[1])
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        q_chunks, k_chunks = (Chunk(seqlen_k - seqlen_q, seqlen_q),), (Chunk(0, seqlen_k),)
        kernel_run, problem = call.kernel_run(q), None
        if bool(row_intervals(mask, q_chunks).seeing.any()):
            # `place` is new with each problem. No cache, because that of a pass would keep its tensors alive.
            problem = TileProblem(q_chunks, k_chunks, mask, kernel_run.score_config, place=object())
        fuses_dq = kernel_run.single_pass(q, v, mask, hops=1)
        return OneDevice(q, k, v, call.without_tensors(), kernel_run, problem, fuses_dq)

    context = None  # of `BoundCall`: a single device has none

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns out and lse, as the operator `attention`."""
        if self._needs_guard(q):
            with select.kernels_of(q):
                return self._forward(q, k, v)
        if self._replays is None:
            return self._forward(q, k, v)
        out, lse = self._replays((q.stride(), k.stride(), v.stride()), self._forward, (q, k, v))
        return out, lse

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns dq, dk, dv and dsinks, as the operator `attention_backward`, but None for dsinks without sinks."""
        tensors = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
        if self._needs_guard(q):
            with select.kernels_of(q):
                return self._backward(*tensors)
        if self._replays is None or self._kernel_run.score_config.sinks is not None:
            return self._backward(*tensors)
        key = tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])  # hooks may change saved ones
        dq, dk, dv = self._replays(key, self._gradients, tensors)
        return dq, dk, dv, None

    def _needs_guard(self, q: Tensor) -> bool:
        """Returns whether kernels need another current device, or matmuls without autocast."""
        if self._is_eager and torch.is_autocast_enabled(q.device.type):
            return True
        return q.is_cuda and q.get_device() != torch.cuda.current_device()

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty_strided(*self._out), q.new_empty_strided(*self._lse, dtype=self._lse_dtype)
        problem = self._problem
        if problem is None:
            return out.zero_(), lse.fill_(-torch.inf)
        self._kernel_run.kernels.forward(ForwardArguments(q, k, v, problem, None, out, lse, first=True, last=True))
        return out, lse

    def _gradients(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, _ = self._backward(*tensors)
        return dq, dk, dv

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        kernels, problem = self._kernel_run.kernels, self._problem
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


_operators: RecentCalls[OneDevice] = RecentCalls()
