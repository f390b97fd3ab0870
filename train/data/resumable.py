"""Base of the data modules, which keeps the position in the training samples in checkpoints."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import lightning.pytorch as pl

from ringflash.errors import ConfigError, DataError


class Resumable(Protocol):
    """Loader of training batches that can begin in the middle."""

    def start_after(self, state: dict[str, int], /) -> None:
        """Makes the next iteration begin after the batches of `state`."""
        ...

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last batch."""
        ...


L = TypeVar("L", bound=Resumable)


class ResumableDataModule(pl.LightningDataModule, Generic[L]):
    """Data module whose training loader begins after the batches of a checkpoint, or of the trainer's earlier loader.

    Lightning loads the state of a loader too, except where its own epoch has ended, as after max_epochs or max_time.

    Subclasses pass their training loader through `_continued`, and define `_settings`.
    """

    trained_on = "the corpus and samples that the checkpoint was trained on"  # for the message of `load_state_dict`
    remedy = "Resume with the same data section."
    to_overfit = "Leave it out. To repeat few batches, name a corpus of that size: each epoch reads all of it."

    def __init__(self) -> None:
        super().__init__()
        self._train_loader: L | None = None
        self._trained_by: pl.Trainer | None = None  # the trainer that the loader was made for
        self._position: dict[str, int] | None = None  # of a checkpoint, until training begins

    def setup(self, stage: str) -> None:
        """Drops the position of a checkpoint that an earlier run did not use.

        Raises:
            ConfigError: training with `overfit_batches`.
        """
        if stage == "fit" and (batches := getattr(self.trainer, "overfit_batches", 0)):
            expected = f"0 with {type(self).__name__}, whose loader continues and does not repeat its first batches"
            raise ConfigError("overfit_batches", expected=expected, got=batches, remedy=self.to_overfit)
        self._position = None

    def _continued(self, loader: L) -> L:
        """Returns a new training loader after it was set to its first batch."""
        if self._position is None and self._train_loader is not None and self._trained_by is self.trainer:
            self._position = self._train_loader.state_dict()
        if self._position is not None:
            loader.start_after(self._position)
        self._train_loader, self._trained_by, self._position = loader, self.trainer, None
        return loader

    def _ranks(self) -> tuple[int, int]:
        """Returns the data-parallel rank of this process and the number of such ranks."""
        given = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
        return given["rank"], given["num_replicas"]

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that give a position its meaning."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns `_settings`, with the position if training has begun."""
        position = {} if self._train_loader is None else {"position": self._train_loader.state_dict()}
        return self._settings() | position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the checkpoint's position, after which training continues.

        Raises:
            DataError: the position refers to other samples.
        """
        now = self._settings()
        differing = [f"{k} {state_dict.get(k)} (now {v})" for k, v in now.items() if state_dict.get(k) != v]
        if differing:
            raise DataError("data", expected=self.trained_on, got=", ".join(differing), remedy=self.remedy)
        self._position = state_dict.get("position")
