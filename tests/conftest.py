"""Before anything imports Triton: without a GPU its kernels run in the interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # several processes share the cores


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
