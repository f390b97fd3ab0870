"""`ringflash finetune` and `ringflash dpo`: the command line of `ringflash train` for models of transformers.

`finetune` trains on text, whole or by LoRA. `dpo` trains on pairs of a chosen and a rejected answer, by DPO.

ringflash finetune fit --config configs/lora.yaml --model.model=path/to/model --data.corpus=data/mine
ringflash prepare my/pairs.jsonl --pairs --to data/pairs --tokenizer path/to/model
ringflash dpo fit --config configs/dpo.yaml --model.model=path/to/model --data.corpus=data/pairs
"""

from __future__ import annotations

from collections.abc import Sequence

from ringflash.train.commands.train import RingCLI
from ringflash.train.commands.train import main as train
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.preference.data import PreferenceDataModule
from ringflash.train.preference.module import DpoModel


class FinetuneCLI(RingCLI):
    """Builds and runs the Trainer on a TransformersModel."""

    name = "finetune"
    module = TransformersModel
    samples_text = False


class DpoCLI(FinetuneCLI):
    """Builds and runs the Trainer on a DpoModel and a PreferenceDataModule."""

    name = "dpo"
    module = DpoModel
    data = PreferenceDataModule


def main(argv: Sequence[str]) -> int:
    """Runs `ringflash finetune ...`; returns its exit code, as `ringflash train`."""
    return train(argv, FinetuneCLI)


def dpo(argv: Sequence[str]) -> int:
    """Runs `ringflash dpo ...`; returns its exit code, as `ringflash train`."""
    return train(argv, DpoCLI)
