"""Calls of the CUDA driver that torch does not expose, above all stream operations that write and await a flag.

A flag is a 32-bit value in GPU memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence

import torch

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_OPERATION = struct.Struct("<I4xQQI20x")  # CUstreamBatchMemOpParams: operation, address, value, flags
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def write_flag(address: int, value: int) -> bytes:
    """Returns an operation of a `FlagBatch`: a write, after earlier work is done and visible to every GPU."""
    return _OPERATION.pack(_WRITE, address, value, 0)


def await_flag(address: int, value: int) -> bytes:
    """Returns an operation of a `FlagBatch`: a wait until the flag at `address` is `value`."""
    return _OPERATION.pack(_WAIT, address, value, _EQUAL)


class FlagBatch:
    """Operations on flags that a stream runs in order, queued by one driver call. They take no SM.

    Args:
        operations: results of `write_flag` and `await_flag`.
    """

    def __init__(self, operations: Sequence[bytes]) -> None:
        self.count, self.array = len(operations), ctypes.create_string_buffer(b"".join(operations))


class Driver:
    """Driver calls that raise on errors. `queue`, `write` and `copy` may be captured in a CUDA graph."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        # Declared once: a call that states the types of its arguments every time takes twice as long.
        self._write, self._queue = self._cuda.cuStreamWriteValue32_v2, self._cuda.cuStreamBatchMemOp_v2
        self._copy = self._cuda.cuMemcpyDtoDAsync_v2
        self._write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._queue.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint]
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Queues a write of `value` to the flag at `address`, after earlier work is done and visible to every GPU."""
        _check("cuStreamWriteValue32", self._write(stream.cuda_stream, address, value, 0))

    def queue(self, stream: int, batch: FlagBatch) -> None:
        """Queues all operations of `batch` on the stream with this handle."""
        _check("cuStreamBatchMemOp", self._queue(stream, batch.count, batch.array, 0))

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queues a copy between two addresses of GPU memory on the stream with this handle."""
        _check("cuMemcpyDtoDAsync", self._copy(target, source, nbytes, stream))

    def second_context(self, device: torch.device) -> SecondContext:
        """Returns a second CUDA context, which can write while all streams of this process wait."""
        return SecondContext(self._cuda, device)

    def allow_queries(self) -> None:
        """Lets this thread query events while another thread captures a graph; by default that breaks the capture."""
        mode = ctypes.c_int(_RELAXED)
        _check("cuThreadExchangeStreamCaptureMode", self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))


class SecondContext:
    """A second CUDA context of this process, with a stream of its own.

    Streams of one context share the few hardware queues that CUDA_DEVICE_MAX_CONNECTIONS allows, 8 by default. A queue
    stops at the first stream that waits, and the branches of a CUDA graph can fill all queues. A second context has
    queues of its own. It takes several hundred MB of memory, so it is made only when a ring has failed.
    """

    def __init__(self, cuda: ctypes.CDLL, device: torch.device) -> None:
        self._cuda, self._context, self._stream = cuda, ctypes.c_void_p(), ctypes.c_void_p()
        index = torch.cuda.current_device() if device.index is None else device.index
        _check("cuCtxCreate", cuda.cuCtxCreate_v2(ctypes.byref(self._context), 0, index))
        try:
            _check("cuStreamCreate", cuda.cuStreamCreate(ctypes.byref(self._stream), _NON_BLOCKING))
        except RuntimeError:
            self.close()
            raise
        finally:
            self._pop()

    def write(self, addresses: Iterable[int], value: int) -> None:
        """Writes `value` to the flag at each address, and waits until the writes are done."""
        _check("cuCtxPushCurrent", self._cuda.cuCtxPushCurrent_v2(self._context))
        try:
            for address in addresses:
                result = self._cuda.cuStreamWriteValue32_v2(self._stream, ctypes.c_uint64(address), value, 0)
                _check("cuStreamWriteValue32", result)
            _check("cuStreamSynchronize", self._cuda.cuStreamSynchronize(self._stream))
        finally:
            self._pop()

    def close(self) -> None:
        """Frees the context."""
        _check("cuCtxDestroy", self._cuda.cuCtxDestroy_v2(self._context))

    def _pop(self) -> None:
        _check("cuCtxPopCurrent", self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))


def _check(call: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(f"{call} failed with CUDA driver error {result}")
