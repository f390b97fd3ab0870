"""The private parts of Lightning that training steps depend on behave as needed."""

from __future__ import annotations

import inspect
import os
import signal

import lightning
import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ringflash.train import lightning_private
from ringflash.train.lightning.language_model import LanguageModel
from ringflash.train.lightning.strategy import RingAttentionStrategy
from tests.distributed import run_ranks
from tests.train.lightning.test_synchronisations import trained
from tests.train.runs import MODEL, Run


def test_this_lightning_was_checked() -> None:
    release = ".".join(lightning.__version__.split(".")[:2])
    assert release in lightning_private.CHECKED, (
        f"Lightning {release} is new: if the other tests pass under it, add it to lightning_private.CHECKED"
    )


def test_lightning_calls_what_is_replaced() -> None:
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
