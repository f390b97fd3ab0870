"""Exported folders: transformers generates the same text and stops at the same token, for both kinds of models."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ringflash.commands import main
from ringflash.errors import CheckpointError
from ringflash.train.checkpoint.load import load_decoder
from ringflash.train.checkpoint.save import save
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.lightning.transformers_model import TransformersModel
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.generate import Sampling, continue_prompts
from tests.helpers.distributed import run_ranks
from tests.train.data.corpora import write_tokenizer

transformers = pytest.importorskip("transformers")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "the ring turns"


def _save(folder: str, checkpoint: dict[str, Any]) -> None:
    save(checkpoint, Path(folder))


def own_generation(path: Path, tokenizer: Tokenizer) -> list[int]:
    decoder, prompt = load_decoder(path), torch.tensor(tokenizer.encode(PROMPT))
    return continue_prompts(decoder, [prompt], 12, Sampling(0, vocab_size=tokenizer.vocab_size))[0].tolist()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns the folder of a run with its own tokenizer and a chat template."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "made"))
    tokenizer.save(tmp_path / "run" / "tokenizer")
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "run"


def test_an_exported_decoder_generates_and_stops_as_the_run_does(run: Path, tmp_path: Path) -> None:
    tokenizer, path = Tokenizer.load(run / "tokenizer"), run / "checkpoints" / "last"
    end = tokenizer.end_of_document
    config = ModelConfig(tokenizer.vocab_size + 3, 32, 2, 2, 1, 48, max_position_embeddings=64)
    torch.manual_seed(0)
    decoder = Decoder(config)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, 1 if parameter.ndim == 1 else 0, 0.3)
    head = decoder.state_dict()["lm_head.weight"]
    new: list[int] = []
    for _ in range(2):  # the second save's head ends the text at the fifth token or before
        state = {f"_decoder.{name}": value for name, value in decoder.state_dict().items()}
        run_ranks(1, _save, str(path), {"state_dict": state, "model_config": asdict(config)})
        new = own_generation(path, tokenizer)
        if end not in new:
            head[[end, new[4]]] = head[[new[4], end]]
    assert end in new
    umask = os.umask(0o022)
    try:
        assert main.main(["export", "--checkpoint", str(path), "--to", str(tmp_path / "out")]) == 0
    finally:
        os.umask(umask)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = loaded(PROMPT, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == tokenizer.encode(PROMPT)
    assert loaded.eos_token_id == end
    assert loaded.chat_template == TEMPLATE
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id == end
    assert model.generation_config.pad_token_id == end
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    out = model.generate(**given, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert out == new[: new.index(end) + 1]
    for file in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_transformers_model_exports_with_equal_logits(
    run: Path, tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path, end = run / "checkpoints" / "last", Tokenizer.load(run / "tokenizer").end_of_document
    config = transformers.Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    module = TransformersModel(config)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = {f"_decoder.{name}": value for name, value in model.state_dict().items()}
    run_ranks(1, _save, str(path), {"state_dict": state, "model_config": module.model_fields()})
    export = ["export", "--checkpoint", str(path), "--to", str(tmp_path / "out"), "--max-position-embeddings", "65536"]
    assert main.main(export) == 0
    assert "qwen2" in capsys.readouterr().out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.config.max_position_embeddings == 65536
    x = torch.arange(40)[None] % 61
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)
    assert loaded.generation_config.eos_token_id == end
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == end
    with pytest.raises(CheckpointError, match=r"got one of TransformersModel \(qwen2\)\. `ringflash export` writes"):
        load_decoder(path)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
FACTORS = [1.0 + i / 8 for i in range(8)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": FACTORS, "long_factor": FACTORS}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("llama", {**SMALL, "rope_parameters": {**YARN, "factor": 4.0}}, None),
        ("llama", {**SMALL, "rope_parameters": {**YARN, "factor": None}}, "the RoPE depends on it"),
        (
            "llama",
            {**SMALL, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            "the RoPE depends on it",
        ),
        (
            "phi3",
            {**SMALL, "original_max_position_embeddings": 16, "pad_token_id": 0, "rope_parameters": LONGROPE},
            "the RoPE depends on it",
        ),
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2}, "transformer.wpe.weight has a row a position"),
    ],
)
def test_another_length_is_refused_where_it_would_change_the_model(
    run: Path,
    tmp_path: Path,
    kind: str,
    options: dict[str, Any],
    reason: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, x = run / "checkpoints" / "last", torch.arange(50)[None] % 61
    config = transformers.AutoConfig.for_model(kind, vocab_size=300, max_position_embeddings=64, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = {f"_decoder.{name}": value for name, value in model.state_dict().items()}
    run_ranks(1, _save, str(path), {"state_dict": state, "model_config": TransformersModel(config).model_fields()})
    export = ["export", "--checkpoint", str(path), "--to", str(tmp_path / "out"), "--max-position-embeddings"]
    if reason is not None:
        assert main.main([*export, "4096"]) == 2
        assert f"expected 64: {reason}, got 4096. Leave it out" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert main.main([*export, "64" if reason else "4096"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)


TURNS = "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize("template", [TURNS, "{{ messages[7].content }}"])
def test_a_chat_model_stops_at_the_end_of_a_turn_and_pads_as_before(
    tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_tokenizer(tmp_path / "made", special=("<|turn|>", "<|end|>", "<|pad|>"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": {"content": "<|pad|>"}}
    (made.parent / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(made)
    tokenizer.save(tmp_path / "run" / "tokenizer")
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text(template)
    shape = ModelConfig(tokenizer.vocab_size, 32, 1, 2, 1, 48, max_position_embeddings=64)
    state = {f"_decoder.{name}": value for name, value in Decoder(shape).state_dict().items()}
    path = tmp_path / "run" / "checkpoints" / "last"
    run_ranks(1, _save, str(path), {"state_dict": state, "model_config": asdict(shape)})
    assert main.main(["export", "--checkpoint", str(path), "--to", str(tmp_path / "out")]) == 0
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    end, turn, pad = loaded.convert_tokens_to_ids(["</s>", "<|end|>", "<|pad|>"])
    ends = [end, turn] if template == TURNS else end
    assert ("stops at the end of a document alone" in capsys.readouterr().err) == (template != TURNS)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == ends
    assert (model.generation_config.pad_token_id, loaded.pad_token_id) == (pad, pad)
    assert loaded(["the ring turns and turns", "the"], padding=True)["input_ids"][1][-1] == pad
