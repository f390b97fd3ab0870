"""Three calls of the CUDA driver that torch has no name for: a stream that writes and awaits a word of memory."""

from __future__ import annotations

import ctypes

import torch

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """The calls, with their errors; none of them takes an SM, all may be captured in a CUDA graph."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        # Said once: a call that is told the types of its arguments every time takes twice as long.
        word = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._write, self._wait = self._cuda.cuStreamWriteValue32_v2, self._cuda.cuStreamWaitValue32_v2
        self._write.argtypes = self._wait.argtypes = word

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Writes a word once all that `stream` holds is done and visible to every GPU."""
        _check("cuStreamWriteValue32", self._write(stream.cuda_stream, address, value, 0))

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Holds `stream` until the word at `address` is `value`."""
        _check("cuStreamWaitValue32", self._wait(stream.cuda_stream, address, value, _EQUAL))

    def allow_queries(self) -> None:
        """This thread may ask for events from now on while another captures a graph, which asking breaks by default."""
        mode = ctypes.c_int(_RELAXED)
        _check("cuThreadExchangeStreamCaptureMode", self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))


def _check(call: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(f"{call} failed with CUDA driver error {result}")
