"""Backends in the tests of the Triton kernels: on sm_90 these tests run the Hopper kernels too."""

import torch

from ringflash.kernels.fallback import why_not

GPU_BACKENDS: list[str] = ["triton"]
if torch.cuda.is_available() and why_not(torch.device("cuda")) is None:
    GPU_BACKENDS.append("hopper")

# Dtype of a backend in tests with one dtype. The Hopper backend would pass float32 on to the Triton kernels.
DTYPE_OF = {"triton": torch.float32, "hopper": torch.bfloat16}
