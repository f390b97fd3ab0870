"""With the wheel installed, a type checker accepts the documentation's programs and knows the types of public names."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ringflash
import ringflash.train
from tests.helpers.patience import PATIENCE

ROOT = Path(ringflash.__file__).parents[1]

# Pages with snippets to check. The snippets of a page are checked together as one program.
PAGES = ("README.md", "docs/attention.md", "docs/training.md")

# Names that the snippets of a page use without defining them.
PRELUDE = """
from typing import assert_type

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import ringflash as rf

q, k, v, k_cache, v_cache, lengths, logits, slopes, tokens, positions, token_losses, labels = [torch.zeros(1)] * 12
parents, seqlen, folder = (-1, 0), 4096, "folder"
context = rf.ContextParallel.local(2)
"""

RETURNS = """
from ringflash.train import LanguageModel

options = rf.AttentionOptions(return_lse=True)
assert_type(rf.flash_attention(q, k, v), Tensor)
assert_type(rf.flash_attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
assert_type(rf.flash_attention(q, k, v, options=options), Tensor | tuple[Tensor, Tensor])
assert_type(rf.flash_attention(q, k, v, options=options, return_lse=False), Tensor)
assert_type(rf.ring_attention(q, k, v, context), Tensor)
assert_type(rf.ring_attention(q, k, v, context, return_lse=True), tuple[Tensor, Tensor])
assert_type(rf.flash_decode(q, k, v, cache_seqlens=1), Tensor)
assert_type(rf.flash_decode(q, k, v, cache_seqlens=1, return_lse=True), tuple[Tensor, Tensor])
assert_type(rf.train.LanguageModel, type[LanguageModel])
"""


MARKER = "only_in_the_wheel"  # a module that the unpacked wheel has, and the checkout has not

PUBLIC = """# pyright: reportUnknownMemberType=error, reportUnknownVariableType=error
import ringflash
import ringflash.train
from ringflash.{marker} import HERE

here = HERE + 1
{names}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, built from a copy of the sources, as building writes beside them."""
    sources, built, unpacked = (tmp_path_factory.mktemp(name) for name in ("sources", "built", "unpacked"))
    for name in ("ringflash", "kernels", "train", "configs"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(built)!r})"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, timeout=PATIENCE, cwd=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        file.extractall(unpacked)
    (unpacked / "ringflash" / f"{MARKER}.py").write_text("HERE: int = 1\n")
    return unpacked


def errors(project: Path, wheel: Path) -> list[str]:
    """The errors that pyright finds in `project` with the wheel installed; no path leads to the checkout's modules."""
    settings = {"typeCheckingMode": "standard", "stubPath": str(ROOT / "tests" / "typings")}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(project)]
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [*command, "--outputjson"], capture_output=True, text=True, timeout=PATIENCE, cwd=project, env=environment
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"], report
    found = [x for x in report["generalDiagnostics"] if x["severity"] == "error"]
    return [f"{Path(x['file']).name}:{x['range']['start']['line'] + 1}: {x['message']}" for x in found]


def test_examples_snippets_and_public_names_pass_a_type_checker(tmp_path: Path, wheel: Path) -> None:
    for page in PAGES:
        snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        assert snippets
        (tmp_path / f"{Path(page).stem.lower()}.py").write_text("\n".join([PRELUDE, *snippets, RETURNS]))
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "examples")
    modules = (ringflash, ringflash.train)
    names = [f"{module.__name__}.{name}" for module in modules for name in module.__all__]
    assert len(names) > 20
    lines = "\n".join(f"{name.replace('.', '_')} = {name}" for name in names)
    (tmp_path / "names.py").write_text(PUBLIC.format(marker=MARKER, names=lines))
    # The types of transformers are there: without them, its configuration would take any argument.
    (tmp_path / "wrong.py").write_text("from transformers import LlamaConfig\nx: int = LlamaConfig()\n")
    (error,) = errors(tmp_path, wheel)
    assert error.startswith('wrong.py:2: Type "LlamaConfig" is not assignable to declared type "int"')


def test_a_name_without_a_type_is_found(tmp_path: Path, wheel: Path) -> None:
    shutil.copytree(wheel, tmp_path / "wheel")
    (tmp_path / "wheel" / "ringflash" / f"{MARKER}.py").write_text("HERE: int = 1\ndef untyped(x): return x\n")
    project = tmp_path / "project"
    project.mkdir()
    lines = f"from ringflash.{MARKER} import untyped\nname = untyped"
    (project / "names.py").write_text(PUBLIC.format(marker=MARKER, names=lines))
    assert any("partially unknown" in error for error in errors(project, tmp_path / "wheel"))
