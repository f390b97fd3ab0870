"""Search of machine code for uniform registers that are read before they are written, a fault of the assembler.

ptxas 12.8 compiles some kernels for sm_90 so that the descriptor of a matmul's shared memory is computed from a uniform
register without a value. The kernel then multiplies data from a random address, or faults. ptxas gives no warning about
such code, and memcheck does not find every case.

The search follows the definitions that reach each instruction (a forward data-flow analysis over basic blocks). After
an indirect branch it assumes an edge to every label, and so it reports only registers that no path writes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from triton import knobs  # pyright: ignore[reportAttributeAccessIssue] - made at import

_COMMENT = re.compile(r"/\*.*?\*/")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Za-z0-9_.]*)\s*(?P<operands>[^;]*);")
_TARGET = re.compile(r"\.L_x_\d+")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_PREDICATE = re.compile(r"!?U?P(\d+|T)")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_ENDS = ("BRA", "BRX", "BRXU", "EXIT", "RET", "JMP", "JMX", "CALL", "WARPSYNC", "BREAK", "BSYNC")
_WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2}


@dataclass(frozen=True)
class _Instruction:
    """One instruction and the uniform registers that it reads and writes."""

    text: str
    op: str
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass
class _Block:
    instructions: list[_Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


def undefined_uniform_reads(sass: str) -> list[str]:
    """Returns the instructions of one kernel that read a uniform register which no path has written before.

    Args:
        sass: the kernel's code as `nvdisasm -c` prints it.
    """
    blocks = _blocks(sass)
    written: list[frozenset[int] | None] = [None] * len(blocks)  # by some path to a block; None: not reached
    if blocks:
        written[0] = frozenset()
    pending = deque([0] if blocks else [])
    while pending:
        index = pending.popleft()
        before = written[index]
        assert before is not None
        after = before.union(*(instruction.writes for instruction in blocks[index].instructions))
        for successor in blocks[index].successors:
            known = written[successor]
            if known is None or not after <= known:
                written[successor] = after | (known or frozenset())
                pending.append(successor)
    found = []
    for block, entry in zip(blocks, written, strict=True):
        known = set(entry or ())
        for instruction in block.instructions if entry is not None else ():
            if not instruction.reads <= known:
                registers = ", ".join(f"UR{register}" for register in sorted(instruction.reads - known))
                found.append(f"{instruction.text} ({registers})")
            known |= instruction.writes
    return found


def disassemble(cubin: bytes) -> str:
    """Returns the machine code of a cubin, as `nvdisasm -c` of this Triton prints it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _blocks(sass: str) -> list[_Block]:
    blocks, labels, targets = [_Block()], {}, []
    for line in sass.splitlines():
        text = _COMMENT.sub("", line).strip()
        if label := _LABEL.match(text):
            blocks.append(_Block())
            labels[label[1]] = len(blocks) - 1
        elif match := _INSTRUCTION.match(text):
            instruction = _instruction(" ".join(text.split()), match)
            blocks[-1].instructions.append(instruction)
            if instruction.op.split(".")[0] in _ENDS:
                targets.append((len(blocks) - 1, match["operands"]))
                blocks.append(_Block())
    for index, block in enumerate(blocks):
        if index + 1 < len(blocks):  # also after an unconditional branch: a superfluous edge only hides reports
            block.successors.append(index + 1)
    for index, operands in targets:
        named = _TARGET.findall(operands)
        last = blocks[index].instructions[-1]
        if named:
            blocks[index].successors += [labels[name] for name in named if name in labels]
        elif not last.op.startswith(("EXIT", "WARPSYNC", "BREAK")):  # an indirect branch, to any label
            blocks[index].successors += labels.values()
    return blocks


def _instruction(text: str, match: re.Match[str]) -> _Instruction:
    op, operands = match["op"], [operand.strip() for operand in match["operands"].split(",")]
    width = next((width for suffix, width in _WIDTHS.items() if suffix in op), 1)
    writes: frozenset[int] = frozenset()
    sources = operands
    for position, operand in enumerate(operands):  # predicates may come before the register that is written
        if target := re.fullmatch(r"UR(\d+)", operand):
            if _writes_first(op):
                writes, sources = frozenset(range(int(target[1]), int(target[1]) + width)), operands[position + 1 :]
            break
        if not _PREDICATE.fullmatch(operand):
            break
    return _Instruction(text, op, frozenset(_reads(op, operands, sources)), writes)


def _writes_first(op: str) -> bool:
    """Returns whether an instruction writes its first uniform operand: the others take it as an address or a value."""
    return op.startswith(("U", "R2UR", "S2UR", "REDUX", "CREDUX", "VOTEU", "LDC", "CS2UR")) and not op.startswith(
        ("UTMA", "UBLK", "UCGABAR", "USTGBAR", "USETMAXREG", "UISETP", "UPLOP", "UR2UP")
    )


def _reads(op: str, operands: list[str], sources: list[str]) -> Iterator[int]:
    """Yields the registers that arithmetic and matmuls read; the operands of other instructions are not judged."""
    if op.startswith("HGMMA"):
        for base in _DESCRIPTOR.findall(",".join(operands)):
            from_registers = re.fullmatch(r"R\d+", operands[1]) is not None
            yield from range(int(base) + (2 if from_registers else 0), int(base) + 4)
    elif op.startswith(("UIADD3", "USHF", "ULEA", "UMOV", "ULOP3", "USGXT", "USEL", "UIMAD")):
        for operand in sources:
            if source := _UNIFORM.search(operand):
                yield int(source[1])
