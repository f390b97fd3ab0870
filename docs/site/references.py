"""Cross-references that Sphinx does not find: short names in docstrings, names of other projects, links to folders."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform

from ringflash import errors

# Each project: the address of its pages, which also has the inventory that `sphinx.ext.intersphinx` reads.
PROJECTS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "lightning": "https://lightning.ai/docs/pytorch/stable/",
}

# Names in signatures and docstrings, where autodoc has another one than the page that describes the object.
SAME = {
    "PretrainedConfig": "transformers.PretrainedConfig",
    "Path": "pathlib.Path",
    "NonFinite": "ringflash.train.callbacks.nonfinite.NonFinite",
    "OptimizerConfig": "ringflash.train.OptimizerConfig",
    "RingModule": "ringflash.train.lightning.ring_module.RingModule",
    "Hop": "ringflash.ring.plan.Hop",
    "Transfer": "ringflash.ring.plan.Transfer",
    "Batch": "ringflash.ring.plan.Batch",
    "ringflash.masks.base.Mask": "ringflash.masks.Mask",
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    **{name: f"ringflash.errors.{name}" for name in vars(errors) if isinstance(getattr(errors, name), type)},
}

# Pages of names that an inventory lacks, or that has not arrived.
PAGES = {
    "collections.abc.Sequence": PROJECTS["python"] + "library/collections.abc.html#collections.abc.Sequence",
    "datetime.timedelta": PROJECTS["python"] + "library/datetime.html#datetime.timedelta",
    "pathlib.Path": PROJECTS["python"] + "library/pathlib.html#pathlib.Path",
    "torch.Tensor": PROJECTS["torch"] + "tensors.html#torch.Tensor",
    "torch.device": PROJECTS["torch"] + "tensor_attributes.html#torch.device",
    "torch.dtype": PROJECTS["torch"] + "tensor_attributes.html#torch.dtype",
    "torch.nn.Module": PROJECTS["torch"] + "generated/torch.nn.Module.html#torch.nn.Module",
    "torch.distributed.ProcessGroup": PROJECTS["torch"] + "distributed.html",
    "torch.distributed.device_mesh.DeviceMesh": PROJECTS["torch"] + "distributed.html#devicemesh",
    "transformers.PretrainedConfig": "https://huggingface.co/docs/transformers/main_classes/configuration",
}

# Names for types that the description of the argument explains; they have no page.
UNLINKED = {"Accelerator", "ComputeDtype", "ActivationCheckpointing", "Kind", "LinearDtype"}


def empty_inventory(folder: Path) -> str:
    """Writes an inventory without names: with it as second choice, a project out of reach is no warning."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "empty.inv"
    header = "# Sphinx inventory version 2\n# Project: none\n# Version: 0\n# The rest is compressed with zlib.\n"
    path.write_bytes(header.encode() + zlib.compress(b""))
    return str(path)


class FolderLinks(SphinxPostTransform):
    """Leaves the text of links to folders, which have no page, before MyST looks for them as names."""

    default_priority = 8  # MyST's is 9

    def run(self, **_: object) -> None:
        """Replaces the links of one page."""
        folder = Path(self.env.doc2path(self.env.current_document.docname)).parent
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["reftype"] == "myst" and (folder / str(node["reftarget"])).is_dir():
                node.replace_self(node.children)


def _resolve(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Node) -> nodes.Node | None:
    """Returns the reference of a target that Sphinx and the inventories lack; None makes it a warning."""
    target = str(node["reftarget"])
    if node.get("refdomain") != "py":
        return None
    name = SAME.get(target, target)
    if name != target:
        domain = env.domains.python_domain
        found = domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], name, node, text)  # pyright: ignore[reportArgumentType]
        if found is not None:
            return found
    if name in PAGES:
        return nodes.reference("", "", text, internal=False, refuri=PAGES[name])
    # Code in single backticks is linked where it is a documented name, and only code elsewhere.
    return text if name in UNLINKED or node["reftype"] == "obj" else None


def _join_overloads(app: Sphinx, domain: str, objtype: str, content: addnodes.desc_content) -> None:
    """Leaves the signature that joins all overloads of a function, which comes last, and hides objects as defaults."""
    first, *others = [each for each in content.parent.children if isinstance(each, addnodes.desc_signature)]
    if others and domain == "py":
        first.clear()
        first += [child.deepcopy() for child in others[-1].children]
        for other in others:
            content.parent.remove(other)
    for default in first.findall(nodes.inline):
        if "default_value" in default["classes"] and "Options(" in default.astext():
            default.clear()
            default += nodes.Text("...")


def _escape_bars(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keeps absolute values in docstrings, which reStructuredText would read as substitutions."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the resolver after those of Sphinx and MyST."""
    app.add_post_transform(FolderLinks)
    app.connect("missing-reference", _resolve, priority=900)
    app.connect("autodoc-process-docstring", _escape_bars, priority=900)
    app.connect("object-description-transform", _join_overloads)
    return {"parallel_read_safe": True}
