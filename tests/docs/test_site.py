"""The site's contents name every page, and its reference every public name; `make docs` checks the rest."""

from __future__ import annotations

import re
from pathlib import Path

import ringflash as rf

ROOT = Path(rf.__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_contents_of_the_site_name_every_page() -> None:
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```", (DOCS / "site" / "index.md").read_text(), re.DOTALL | re.MULTILINE
    )
    named = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    found = [ROOT / line[1:] if line.startswith("/") else (DOCS / "site" / line).resolve() for line in named]
    pages = {path.with_suffix("") for kind in ("*.md", "*.rst") for path in DOCS.rglob(kind)}
    top = {ROOT / name for name in ("README", "CHANGELOG", "CONTRIBUTING")}
    assert sorted(found) == sorted((pages | top) - {DOCS / "site" / "index"})


def test_the_reference_names_every_public_name() -> None:
    text = (DOCS / "reference" / "api.rst").read_text()
    described = {name.rpartition(".")[2] for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, re.MULTILINE)}
    assert {*rf.__all__, *rf.train.__all__} - {"hf", "train"} <= described
