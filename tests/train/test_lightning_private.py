"""Private parts of Lightning: each behaves as the trainer needs, and one file uses them."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

import ringflash
from ringflash.train import lightning_private
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.helpers.distributed import run_ranks
from tests.helpers.private_names import is_private, private_imports
from tests.train.lightning.test_synchronisations import trained
from tests.train.runs import MODEL, Run

JSONARGPARSE = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
ROOT = Path(ringflash.__file__).parent
TRAINER = [path for path in sorted((ROOT / "train").rglob("*.py")) if path.name != "lightning_private.py"]


def lightning_names(cls: type) -> set[str]:
    """The private attributes that the classes of Lightning among the bases of `cls` define or assign."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "lightning":
            names |= set(vars(base))
            names |= {
                node.attr
                for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            }
    return set(filter(is_private, names))


def of_lightning(tree: ast.AST, name: str) -> set[str]:
    """The private attributes of Lightning that the classes of a file, those of module `name`, use or override."""
    module, found = importlib.import_module(name), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and isinstance(cls := getattr(module, node.name, None), type):
            used = {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
            used |= {x.name for x in ast.walk(node) if isinstance(x, ast.FunctionDef)}
            found |= used & lightning_names(cls)
    return found


@pytest.mark.parametrize("path", TRAINER, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_file_uses_private_names_of_lightning(path: Path) -> None:
    """Names of self are found here; `tests/test_torch_private.py` finds those of other objects."""
    tree = ast.parse(path.read_text())
    name = ".".join(("ringflash", *path.relative_to(ROOT).with_suffix("").parts))
    assert not private_imports(tree, "lightning")
    assert not of_lightning(tree, name.removesuffix(".__init__"))


def test_the_scan_finds_names_of_lightning() -> None:
    tree = ast.parse((ROOT / "train" / "lightning_private.py").read_text())
    found = of_lightning(tree, lightning_private.__name__)
    assert found == {"_get", "_parse_ckpt_path", "_run_subcommand", "_subcommand_parsers"}
    assert private_imports(ast.parse("from lightning.pytorch.strategies._private import x"), "lightning")
    assert private_imports(ast.parse("from lightning.pytorch.cli import _x"), "lightning")
    assert "_device_mesh" in lightning_names(RingAttentionStrategy)


def test_this_lightning_was_checked() -> None:
    release = ".".join(lightning.__version__.split(".")[:2])
    assert release in lightning_private.CHECKED, (
        f"Lightning {release} is new: if the other tests pass under it, add it to lightning_private.CHECKED"
    )


def test_lightning_calls_what_is_replaced() -> None:
    assert "self._run_subcommand(" in inspect.getsource(LightningCLI)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(loop.advance)
    assert "self._sigterm_notifier_fn" in inspect.getsource(connector.register_signal_handlers)
    assert "received_sigterm" in vars(connector)


class Kill(Callback):
    """Sends rank 1 a SIGTERM after the second step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object, **kwargs: object) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _killed() -> tuple[str, int]:
    module = LanguageModel(MODEL)
    try:
        trained(module, Run(steps=4), RingAttentionStrategy(), Kill())
    except SIGTERMException as error:
        dist.barrier()
        return type(error).__name__, module.trainer.global_step
    return "", module.trainer.global_step


def test_a_sigterm_on_one_rank_ends_all_before_the_same_batch() -> None:
    assert run_ranks(2, _killed) == [("SIGTERMException", 2)] * 2


def test_a_module_without_a_trainer_has_none() -> None:
    module = pl.LightningModule()
    assert lightning_private.trainer_of(module) is None
    module.trainer = trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert lightning_private.trainer_of(module) is trainer


def _mesh_of_a_strategy() -> tuple[bool, bool, int]:
    strategy, module = ModelParallelStrategy(), pl.LightningModule()
    mesh = init_device_mesh("cpu", (2,))
    lightning_private.set_device_mesh(strategy, module, mesh)
    return strategy.device_mesh is mesh, module.device_mesh is mesh, mesh.size()


def test_the_mesh_is_that_of_the_public_properties() -> None:
    assert run_ranks(2, _mesh_of_a_strategy) == [(True, True, 2)] * 2


def test_connecting_is_the_part_of_lightning_before_its_mesh() -> None:
    source = inspect.getsource(ModelParallelStrategy.setup_environment)
    before, after = source.split("self._setup_distributed()")
    assert "_device_mesh" not in before
    assert "_device_mesh" in after
    assert "_init_dist_connection" in inspect.getsource(ModelParallelStrategy._setup_distributed)


class Module(pl.LightningModule):
    """A module with one argument."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()


@pytest.fixture
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides pytest's own arguments, because LightningCLI warns about them beside `args`."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


class Order(pl.LightningModule):
    """A module that notes the rows of each batch, and resumes epochs as the strategy does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = torch.nn.Linear(1, 1), list[tuple[int, list[int]]]()

    def on_train_start(self) -> None:
        lightning_private.resume_epoch(self.trainer)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.rows.append((self.current_epoch, batch.tolist()))
        return self.layer(batch[:, None].float()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _order(max_steps: int, *callbacks: Callback, saved: Path | None = None, resumes: bool = False) -> Any:
    """Returns the batches of a run of 4 batches an epoch, which is saved after its end or resumes from `saved`."""
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": bool(callbacks), "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=max_steps, callbacks=[*callbacks], enable_progress_bar=False, **options
    )
    sampler = DistributedSampler(cast("Any", range(8)), 1, 0, seed=7)
    module, loader = Order(), DataLoader(cast("Any", range(8)), 2, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=str(saved) if resumes else None, weights_only=False)
    if saved is not None and not resumes:
        trainer.save_checkpoint(saved)
    return module.rows


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_a_run_that_resumes_at_the_end_of_an_epoch_takes_all_batches_of_the_next(tmp_path: Path) -> None:
    at_ends = ModelCheckpoint(tmp_path, filename="epoch", every_n_epochs=2)
    within = ModelCheckpoint(tmp_path, filename="step", every_n_train_steps=8)
    whole = _order(12, at_ends, within)
    assert _order(8, saved=tmp_path / "run.ckpt") == whole[:8]
    for name in ("run", "epoch", "step"):  # saved after a run, after an epoch, and in the last step of an epoch
        assert _order(12, saved=tmp_path / f"{name}.ckpt", resumes=True) == whole[8:]


class CLI(lightning_private.UntrustingCLI):
    """Parses its arguments and runs nothing."""

    def instantiate_classes(self) -> None:
        return

    def _run_subcommand(self, subcommand: str) -> None:
        return


@JSONARGPARSE
@pytest.mark.usefixtures("no_arguments")
def test_the_cli_reads_no_checkpoint(tmp_path: Path) -> None:
    assert "self._parse_ckpt_path()" in inspect.getsource(LightningCLI.__init__)
    path = tmp_path / "file.ckpt"
    path.write_bytes(b"not a checkpoint")
    cli = CLI(Module, args=["fit", f"--ckpt_path={path}"], seed_everything_default=0)
    assert cli.config["fit.ckpt_path"] == str(path)


@JSONARGPARSE
@pytest.mark.usefixtures("no_arguments")
def test_the_cli_names_its_options() -> None:
    cli = CLI(Module, args=["fit"], seed_everything_default=0)
    assert {"model.width", "trainer.max_steps", "ckpt_path"} <= set(cli.option_names("fit"))
    assert cli.option_names(None) == cli.option_names("fitt") == ["fit", "validate", "test", "predict"]
