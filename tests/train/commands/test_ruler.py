"""`ringflash ruler` on checkpoints and exported folders, alone and over a ring; an exported folder in lm_eval."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringflash.commands.main import main as ringflash
from ringflash.errors import ArgumentError
from ringflash.train.checkpoint.load import load_decoder
from ringflash.train.checkpoint.save import save
from ringflash.train.commands import ruler
from ringflash.train.commands.ruler import Prompts, check_positions, main
from ringflash.train.data.chat import Chat
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.models.config import ModelConfig, RopeScaling
from ringflash.train.models.decoder import Decoder
from tests.helpers.distributed import run_ranks
from tests.train.data.chats import write_chat_tokenizer

pytestmark = pytest.mark.xdist_group("ruler")

POSITIONS = 2048
ARGUMENTS = ["--seqlens", "1000", "1100", "--tasks", "fwe", "niah_single_1", "--samples", "2", "--device", "cpu"]


def _save(folder: str) -> None:
    """Writes a run with random weights, wide enough that the likeliest token is clear, and the run's tokenizer."""
    tokenizer = Tokenizer.load(Path(folder) / "tokenizer")
    config = ModelConfig(tokenizer.vocab_size + 3, 32, 1, 2, 1, 48, max_position_embeddings=POSITIONS)
    decoder = Decoder(config, seed=3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1 if parameter.ndim == 1 else 15)
    state = {f"_decoder.{name}": value for name, value in decoder.state_dict().items()}
    save({"state_dict": state, "model_config": asdict(config)}, Path(folder) / "checkpoints" / "last")


def _run(checkpoint: str, file: str) -> int:
    return main(["--checkpoint", checkpoint, *ARGUMENTS, "--json", file])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_chat_tokenizer(folder / "tokenizer")
    run_ranks(1, _save, str(folder))
    exported = ["export", "--checkpoint", str(folder / "checkpoints" / "last"), "--to", str(folder / "exported")]
    assert ringflash(exported) == 0
    return folder


def test_alone_on_a_ring_and_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, exported = str(run / "checkpoints" / "last"), str(run / "exported")
    assert run_ranks(2, _run, checkpoint, str(run / "ring.json")) == [0, 0]
    for name, folder in (("alone", checkpoint), ("exported", exported)):
        assert _run(folder, str(run / f"{name}.json")) == 0
        printed = capsys.readouterr().out
        assert "1,000" in printed
        assert re.search(r"fwe .* 0\.0 .* 0\.0", printed)
        assert "mean" in printed
    alone, ring, of_folder = (json.loads((run / f"{x}.json").read_text()) for x in ("alone", "ring", "exported"))
    assert alone["results"] == ring["results"] == of_folder["results"]
    assert (alone["ranks"], ring["ranks"], alone["samples"], alone["seed"]) == (1, 2, 2, 0)
    cells = [(each["task"], each["length"], each["score"]) for each in alone["results"]]
    assert cells == [(task, length, 0.0) for length in (1000, 1100) for task in ("fwe", "niah_single_1")]
    texts = [text for each in alone["results"] for text in each["texts"]]
    assert len({*texts}) > 1
    assert all(len(each["answers"]) == 2 for each in alone["results"])


