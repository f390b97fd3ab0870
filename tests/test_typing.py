"""A type checker accepts the programs and snippets of the documentation, and infers the types of the calls' results."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ringflash
from tests.patience import PATIENCE

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


def test_examples_and_snippets_pass_a_type_checker(tmp_path: Path) -> None:
    for page in PAGES:
        snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
        assert snippets
        (tmp_path / f"{Path(page).stem.lower()}.py").write_text("\n".join([PRELUDE, *snippets, RETURNS]))
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "examples")
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"})
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
