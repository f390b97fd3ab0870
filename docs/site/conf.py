"""The configuration of the documentation site; its source folder is the root of the repository (see `make docs`)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import references

import ringflash

project = "ringflash"
version = release = ringflash.__version__
copyright = "2026, the authors of ringflash"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "commands",
    "references",
]

root_doc = "docs/site/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**"]
exclude_patterns = [".*", "build", "dist", "configs", "kernels", "ringflash", "runs", "tests", "train"]
nitpicky = True
smartquotes = False  # they would join the hyphens of options
default_role = "py:obj"  # docstrings have code in single backticks

myst_heading_anchors = 4  # as on GitHub, where pages link to headings

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

# The second place of each inventory is empty: a project out of reach is then a message, and no warning.
nothing = references.empty_inventory(ROOT / "build" / "site")
intersphinx_mapping = {name: (address, (None, nothing)) for name, address in references.PROJECTS.items()}
intersphinx_timeout = 10  # seconds

html_theme = "furo"
html_title = f"ringflash {release}"
html_additional_pages = {"index": "front.html"}  # leads to the root of the documents
templates_path = ["templates"]
html_copy_source = html_show_sourcelink = False
