"""Families of transformers' causal language models, run on a ring with small sizes, and the table of the results.

`python -m tests.integrations.hf_families` runs all of them and writes docs/transformers-families.md. With names of
families as arguments, it runs only these and prints their rows.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import ringflash as rf
from ringflash.errors import ArgumentError

PAGE = Path(__file__).parents[2] / "docs" / "transformers-families.md"
SEQLEN = 21
RANKS = 3
MOST = 40_000_000  # largest number of parameters of a small model
BAR = 1e-5  # relative error of logits and gradients; rotations and experts are float32 in any dtype
HEAD = """# Families of transformers on a ring

`python -m tests.integrations.hf_families` makes this page. It goes through the {total} causal language models that
transformers {version} lists, gives each a small configuration and random weights, and runs it.

- *works* ({works}): `rf.hf.check_model` accepts the model. On a ring of three virtual ranks its logits and the
  gradients of its weights are equal to those of its own attention over the whole sequence, to {bar:g}.
- *refused* ({refused}): an `ArgumentError` says why, when the model is made or at its first forward on a ring. The
  table has the reason.
- *not run* ({rest}): the family has no small configuration here. `check_model` runs at its first forward on a ring, as
  for every other model.

A family has one configuration here. Another one of the same family may be refused, for example one with convolutions.

| family | class | on a ring | reason |
|---|---|---|---|
"""
REASONS = {
    r"uses position_ids": "ignores `position_ids`",
    r"counts positions from 0": "does not count positions from 0",
    r"no convolutions": "has convolutions over tokens",
    r"tokens meet in attention alone": "mixes tokens outside of attention",
    r"chooses attention from its own": "chooses attention from a table of its own",
    r"computes with the mask": "computes with its mask itself, without the attention interface",
    r"expected those of the shard": "keeps `position_ids` from its attention",
    r"got Tensor": "makes dense masks of its own",
    r"got chunks": "attends in chunks",
    r"in the attention of": "keeps `ring_context` from attention, or has layers without it",
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_hidden_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_dropout": 0.0,
}
MLA = {"num_key_value_heads": 4, "head_dim": 8}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
PART = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
CHANGES: dict[str, dict[str, Any]] = {
    "blt": {
        "patcher_config": PART | {"num_hidden_layers": 1},
        "encoder_config": PART | {"num_hidden_layers": 1, "hidden_size_global": 64},
        "decoder_config": PART | {"num_hidden_layers": 1, "hidden_size_global": 64},
        "global_config": PART | {"num_hidden_layers": 2},
        "encoder_hash_byte_group_vocab": 64,
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon": {"num_kv_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(family: str) -> Any:
    """Returns a small configuration of a family of transformers."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[family]
    known = {f.name for f in fields(cast("Any", config_class))}
    known |= set(config_class.attribute_map)
    changes = SMALL | (MLA if "kv_lora_rank" in known else {}) | CHANGES.get(family, {})
    return config_class(**{n: x for n, x in changes.items() if n in known or n in CHANGES.get(family, {})})


def model_of(family: str) -> Any:
    """Returns a small model of a family with random weights and ring attention."""
    from transformers import AutoModelForCausalLM

    rf.hf.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation=rf.hf.NAME)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model.eval()


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        family: name in transformers' mapping.
        model: name of the model's class.
        status: "works", "refused" or "not run".
        reason: reason why the family does not work; empty if it works.
    """

    family: str
    model: str
    status: str
    reason: str = ""

    def __str__(self) -> str:
        return f"| {self.family} | {self.model} | {self.status} | {self.reason} |"


def classes() -> dict[str, str]:
    """Returns the families of causal language models in transformers, and the names of their classes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def row_of(family: str) -> Row:
    """Returns the row of a family after checking a small model and comparing it on a ring with its own attention.

    Raises:
        AssertionError: if the check accepts a model that has different results on a ring.
    """
    name = classes()[family]
    try:
        small = _config(family)
    except Exception as error:
        if isinstance(error, ArgumentError):
            return Row(family, name, "refused", _reason(error))
        return Row(family, name, "not run", f"no small configuration: {type(error).__name__}")
    if isinstance(small, str):
        return Row(family, name, "not run", small)
    model = model_of(family)
    try:
        rf.hf.check_model(model)
    except ArgumentError as error:
        return Row(family, name, "refused", _reason(error))
    try:
        error = difference(model.double())
    except RuntimeError:  # its experts do not support float64
        error = difference(model_of(family))
    assert error <= BAR, f"{family}: {error}"
    return Row(family, name, "works")


def difference(model: Any) -> float:
    """Returns the largest relative error of logits and gradients on a ring, against the model's own attention."""
    ids = torch.randint(3, 60, (2, SEQLEN), generator=torch.Generator().manual_seed(2))
    context = rf.ContextParallel.local(RANKS)
    positions = context.positions(SEQLEN)[None]
    on_ring = _run(model, context, input_ids=context.shard(ids), position_ids=positions, ring_context=context)
    model.set_attn_implementation("eager")
    whole = _run(model, None, input_ids=ids)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(on_ring, whole, strict=True))


def table(rows: Iterable[Row]) -> str:
    """Returns the page with these rows."""
    import transformers

    rows = list(rows)
    works, refused = ([row.status for row in rows].count(status) for status in ("works", "refused"))
    counts = {"total": len(rows), "works": works, "refused": refused, "rest": len(rows) - works - refused}
    return HEAD.format(version=transformers.__version__, bar=BAR, **counts) + "".join(f"{row}\n" for row in rows)


def read_table() -> tuple[str, dict[str, Row]]:
    """Returns the version of transformers on the page, and the page's rows by family."""
    page = PAGE.read_text()
    version = re.search(r"transformers\s+(\d\S+) lists", page)
    assert version is not None
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return version[1], {row[0]: Row(*row) for row in cells[1:]}


def _config(family: str) -> str | None:
    """Returns the reason why a family has no small model here, or None if it has one."""
    from transformers import AutoModelForCausalLM

    rf.hf.register()
    config = config_of(family)
    if config.sub_configs:
        try:
            text = config.get_text_config()
        except ValueError:
            return "made of several models"
        if text is not config:
            return f"made of several models; its text model is `{text.model_type}`"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=rf.hf.NAME)
    size = sum(weight.numel() for weight in model.parameters())
    return f"no small configuration: {size // 10**6} million parameters" if size > MOST else None


def _reason(error: ArgumentError) -> str:
    return next((words for pattern, words in REASONS.items() if re.search(pattern, str(error))), str(error))


def _run(model: Any, context: rf.ContextParallel | None, **given: Any) -> list[Tensor]:
    """Returns the logits of the whole sequence, and the gradients of all weights."""
    model.zero_grad()
    logits = model(use_cache=False, **given).logits
    logits = logits if context is None else context.unshard(logits)
    dout = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.backward(dout.to(logits.dtype))
    return [logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def main(families: list[str]) -> None:
    """Runs these families and prints their rows; without names, runs all families and writes the page."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for family in families:
        print(row_of(family), flush=True)
    if not families:
        PAGE.write_text(table(row_of(family) for family in sorted(classes())))


if __name__ == "__main__":
    main(sys.argv[1:])
