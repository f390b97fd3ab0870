"""Private parts of accelerate and of transformers' Trainer: the only file of the trainer that names them.

Both may change these names in any release. All were checked with the releases in `CHECKED`;
`tests/train/test_accelerate_private.py` fails under any other release, and where a name no longer behaves as needed.
Under a release that shards data in another way, ranks of a ring get different rows, and the first batch raises
RankMismatch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from ringflash import extras
from ringflash.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator

CHECKED = {"accelerate": ("1.15",), "transformers": ("5.23",)}  # accelerate 1.15.0 and transformers 5.23.0

# Names of dimensions by which accelerate knows which ranks get the same rows. A mesh must have them in this order.
DATA, RING = "dp_replicate", "cp"

# Methods and attributes of Trainer that are public by name, but that its documentation does not promise to subclasses.
TRAINER_METHODS = ("create_accelerator_and_postprocess", "get_cp_size", "call_model_init")
TRAINER_ATTRIBUTES = ("gather_function", "model_accepts_loss_kwargs")


def check_versions() -> None:
    """Raises ConfigError if accelerate or transformers is older than the first release in `CHECKED`."""
    for package, (least, *_) in CHECKED.items():
        found = version(package)
        if extras.is_older(found, least):
            expected = f"{least} or newer for RingTrainer and AcceleratorRing"
            raise ConfigError(package, expected=expected, got=found, remedy=extras.install("trainer"))


def shard_data_over_rings(
    accelerator: Accelerator, mesh: DeviceMesh, then: Callable[[DataLoader[Any]], None] | None = None
) -> None:
    """Makes `accelerator.prepare` give the ranks of a ring the same rows, and each ring other rows.

    accelerate shards data over the dimensions of its own mesh, which it makes for its own context parallelism alone.
    That needs FSDP2 and replaces the attention of the model. The state of accelerate is shared by all accelerators of
    a process, so the mesh is given to the loaders of this one.

    Args:
        accelerator: the accelerator that prepares the loaders.
        mesh: all ranks, with the dimensions `DATA` and `RING`.
        then: is called with each loader after accelerate has prepared it.
    """
    prepare = accelerator.prepare_data_loader

    def prepared(*args: Any, **keywords: Any) -> DataLoader[Any]:
        loader = prepare(*args, **keywords)
        if then is not None:
            then(loader)
        return loader

    # typed as methods
    setattr(accelerator, "_prepare_device_mesh", lambda: mesh)  # noqa: B010
    setattr(accelerator, "prepare_data_loader", prepared)  # noqa: B010