def oracle(tokenizer: Tokenizer, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Answers by reading the prompts: the needle of the last key, right in the first prompt of a batch only."""
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    keys = [re.findall(r"for (\S+) mentioned", text)[-1] for text in texts]
    found = [re.findall(rf"for {key} is: (\d+)\.", text) for key, text in zip(keys, texts, strict=True)]
    return [torch.tensor(tokenizer.encode(f" {found[0][0]}.")) for _ in texts]


def test_right_answers_count(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, sampled = Tokenizer.load(run / "tokenizer"), []

    def answer(decoder: Decoder, prompts: Sequence[Tensor], new_tokens: int, sampling: Any, **_: Any) -> list[Tensor]:
        sampled.append((new_tokens, sampling))
        return oracle(tokenizer, prompts)

    monkeypatch.setattr(ruler, "continue_prompts", answer)
    rest = ["--tasks", "niah_multikey_1", "--seqlens", "1500", "--samples", "4", "--json", str(tmp_path / "new" / "x")]
    for batch, expected in ((1500, 100.0), (2**16, 25.0)):
        monkeypatch.setattr(ruler, "BATCH_TOKENS", batch)
        assert main(["--checkpoint", str(run / "exported"), "--chat-template", "--device", "cpu", *rest]) == 0
        (result,) = json.loads((tmp_path / "new" / "x").read_text())["results"]
        assert result["score"] == expected
        assert f" {expected} " in capsys.readouterr().out
    new_tokens, sampling = sampled[0]
    assert new_tokens == 128
    assert (sampling.temperature, sampling.vocab_size) == (0, tokenizer.vocab_size)
    assert tokenizer.decode([sampling.stop_token]) == "<|im_end|>"
    assert Prompts(tokenizer).sampling.stop_token == tokenizer.end_of_document


def test_prompts_of_a_chat_and_of_a_tokenizer_with_a_first_token(run: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(run / "tokenizer")
    chat = Prompts(tokenizer, chat=Chat.load(run / "tokenizer")).encode("Which?", " This:")
    assert tokenizer.decode(chat) == "<s><|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n This:"
    content = json.loads((run / "tokenizer" / "tokenizer.json").read_text())
    begin = tokenizer.encode("<s>")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": begin, "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with_first = Tokenizer.load(tmp_path)
    assert (with_first.prefix, tokenizer.prefix, Tokenizer().prefix) == (begin, [], [])
    plain = Prompts(with_first, tuple(with_first.prefix)).encode("Which?", " This:")
    assert plain == [*begin, *tokenizer.encode("Which? This:")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "niah_single1"], r"--tasks: expected .*got 'niah_single1'\. Did you mean niah_single_1\?"),
        (["--seqlens", "4096", "300"], r"--seqlens: expected at least \d+ tokens for niah_single_1, got 300"),
        (["--tasks", "vt", "--seqlens", "2049"], r"--seqlens: expected at most 2048, the model's positions, got 2049"),
        (["--samples", "0"], "--samples: expected at least 1, got 0"),
        (["--tokenizer", "nowhere"], "tokenizer: expected .*got 'nowhere'"),
        (["--checkpoint", "nowhere"], "--checkpoint: expected a folder of .*got nowhere, no folder"),
    ],
)
def test_bad_arguments(run: Path, options: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        main(["--checkpoint", str(run / "exported"), "--device", "cpu", *options])


def test_dynamic_scaling_has_more_positions_than_its_configuration_says() -> None:
    shape = ModelConfig(61, 32, 1, 2, 1, 48, rope_scaling=RopeScaling("dynamic", 2.0, 32), max_position_embeddings=32)
    check_positions(shape, 64)
    with pytest.raises(ArgumentError, match="at most 64, the model's positions, got 65"):
        check_positions(shape, 65)
    check_positions(ModelConfig(61, 32, 1, 2, 1, 48), 10**9)


def test_folders_without_a_tokenizer(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run / "exported", tmp_path / "exported")
    (tmp_path / "exported" / "tokenizer.json").unlink()
    assert ringflash(["ruler", "--checkpoint", str(tmp_path / "exported")]) == 2
    assert 'tokenizer: expected "bytes", a tokenizer.json or a folder with one' in capsys.readouterr().err
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    assert ringflash(["ruler", "--checkpoint", str(tmp_path / "checkpoints" / "last")]) == 2
    assert "tokenizer: expected a folder tokenizer in" in capsys.readouterr().err


LOCAL_TASK = """
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
metadata: {version: 1}
"""


def test_an_exported_folder_in_lm_eval_has_the_loss_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    """Runs the harness on a task of two local texts, and compares its bits a byte with those of the decoder."""
    pytest.importorskip("lm_eval")
    texts = ["the ring turns and turns\n" * 3, "around the ring"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "local.yaml").write_text(LOCAL_TASK.replace("TEXTS", str(tmp_path / "texts.jsonl")))
    arguments = f"--model hf --model_args pretrained={run / 'exported'},dtype=float32 --tasks local --device cpu"
    more = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--batch_size", "1"]
    offline = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", *arguments.split(), *more]
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(file.read_text())["results"]["local"]["bits_per_byte,none"]
    decoder, tokenizer = load_decoder(run / "checkpoints" / "last"), Tokenizer.load(run / "tokenizer")
    loss = 0.0
    for text in texts:
        ids = torch.tensor([[tokenizer.end_of_document, *tokenizer.encode(text)]])
        with torch.no_grad():
            logits = decoder(ids[:, :-1], torch.arange(ids.shape[1] - 1))
        loss += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
    assert found == pytest.approx(loss / math.log(2) / sum(len(text.encode()) for text in texts), rel=1e-4)
