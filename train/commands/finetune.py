"""`ringflash finetune`: the command line of `ringflash train` for models of transformers, whole or by LoRA.

ringflash finetune fit --config configs/lora.yaml --model.model=path/to/model --data.corpus=data/mine
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.cli import LightningArgumentParser

from ringflash.train.commands.train import RingCLI
from ringflash.train.commands.train import main as train
from ringflash.train.lightning.transformers_model import TransformersModel


class FinetuneCLI(RingCLI):
    """Builds and runs the Trainer on a TransformersModel."""

    name = "finetune"
    module = TransformersModel

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the arguments of RingCLI, without the summary's text sample, which needs a LanguageModel."""
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"summary.sample_tokens": 0})


def main(argv: Sequence[str]) -> int:
    """Runs `ringflash finetune ...`; returns its exit code, as `ringflash train`."""
    return train(argv, FinetuneCLI)
