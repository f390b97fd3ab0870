"""`ringflash dpo`: the command line of `ringflash finetune` on pairs of a chosen and a rejected answer, by DPO.

ringflash prepare my/pairs.jsonl --pairs --to data/pairs --tokenizer path/to/model
ringflash dpo fit --config configs/dpo.yaml --model.model=path/to/model --data.corpus=data/pairs
"""

from __future__ import annotations

from collections.abc import Sequence

from ringflash.train.commands.finetune import FinetuneCLI
from ringflash.train.commands.train import main as train
from ringflash.train.preference.data import PreferenceDataModule
from ringflash.train.preference.module import DpoModel


class DpoCLI(FinetuneCLI):
    """Builds and runs the Trainer on a DpoModel and a PreferenceDataModule."""

    name = "dpo"
    module = DpoModel
    data = PreferenceDataModule


def main(argv: Sequence[str]) -> int:
    """Runs `ringflash dpo ...`; returns its exit code, as `ringflash train`."""
    return train(argv, DpoCLI)
