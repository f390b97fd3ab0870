"""transformers' Trainer with each sequence cut over a ring of ranks: RingTrainer in place of Trainer.

torchrun --nproc-per-node 2 docs/examples/ring_trainer.py
"""

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments, set_seed

from ringflash.train import RingTrainer

VOCAB, SEQLEN = 64, 500


class Counting(Dataset):
    """Sequences that count upwards from anywhere, and whose prompts of unequal length have no labels."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(SEQLEN) + 7 * (self.first + index)) % VOCAB
        labels = tokens.clone()
        labels[: SEQLEN // 4 + 9 * index % 100] = -100
        return {"input_ids": tokens, "labels": labels}  # labels are not shifted, as transformers has them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or name for from_pretrained; a small new model by default")
    parser.add_argument("--context-parallel-size", type=int, help="ranks that share a sequence; all by default")
    parser.add_argument("--output-dir", default="runs/ring-trainer")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    settings = TrainingArguments(
        args.output_dir,
        max_steps=args.steps,
        per_device_train_batch_size=1,  # rows of a ring
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.steps,
        save_steps=args.steps,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    set_seed(0)  # the same weights on every rank
    shape: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128}
    if args.model is None:
        config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **shape)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model)
    trainer = RingTrainer(
        model,
        settings,
        train_dataset=Counting(0, 64),
        eval_dataset=Counting(64, 4),
        context_parallel_size=args.context_parallel_size,
    )
    trainer.train()
    trainer.save_model(f"{args.output_dir}/model")  # a folder for from_pretrained
    trainer.end()


if __name__ == "__main__":
    main()
