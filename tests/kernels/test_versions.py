"""Private names of Triton: one file uses them, and they are as that file expects."""

from __future__ import annotations

import ast
from pathlib import Path

from triton.experimental.gluon.language import _semantic

import ringflash
from ringflash.kernels import versions
from tests.helpers.private_names import private_imports

ROOT = Path(ringflash.__file__).parent
PRIVATE = {
    "triton._C.libtriton.get_cache_invalidating_env_vars",
    "triton._C.libtriton.ir",
    "triton.experimental.gluon.language._core.builtin",
}


def test_one_file_uses_private_names_of_triton() -> None:
    files = [path for folder in (ROOT, ROOT / "kernels") for path in folder.rglob("*.py")]
    found = {str(path.relative_to(ROOT)): private_imports(ast.parse(path.read_text()), "triton") for path in files}
    assert {file: names for file, names in found.items() if names} == {"kernels/versions.py": PRIVATE}


def test_private_names_are_as_expected() -> None:
    variables = versions.environment_of_compilations()
    assert all(isinstance(part, str) for item in variables.items() for part in item)
    assert versions.ir.DESCRIPTOR_REDUCE_KIND.ADD is not None
    assert callable(versions.ir.builder)
    assert callable(_semantic.GluonSemantic._convert_to_ir_values)
    assert callable(_semantic.GluonOpBuilder.create_async_tma_reduce)
    for name in ("nbytes", "reinterpret", "reduce_add", "halves"):
        assert getattr(versions, name).__triton_builtin__
