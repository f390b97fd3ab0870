"""The loss and the gradients of a batch of preferences are those of TRL's DPOTrainer, from the rows on.

It ran with TRL 1.16.0, datasets 5.2.0 and transformers 5.23.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ringflash.train.data.prepare import Recipe, prepare
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.models.lora import Lora, add_adapters
from ringflash.train.preference.chat import PairChat
from ringflash.train.preference.data import PreferenceDataModule
from ringflash.train.preference.module import DpoModel
from tests.train.data.chats import write_chat_tokenizer, write_rows
from tests.train.lightning.test_transformers_model import Run, config_of
from tests.train.models.test_lora import fill_adapters

pytest.importorskip("peft")

BETA, SEED = 0.3, 4


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def rows() -> list[dict[str, Any]]:
    return [
        {"prompt": turn("user", "ring " * i), "chosen": turn("assistant", "turn" * i), "rejected": turn("assistant", x)}
        for i, x in enumerate(("and", "around the ring", "no"), 1)
    ]


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
def test_loss_and_gradients_are_trl_s(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_chat_tokenizer(tmp_path / "model")
    torch.manual_seed(SEED)
    config = config_of(Run(family="Llama", tied=False))
    config.vocab_size = Tokenizer.load(folder).vocab_size
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)

    lora = Lora(rank=3, alpha=6)
    source = write_rows(tmp_path / "rows.jsonl", rows())
    prepare(str(source), tmp_path / "to", Recipe(Tokenizer.load(folder), chat=PairChat.load(folder)))
    data = PreferenceDataModule(str(tmp_path / "to"), 256, val_fraction=0.0)
    data.setup("fit")

    class Filled(DpoModel):
        def _build(self) -> Any:
            made, weights = super()._build()
            fill_adapters(made)
            return made, weights

    module = Filled(str(folder), BETA, lora=lora, seed=SEED, compute_dtype="float32")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.trainer = pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    module.configure_model()
    batch = data.train_samples()[[0]]
    module.on_train_batch_start(batch, 0)
    losses, num_pairs = module._loss(batch)
    assert int(num_pairs) == len(rows())
    (losses.total / num_pairs).backward()

    policy: Any = AutoModelForCausalLM.from_pretrained(folder)
    add_adapters(policy, lora, SEED)
    fill_adapters(policy)
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=BETA, per_device_train_batch_size=len(rows()), use_cpu=True, bf16=False,
        report_to=[], gradient_checkpointing=False, max_length=None, disable_tqdm=True,
    )  # fmt: skip
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), pad_token="</s>")
    trainer = trl.DPOTrainer(
        policy,
        AutoModelForCausalLM.from_pretrained(folder),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows()),
        processing_class=tokenizer,
    )
    expected = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    expected.backward()
    assert float(losses.total.detach() / num_pairs) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = {name: p.grad for name, p in module.decoder.named_parameters() if p.grad is not None}
    for name, parameter in policy.named_parameters():
        if name in gradients:
            assert (gradients[name] - parameter.grad).abs().max() <= 1e-6, name
    assert len(gradients) == 28
