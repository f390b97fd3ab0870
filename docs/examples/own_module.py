"""A LightningModule of your own under RingAttentionStrategy, with early stopping on the true validation loss.

python docs/examples/own_module.py --devices 2
"""

import argparse
from typing import cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import ringflash as rf
from ringflash.train import RingAttentionStrategy

VOCAB, DIM, HEADS, SEQLEN = 64, 64, 4, 512


class Counting(Dataset):
    """Sequences that count upwards from anywhere; labels are shifted, and the prompt has none."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(SEQLEN + 1) + 7 * (self.first + index)) % VOCAB
        labels = tokens[1:].clone()
        labels[: SEQLEN // 4 + 9 * index % 100] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


class OwnModule(pl.LightningModule):
    def configure_model(self) -> None:
        self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQLEN, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)
        for layer in (self.embed, self.position, self.qkv, self.head):
            fully_shard(layer, mesh=cast(RingAttentionStrategy, self.trainer.strategy).shard_mesh)

    def token_mean(self, batch: dict[str, Tensor]):
        context = cast(RingAttentionStrategy, self.trainer.strategy).context
        x = self.embed(batch["input_ids"]) + self.position(batch["position_ids"])
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, dim=-1))
        logits = self.head(x + rf.ring_attention(q, k, v, context, mask=rf.Causal()).flatten(-2))
        losses = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return context.token_mean(losses, batch["labels"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.token_mean(batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        mean = self.token_mean(batch)
        self.log("val_loss", mean.value, batch_size=int(mean.num_valid), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    strategy = RingAttentionStrategy()  # use_distributed_sampler stays True, its default
    options = {"logger": False, "enable_checkpointing": False, "callbacks": [EarlyStopping("val_loss", patience=2)]}
    trainer = pl.Trainer(strategy=strategy, devices=args.devices, max_epochs=args.epochs, **options)
    trainer.fit(OwnModule(), DataLoader(Counting(0, 8), 2, shuffle=True), DataLoader(Counting(8, 3), 1))
    if trainer.is_global_zero:
        print(f"val_loss {trainer.callback_metrics['val_loss'].item():.4f}", flush=True)


if __name__ == "__main__":  # the Trainer starts this file once more for each further device
    main()
