"""Smallest known kernel that ptxas 12.8 compiles wrongly for sm_90: two matmuls fed by loads of single numbers.

python -m tests.kernels.aot.ptxas_fault    prints ptxas's version, then the faulty instructions, if there are any
"""

# A type checker cannot check Triton's DSL as Python.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import subprocess

import triton
import triton.language as tl
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - created at import
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringflash.kernels.aot.sass import disassemble, undefined_uniform_reads


@triton.jit
def loads_number_by_number(
    q, k, v, out, stride_q, stride_k, stride_v, n, HEADDIM: tl.constexpr, HEADDIM_V: tl.constexpr
):
    rows = tl.arange(0, 64)
    dims = tl.arange(0, 64)[None, :]
    dims_v = tl.arange(0, 32)[None, :]
    q_tile = tl.load(q + rows[:, None] * stride_q + dims, mask=dims < HEADDIM, other=0.0)
    acc = tl.zeros([64, 32], tl.float32)
    for i in range(0, n, 64):
        row = tl.cast(i, tl.int64)
        inside = (i + rows < n)[:, None]
        k_at = k + row * stride_k + rows[:, None] * stride_k + dims
        p = tl.exp2(tl.dot(q_tile, tl.trans(tl.load(k_at, mask=inside & (dims < HEADDIM), other=0.0))))
        v_at = v + row * stride_v + rows[:, None] * stride_v + dims_v
        v_tile = tl.load(v_at, mask=inside & (dims_v < HEADDIM_V), other=0.0)
        acc = tl.dot(p.to(tl.bfloat16), v_tile, acc)
    tl.store(out + rows[:, None] * 32 + dims_v, acc)


def main() -> None:
    """Compiles the kernel for an H100 and prints the faulty instructions that the search finds."""
    pointers = dict.fromkeys(("q", "k", "v"), "*bf16") | {"out": "*fp32"}
    numbers = dict.fromkeys(("stride_q", "stride_k", "stride_v", "n"), "i32")
    widths = {"HEADDIM": 40, "HEADDIM_V": 24}
    source = ASTSource(loads_number_by_number, pointers | numbers | dict.fromkeys(widths, "constexpr"), widths)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    command = [knobs.nvidia.ptxas.path, "--version"]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-2])
    for line in undefined_uniform_reads(disassemble(kernel.asm["cubin"])):
        print(line)


if __name__ == "__main__":
    main()
