"""Memory of the configurations for GPUs: by the estimate printed before training, they fit into an H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import ringflash
from ringflash.train.lightning.strategy import resolve_sizes
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.memory import TrainingShape, estimate_memory

CONFIGS = Path(ringflash.__file__).parents[1] / "configs"
H200 = 141e9  # bytes
LEFT_OUT = 0.2  # fraction of it, for memory outside the estimate: buffers, temporaries, caches, the CUDA context


def sizes(trainer: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the data-parallel and context-parallel sizes, and the number of ranks that share one copy of weights."""
    strategy = trainer.get("strategy")
    options = strategy["init_args"] if isinstance(strategy, dict) else {}
    world_size = trainer["devices"] * trainer.get("num_nodes", 1)
    data, context = resolve_sizes(
        options.get("data_parallel_size", "auto"), options.get("context_parallel_size", "auto"), world_size
    )
    return data, context, world_size // options.get("replicate_size", 1)


def adapter_parameters(config: ModelConfig, rank: int) -> int:
    """Returns the parameters of adapters of all linear layers but the head: rank rows of A and columns of B each."""
    q, kv = config.n_heads * config.headdim, config.n_kv_heads * config.headdim
    ends = [(config.dim, q), (config.dim, kv), (config.dim, kv), (q, config.dim), *[(config.dim, config.ffn_dim)] * 3]
    return config.n_layers * rank * sum(map(sum, ends))


GPU_CONFIGS = [path for path in sorted(CONFIGS.glob("*.yaml")) if not path.stem.endswith("-cpu")]


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda p: p.stem)
def test_it_fits(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    model, trainer = config["model"], config["trainer"]
    data, context, shard_size = sizes(trainer)
    assert trainer["accelerator"] == "gpu"
    assert config["data"]["batch_size"] % data == 0
    fields, choice, trained = model["model"], "none", None
    if (lora := model.get("lora")) is not None:  # a model of no size; its blocks keep as much as fits
        fields = yaml.safe_load((CONFIGS / "llama-8b-256k-4gpu.yaml").read_text())["model"]["model"]
        choice, trained = "block", adapter_parameters(ModelConfig(**fields), lora["rank"])
        assert round(trained / 1e6) == 42
    shape = TrainingShape(
        tokens=config["data"]["context_length"] // context * (config["data"]["batch_size"] // data),
        shard_size=shard_size,
        checkpointing=model.get("activation_checkpointing", choice),
        reshard_after_forward=model.get("reshard_after_forward", True),
        in_pieces=model.get("compile_blocks", False),
        compiled=model.get("compile_blocks", False),
        trained=trained,
    )
    estimate = estimate_memory(ModelConfig(**fields), shape)
    assert estimate.total < (1 - LEFT_OUT) * H200, str(estimate)


def test_two_hosts_keep_rings_and_weights_apart() -> None:
    trainer = yaml.safe_load((CONFIGS / "two-hosts.yaml").read_text())["trainer"]
    assert sizes(trainer) == (2, trainer["devices"], trainer["devices"])
