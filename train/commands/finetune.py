"""`ringflash finetune`: the command line of `ringflash train` for models of transformers, whole or by LoRA.

ringflash finetune fit --config configs/lora.yaml --model.model=path/to/model --data.corpus=data/mine
"""

from __future__ import annotations

from collections.abc import Sequence

from ringflash.train.commands.train import RingCLI
from ringflash.train.commands.train import main as train
from ringflash.train.lightning.transformers_model import TransformersModel


class FinetuneCLI(RingCLI):
    """Builds and runs the Trainer on a TransformersModel."""

    name = "finetune"
    module = TransformersModel
    samples_text = False


def main(argv: Sequence[str]) -> int:
    """Runs `ringflash finetune ...`; returns its exit code, as `ringflash train`."""
    return train(argv, FinetuneCLI)
