"""Preferences: forms of rows, samples of pairs, a run by the command line, and what is refused."""

from __future__ import annotations

import csv
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ringflash.commands.main import main
from ringflash.errors import DataError
from ringflash.train.data.module import TextDataModule
from ringflash.train.data.prepare import Recipe, prepare
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.data.tokens import TokenFiles
from ringflash.train.preference.chat import PairChat
from ringflash.train.preference.data import PreferenceDataModule
from tests.helpers.programs import output_of
from tests.train.command_line import COMMAND
from tests.train.data.chats import MARKED, PLAIN, messages, write_chat_tokenizer, write_rows
from tests.train.data.corpora import write_tokenizer

pytest.importorskip("transformers")

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "q"), *[("assistant", x) for x in "gb"]))
EARLIER: list[Any] = messages("one", "two")["messages"]
# Templates that mark two parts of each turn of the assistant, and its last turn alone.
TWICE = MARKED.replace("<|im_end|>\n{% endgen", "{% endgeneration %}{% generation %}<|im_end|>\n{% endgen")
LAST = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
AS_TEXT = {"prompt": "q", "chosen": "g", "rejected": "b"}


def pairs_of(folder: Path, rows: list[Any], template: str = PLAIN) -> TokenFiles:
    model, source = write_chat_tokenizer(folder / "model", template), write_rows(folder / "rows.jsonl", rows)
    return prepare(str(source), folder / "to", Recipe(Tokenizer.load(model), chat=PairChat.load(model)))


def texts(tokens: TokenFiles, document: int) -> tuple[str, str]:
    """Returns the whole text of a document, and what is learnt of it."""
    length = int(tokens.lengths()[document])
    ids, learnt = tokens.read(document, 0, length), tokens.learnt(document, 0, length)
    assert learnt is not None
    return tokens.tokenizer.decode(ids.tolist()), tokens.tokenizer.decode(ids[learnt].tolist())


