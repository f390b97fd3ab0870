"""A model of transformers in a loop of accelerate: sequences cut over rings of ranks, with gradient accumulation.

torchrun --nproc-per-node 2 docs/examples/accelerate_loop.py
"""

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from ringflash.train import AcceleratorRing

VOCAB, SEQLEN = 64, 500


class Counting(Dataset):
    """Sequences that count upwards from anywhere, and whose prompts of unequal length have no labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(SEQLEN) + 7 * index) % VOCAB
        labels = tokens.clone()
        labels[: SEQLEN // 4 + 9 * index % 100] = -100
        return {"input_ids": tokens, "labels": labels}  # labels are not shifted, as transformers has them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or name for from_pretrained; a small new model by default")
    parser.add_argument("--context-parallel-size", type=int, help="ranks that share a sequence; all by default")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    ring = AcceleratorRing(accelerator, args.context_parallel_size)  # before loaders are prepared
    torch.manual_seed(0)  # the same weights on every rank
    shape: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128}
    if args.model is None:
        config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **shape)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model)
    ring.use_ring_attention(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Counting(), batch_size=1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    batches = iter(loader)
    for step in range(args.steps):
        window = [next(batches) for _ in range(args.accumulation)]
        count = ring.count_valid_tokens(window)  # of all ranks, so that each token has the same weight
        loss = 0.0
        for index, batch in enumerate(window):
            with nullcontext() if index == len(window) - 1 else accelerator.no_sync(model):
                mean = ring.token_mean(model, batch, num_valid_tokens=count)
                accelerator.backward(mean.loss)
            loss += mean.value.item()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1}/{args.steps}  loss {loss:.4f}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
