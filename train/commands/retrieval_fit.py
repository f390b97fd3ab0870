"""`ringflash retrieval fit`: the command line of `ringflash train` on sequences of the retrieval task."""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser

from ringflash.train.callbacks.retrieval_accuracy import RetrievalAccuracy
from ringflash.train.commands.train import CALLBACKS, RingCLI
from ringflash.train.data.retrieval import RetrievalDataModule


class RetrievalCLI(RingCLI):
    """Builds and runs the Trainer on a RetrievalDataModule, and counts right answers."""

    name = "retrieval"
    data = RetrievalDataModule
    run_callbacks = CALLBACKS | {"retrieval": RetrievalAccuracy}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the arguments of RingCLI, without the summary's text sample, because the task has no text."""
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"summary.sample_tokens": 0})
