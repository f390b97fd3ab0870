"""The command `ringflash` in its own processes, and the configuration of a small run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.ports import unused_port
from tests.helpers.programs import inherited

CONFIG: dict[str, Any] = {
    "model": {
        "model": {"vocab_size": 257, "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48},
        "optimizer": {"lr": 0.01, "warmup_steps": 2, "max_steps": 12},
    },
    "data": {"corpus": "text.txt", "context_length": 128, "batch_size": 2, "cache_dir": "cache"},
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": {
            "class_path": "ringflash.train.lightning.strategy.RingAttentionStrategy",
            "init_args": {"layout": "contiguous"},
        },
        "max_steps": 12,
        "max_epochs": -1,
        "log_every_n_steps": 2,
        "val_check_interval": 6,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
    },
    "summary": {"sample_tokens": 8},
    "throughput": {"warmup_steps": 2},
    "run_dir": "runs/test",
}


COMMAND = "ringflash.commands.main"


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", COMMAND, *args]


def environment() -> dict[str, str]:
    """Returns the environment without the variables of an enclosing distributed run, and with a port for a new one."""
    return inherited() | {"COLUMNS": "120", "MASTER_PORT": str(unused_port())}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "text.txt").write_text("".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(400)))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"
