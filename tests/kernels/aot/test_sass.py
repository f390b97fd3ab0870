"""The search of machine code for reads of unwritten uniform registers, and the kernel that made it necessary."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ringflash.kernels.aot.sass import undefined_uniform_reads

ENDS = "EXIT ;"


@pytest.mark.parametrize(
    "code",
    [
        "UMOV UR4, 0x40 ; UIADD3 UR5, UP0, UR4, 0x2, URZ ;",
        "ULDC.64 UR4, c[0x0][0x208] ; UMOV UR6, UR5 ;",
        "R2UR UR6, R3 ; UMOV UR7, 0x80000020 ; HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56 ;",
        "@P0 BRA `(.L_x_1) ;\n.L_x_0:\n UMOV UR4, 0x1 ;\n.L_x_1:\n UMOV UR5, UR4 ;",  # written on one path
        "UMOV UR9, 0x1 ;\n.L_x_0:\n UMOV UR8, UR9 ; UMOV UR9, UR8 ; @P1 BRA `(.L_x_0) ;",
        "UTMALDG.4D [UR8], [UR4], desc[UR10] ;",  # the search skips operands that it does not know
    ],
)
def test_code_that_writes_before_it_reads_is_accepted(code: str) -> None:
    assert undefined_uniform_reads(one_a_line(code)) == []


@pytest.mark.parametrize(
    ("code", "register"),
    [
        ("UIADD3 UR16, UP0, UR16, 0x40, URZ ;", "UR16"),
        ("UMOV UR4, 0x1 ; UIADD3.X UR17, UR5, URZ, URZ, UP0, !UPT ;", "UR5"),
        ("R2UR UR6, R3 ; HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56 ;", "UR7"),
        ("UMOV UR6, 0x1 ; UMOV UR7, 0x2 ; HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;", "UR4, UR5"),
        (".L_x_0:\n UMOV UR8, UR9 ; UMOV UR9, 0x1 ; @P1 BRA `(.L_x_0) ;", ""),  # written in the previous iteration
    ],
)
def test_reads_of_unwritten_registers_are_found(code: str, register: str) -> None:
    found = undefined_uniform_reads(one_a_line(code))
    assert [line.rsplit("(", 1)[1] for line in found] == ([f"{register})"] if register else [])


def one_a_line(code: str) -> str:
    return code.replace("; ", ";\n") + "\n" + ENDS


def test_fault_of_ptxas_is_found_where_it_has_it() -> None:
    command = [sys.executable, "-m", "tests.kernels.aot.ptxas_fault"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    version, *found = run.stdout.splitlines()
    assert bool(found) == ("release 12.8" in version), run.stdout
