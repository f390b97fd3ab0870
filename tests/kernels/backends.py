"""Which kernels the tests of the Triton kernels run: those, and on sm_90 the Hopper kernels too."""

import torch

from ringflash.kernels.hopper import backend

GPU_BACKENDS: list[str] = ["triton"]
if torch.cuda.is_available() and backend.why_not(torch.device("cuda")) is None:
    GPU_BACKENDS.append("hopper")

# For tests of one dtype: the Hopper kernels would leave float32 to Triton's.
DTYPE_OF = {"triton": torch.float32, "hopper": torch.bfloat16}
