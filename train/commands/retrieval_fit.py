"""`ringflash retrieval fit`: the command line of `ringflash train` on sequences of the retrieval task."""

from __future__ import annotations

from ringflash.train.callbacks.retrieval_accuracy import RetrievalAccuracy
from ringflash.train.commands.train import CALLBACKS, RingCLI
from ringflash.train.data.retrieval import RetrievalDataModule


class RetrievalCLI(RingCLI):
    """Builds and runs the Trainer on a RetrievalDataModule, and counts right answers."""

    name = "retrieval"
    data = RetrievalDataModule
    run_callbacks = CALLBACKS | {"retrieval": RetrievalAccuracy}
    samples_text = False  # the task has no text
