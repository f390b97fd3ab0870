"""Small cases of `test_widths` for compute-sanitizer, which finds accesses outside of an allocation.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.kernels.memcheck [part of a name ...]

Here every tensor is its own allocation, because most accesses outside of a tensor stay unnoticed in torch's cached
blocks. Results are compared with float64 too. The exit code is 1 if a result is wrong.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch is imported

from tests.kernels.backends import GPU_BACKENDS
from tests.kernels.test_widths import EQUAL, NAMED, NAMED_DECODE

DEFAULT = ("24/16-v-in-rows-of-24", "24/16-v-in-rows-of-25", "40/24", "40/24-v-in-rows-of-25", "40/16-sharded")
N_EQUAL = 2  # cases of equal widths in each backend


def main(names: list[str]) -> int:
    """Runs the cases whose names contain one of `names`, or the default ones, and returns how many were wrong."""
    cases = [
        (case, "triton")
        for case in (*NAMED, *NAMED_DECODE)
        if (any(name in case.name for name in names) if names else case.name in DEFAULT)
    ]
    if not names:
        cases += [(case, backend) for case in EQUAL[:N_EQUAL] for backend in GPU_BACKENDS]
    wrong = 0
    for case, backend in cases:
        try:
            case.run(backend)
            result = "right"
        except AssertionError as error:
            wrong += 1
            result = f"WRONG: {error}"
        print(f"{backend} {type(case).__name__} {case.name}: {result}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