@pytest.mark.parametrize("template", [PLAIN, MARKED, TWICE, LAST], ids=["plain", "marked", "twice", "last"])
@pytest.mark.parametrize(
    ("row", "before"),
    [
        (AS_TEXT, []),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, []),
        ({"prompt": [*EARLIER, USER], "chosen": "g", "rejected": "b"}, EARLIER),
        ({"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, EARLIER),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, []),
        ({"prompt": [*EARLIER], "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, EARLIER),
    ],
    ids=["text", "messages", "mixed", "conversations", "conversations with text", "conversations with their beginning"],
)
def test_answers_alone_are_learnt(tmp_path: Path, row: Any, before: list[Any], template: str) -> None:
    tokens = pairs_of(tmp_path, [row], template)
    head = "<s>" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in [*before, USER])
    for document, answer in enumerate("gb"):
        text, learnt = texts(tokens, document)
        assert text == f"{head}<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert learnt == f"{answer}<|im_end|>\n"
    assert tokens.header.has_pairs


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "g"}, "--pairs: expected `prompt`, `chosen` and `rejected`.*got no `rejected`, of"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "got no `chosen`, of the fields chosen, prompt, rejected in"),
        ({"prompt": "q", "chosen": "g", "rejected": [BAD]}, "got a `rejected` of type list, of the fields"),
        ({"chosen": "g", "rejected": "b"}, "got no `prompt`, of the fields chosen, rejected in .*rows.jsonl, line 2"),
        ({"prompt": "q", "chosen": "g", "rejected": "g"}, "`rejected` that differ, got the same answer twice in"),
        ({"chosen": [USER, GOOD], "rejected": [EARLIER[0], BAD]}, "that share a prompt, got two with other beginnings"),
        (
            {"prompt": [EARLIER[0]], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "that share a prompt, got one that lacks messages of `prompt` in",
        ),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD, USER]},
            "^--pairs: .* and one of the assistant last, got the roles user, assistant, user, with `rejected`, in",
        ),
        ({"prompt": "q", "chosen": 7, "rejected": "b"}, "got a `chosen` of type int, of the fields"),
        ("text", "got no `chosen`, of the fields none in"),
    ],
)
def test_bad_rows(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pairs_of(tmp_path, [AS_TEXT, row])


def test_bad_rows_are_skipped_whole(tmp_path: Path) -> None:
    model, source = write_chat_tokenizer(tmp_path / "model"), tmp_path / "rows.jsonl"
    # The rejected answer alone is bad: its chosen one may not become half of another pair.
    write_rows(source, [AS_TEXT | {"chosen": [GOOD], "rejected": [BAD, USER]}, AS_TEXT])
    recipe = Recipe(Tokenizer.load(model), chat=PairChat.load(model), skip_bad=True)
    tokens = prepare(str(source), tmp_path / "to", recipe)
    assert [texts(tokens, document)[1][0] for document in range(tokens.header.num_documents)] == ["g", "b"]


def test_answers_that_render_alike_are_refused(tmp_path: Path) -> None:
    template = PLAIN.replace("m.content or ''", "(m.content or '') | trim")
    with pytest.raises(DataError, match="got two answers that the chat template renders alike in"):
        pairs_of(tmp_path, [AS_TEXT | {"rejected": "g "}], template)


def test_an_answer_without_text_is_refused(tmp_path: Path) -> None:
    template = PLAIN.replace("m.content or ''", "(m.content or '') | trim").replace("<|im_end|>\n", "")
    with pytest.raises(DataError, match="expected a token to learn in `rejected`, got none in"):
        pairs_of(tmp_path, [AS_TEXT | {"prompt": [*EARLIER, USER], "rejected": " "}], template)


def test_pairs_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"^--pairs: expected the library `transformers`, got none. Install ringflash\[hf\]."
    with pytest.raises(DataError, match=message):
        PairChat.load(tmp_path)


def test_files_of_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    chat = PairChat.load(write_chat_tokenizer(tmp_path / "model"))
    with pytest.raises(DataError, match=r"^--pairs: expected rows: .*got .*text.txt, a file of text"):
        prepare(str(tmp_path / "text.txt"), tmp_path / "to", Recipe(Tokenizer.load(tmp_path / "model"), chat=chat))


def module_of(tokens: TokenFiles, length: int, **options: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(str(tokens.folder), length, **options)
    data.setup("fit")
    return data


def test_samples_hold_whole_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [AS_TEXT | {"prompt": "ring " * (1 + i % 5), "rejected": "b" * (1 + i % 3)} for i in range(20)]
    tokens = pairs_of(tmp_path, [*rows, AS_TEXT | {"chosen": "x" * 200}])
    data = module_of(tokens, 64, val_fraction=0.2)
    assert "1 of 21 pairs are longer than context_length 64, and are left out" in caplog.text
    seen = []
    for samples in (data.train_samples(), data.val_samples()):
        for index in range(len(samples)):
            row = samples[index]
            ends, found = row["cu_seqlens"].tolist(), int(row["num_pairs"])
            assert found >= 1
            assert int((row["labels"] >= 0).sum()) == int(samples.num_labels([index])[0])
            for begin, end in list(pairwise(ends))[: 2 * found]:
                ids, labels = row["input_ids"][begin:end], row["labels"][begin:end]
                assert torch.equal(labels[:-1][labels[:-1] >= 0], ids[1:][labels[:-1] >= 0])
                assert labels[-1] == -100
                seen.append(tokens.tokenizer.decode(ids.tolist()))
            assert (row["labels"][ends[2 * found] :] == -100).all()
    documents = [texts(tokens, document)[0] for document in range(40)]
    assert sorted(zip(seen[::2], seen[1::2], strict=True)) == sorted(zip(documents[::2], documents[1::2], strict=True))
    assert len(data.val_samples()) >= 1
    padded = data.train_samples()[[0, -1]]
    assert padded["num_pairs"].tolist()[1] == 0
    assert padded["cu_seqlens"].shape[0] == 2


def test_other_corpora_are_refused(tmp_path: Path) -> None:
    tokens = pairs_of(tmp_path, [AS_TEXT] * 3)
    with pytest.raises(DataError, match="corpus: expected documents to learn, got .* Train on preferences with"):
        TextDataModule(str(tokens.folder), 16).setup("fit")
    (tmp_path / "text.txt").write_text("text " * 50)
    prepare(str(tmp_path / "text.txt"), tmp_path / "plain", Recipe(Tokenizer()))
    with pytest.raises(DataError, match="corpus: expected pairs of two answers, got .* documents of another kind"):
        PreferenceDataModule(str(tmp_path / "plain"), 16).setup("fit")
    with pytest.raises(DataError, match="corpus: expected more than 1 pairs of at most 16 tokens, got 0 of 3; the lon"):
        module_of(tokens, 16)


def test_an_answer_without_a_token_to_learn_is_refused(tmp_path: Path) -> None:
    # The tokenizer drops the only character of the answer, which the template ends with no token.
    model = write_chat_tokenizer(tmp_path / "model", PLAIN.replace("<|im_end|>\n", ""))
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    vocabulary["normalizer"] = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    source = write_rows(tmp_path / "rows.jsonl", [AS_TEXT | {"rejected": "~"}])
    tokens = prepare(str(source), tmp_path / "to", Recipe(Tokenizer.load(model), chat=PairChat.load(model)))
    message = "corpus: expected a token to learn in both answers .*, got none in the rejected answer of pair 0 of"
    with pytest.raises(DataError, match=message):
        module_of(tokens, 64, val_fraction=0.0)


def test_another_tokenizer_than_the_model_s_is_refused(tmp_path: Path) -> None:
    tokens = pairs_of(tmp_path / "data", [AS_TEXT] * 3)
    other = write_tokenizer(tmp_path / "other", special=("<s>",)).parent
    data = PreferenceDataModule(str(tokens.folder), 64)
    data.trainer = Mock(overfit_batches=0, lightning_module=Mock(init_from=str(other)))
    with pytest.raises(DataError, match=f"tokenizer: expected that of {other}, whose weights training begins with"):
        data.setup("fit")


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    folder = pairs_of(tmp_path, [AS_TEXT]).folder
    header = folder / "dataset.json"
    header.write_text(header.read_text().replace('"has_pairs": true', '"has_pairs": 1'))
    with pytest.raises(DataError, match="has_pairs: expected true or false, got 1"):
        TokenFiles(folder)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")
def test_the_commands_prepare_and_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, LlamaConfig

    monkeypatch.chdir(tmp_path)
    folder = write_chat_tokenizer(tmp_path / "model")
    vocabulary = Tokenizer.load(folder).vocab_size
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocabulary, **shape, **heads))
    model.save_pretrained(folder)
    write_rows(tmp_path / "rows.jsonl", [AS_TEXT | {"prompt": f"question {i}"} for i in range(8)])
    assert main(["prepare", "rows.jsonl", "--pairs", "--to", "pairs", "--tokenizer", "model", "--processes", "1"]) == 0
    assert "ringflash dpo: --data.corpus=pairs" in capsys.readouterr().out
    again = ["prepare", "rows.jsonl", "--pairs", "--to", "x", "--tokenizer", "model"]
    assert main([*again, "--chat"]) == 2
    assert main([*again, "--begin-of-document=</s>"]) == 2
    assert "--begin-of-document: expected none with --pairs, got </s>" in capsys.readouterr().err
    config = Path(__file__).parents[3] / "configs" / "dpo.yaml"
    fit = ["dpo", "fit", f"--config={config}", "--model.model=model", "--data.corpus=pairs", "--data.context_length=96"]
    fit += ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_steps=2", "--model.compute_dtype=auto"]
    assert main([*fit, "--model.beta=0"]) == 2
    assert "beta: expected a positive number, got 0.0" in capsys.readouterr().err
    fit += ["--trainer.log_every_n_steps=1", "--trainer.val_check_interval=1", "--loggers=[csv]"]
    assert "held-out loss" in output_of(["-m", COMMAND, *fit], tmp_path, ranks=2)
    with (tmp_path / "runs" / "dpo" / "metrics.csv").open() as log:
        rows = [*csv.DictReader(log)]
    assert float(next(row["train/loss"] for row in rows if row["train/loss"])) == pytest.approx(0.693147, rel=1e-5)
    assert {"train/accuracy", "train/reward_margin", "val/reward_chosen", "val/reward_rejected"} <= rows[0].keys()
    capsys.readouterr()
    assert main(["plan-memory", f"--config={config}", "--model.model=model", "--gpu-memory=80", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 65536 // 4
    assert main(["export", "--checkpoint=runs/dpo/checkpoints/last", "--to=tuned"]) == 0
    tuned = AutoModelForCausalLM.from_pretrained("tuned").state_dict()
    assert any(not torch.equal(tuned[name], weight) for name, weight in model.state_dict().items())
