"""Small training runs with Trainer and RingTrainer, on any number of processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

VOCAB, ROWS, LONGEST = 61, 10, 37
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Rows(Dataset):
    """Sequences of unequal lengths, with prompts of unequal lengths that have no labels."""

    def __init__(self, count: int = ROWS, seed: int = 0, packed: bool = False, length: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows: list[dict[str, Any]] = []
        longest = length
        for index in range(count):
            length = longest or LONGEST - 3 * (index % 5)
            ids = torch.randint(3, VOCAB, (length,), generator=generator)
            labels = ids.clone()
            labels[: 0 if longest else (7 * index) % 20] = -100
            row: dict[str, Any] = {"input_ids": ids.tolist(), "labels": labels.tolist()}
            if packed:
                row["position_ids"] = [*range(11), *range(length - 11)]
            self.rows.append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Stream(IterableDataset):
    """The rows one after another, without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(Rows())


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads rows at the right, as DataCollatorForLanguageModeling does; packed rows come alone."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}
    if "position_ids" in rows[0]:
        return {**batch, "position_ids": padded("position_ids", 0)}
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {**batch, "attention_mask": torch.tensor(mask)}


def make_model(run: Run) -> Any:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{run.family}Config")(**SHAPE | run.model)
    model = getattr(transformers, f"{run.family}ForCausalLM")._from_config(config, attn_implementation="sdpa")
    if not run.lora:
        return model
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers deprecates
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@dataclass(frozen=True)
class Run:
    """A run of Trainer.

    Args:
        ring: ranks of a ring; None for all, 0 for transformers' own Trainer.
        rows: rows of a batch on a ring.
        data: keywords of `Rows`.
        stream: whether the training data have no length.
        resume: checkpoint to continue from.
        family: family of the model.
        model: further fields of the model's configuration.
        lora: whether adapters alone train.
        settings: further fields of TrainingArguments.
        options: further arguments of the trainer.
    """

    ring: int | None = None
    rows: int = 2
    data: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    resume: str | None = None
    family: str = "Llama"
    model: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Results of a run: its logs, and the model's weights at the end."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    rates: list[float]
    weights: dict[str, Tensor]
    flops: float


def make_trainer(run: Run, folder: str | Path) -> Any:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from ringflash.train import RingTrainer

    AcceleratorState._reset_state(reset_partial_state=True)  # several runs in one process
    if dist.is_initialized():  # accelerate reads what torchrun sets
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", OMP_NUM_THREADS="1")
        os.environ.update(LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": run.rows,
        "per_device_eval_batch_size": run.rows,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    train_dataset: Any = Stream() if run.stream else Rows(**run.data)
    rows = {"train_dataset": train_dataset, "eval_dataset": Rows(6, seed=9, **run.data)}
    ring = {} if run.ring == 0 else {"context_parallel_size": run.ring}
    given = {"model": make_model(run), "data_collator": collate, **rows, **ring, **run.options}
    return (Trainer if run.ring == 0 else RingTrainer)(args=TrainingArguments(**settings | run.settings), **given)


def train(run: Run, folder: str | Path) -> Outcome:
    trainer = make_trainer(run, folder)
    trainer.train(resume_from_checkpoint=run.resume)
    logs = trainer.state.log_history
    if dist.is_initialized():
        dist.barrier()

    def of(name: str) -> list[float]:
        return [log[name] for log in logs if name in log]

    weights = {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}
    flops = trainer.state.total_flos
    return Outcome(of("loss"), of("grad_norm"), of("eval_loss"), of("learning_rate"), weights, flops)
