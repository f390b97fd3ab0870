"""Private parts of accelerate and of transformers' Trainer: they behave as needed, and one file names them."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import ringflash
from ringflash.errors import ConfigError
from ringflash.train import accelerate_private
from tests.helpers.distributed import run_ranks
from tests.helpers.private_names import private_imports

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROOT = Path(ringflash.__file__).parent


@pytest.mark.parametrize("package", accelerate_private.CHECKED)
def test_this_release_was_checked(package: str) -> None:
    release = ".".join(version(package).split(".")[:2])
    assert release in accelerate_private.CHECKED[package], (
        f"{package} {release} is new: if the tests of tests/train/trainer pass under it, add it to "
        "accelerate_private.CHECKED"
    )


def test_one_file_uses_private_names_of_accelerate() -> None:
    for path in sorted((ROOT / "train" / "trainer").rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert not private_imports(tree, "accelerate") | private_imports(tree, "transformers")


def test_trainer_has_what_a_ring_overrides() -> None:
    from transformers import Trainer

    from ringflash.train import RingTrainer

    overridden = {name for name, x in vars(RingTrainer).items() if inspect.isfunction(x) and hasattr(Trainer, name)}
    assert set(accelerate_private.TRAINER_METHODS) < overridden
    for name in overridden - {"__init__"}:
        assert [*inspect.signature(getattr(Trainer, name)).parameters][:1] == ["self"]
    source = inspect.getsource(Trainer)
    for name in accelerate_private.TRAINER_ATTRIBUTES:
        assert f"self.{name}" in source


def rows_of_loader(given: bool) -> list[int]:
    """Returns the rows that this rank gets from loaders of an accelerator, with the mesh of rings or without it."""
    from tests.train.trainer.test_rings import make_accelerator

    accelerator = make_accelerator()
    if given:
        names = (accelerate_private.DATA, accelerate_private.RING)
        accelerate_private.shard_data_over_rings(accelerator, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    data: Any = list(range(8))
    return [int(x) for batch in accelerator.prepare(DataLoader(data, batch_size=2)) for x in batch]


@pytest.mark.parametrize("given", [True, False])
def test_ranks_of_a_ring_get_the_same_rows(given: bool) -> None:
    rings = [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]]
    assert run_ranks(4, rows_of_loader, given) == (rings if given else [[0, 1], [2, 3], [4, 5], [6, 7]])


@pytest.mark.parametrize(("package", "old"), [("transformers", "5.17.0"), ("accelerate", "1.9.0")])
def test_older_releases_are_refused_by_name(package: str, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate_private.check_versions()
    actual = accelerate_private.version
    monkeypatch.setattr(accelerate_private, "version", lambda name: old if name == package else actual(name))
    least = {"transformers": r"5\.23", "accelerate": r"1\.15"}[package]
    with pytest.raises(ConfigError, match=rf"^{package}: expected {least} or newer .*, got {old}\. Install it with"):
        accelerate_private.check_versions()
