"""Conversations: the ids are those of the chat template, and the learnt ones those of the assistant."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers

from ringflash.commands import main
from ringflash.errors import DataError
from ringflash.train.data.chat import Chat, Learn
from ringflash.train.data.module import TextDataModule
from ringflash.train.data.prepare import Recipe, make_shard, prepare, skipped_rows
from ringflash.train.data.sources import divide, find_sources
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.data.tokens import TokenFiles, shard_path
from tests.train.data.chats import (
    FORGETFUL,
    MARKED,
    PLAIN,
    RAW_CALLS,
    SILENT,
    STRICT,
    TRIMMED,
    messages,
    write_chat_tokenizer,
    write_rows,
)
from tests.train.data.corpora import documents

CALL = {"type": "function", "function": {"name": "turn", "arguments": {"times": None}}}
TOOL = {"type": "function", "function": {"name": "turn", "parameters": {}}}
ROWS = [
    messages("the ring", "turns", "and?", "around 環😀", system="be brief"),
    {"prompt": "ring?", "response": " around"},
    {
        "messages": [
            {"role": "user", "content": "turn"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "turned"},
            {"role": "assistant", "content": "", "name": None},
        ],
        "tools": [TOOL],
    },
]
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
# The text of each row in pieces, of which every second one is learnt.
TEXTS = [
    [
        f"<s><|im_start|>system\nbe brief<|im_end|>\n{USER}the ring<|im_end|>\n{ASSISTANT}",
        "turns<|im_end|>\n",
        f"{USER}and?<|im_end|>\n{ASSISTANT}",
        "around 環😀<|im_end|>\n",
    ],
    [f"<s>{USER}ring?<|im_end|>\n{ASSISTANT}", " around<|im_end|>\n"],
    [
        '<s><|im_start|>system\n[{"type": "function", "function": {"name": "turn", "parameters": {}}}]<|im_end|>\n'
        f"{USER}turn<|im_end|>\n{ASSISTANT}",
        '<call>{"name": "turn", "arguments": {"times": null}}<|im_end|>\n',
        f"<|im_start|>tool\nturned<|im_end|>\n{ASSISTANT}",
        "<|im_end|>\n",
    ],
]


def chats(
    folder: Path, rows: list[Any], template: str = PLAIN, learn: Learn = "assistant", **options: Any
) -> TokenFiles:
    model = write_chat_tokenizer(folder / "model", template)
    source = write_rows(folder / "rows.jsonl", rows)
    recipe = Recipe(Tokenizer.load(model), chat=Chat.load(model, learn))
    return prepare(str(source), folder / "to", recipe, **options)


def learnt(files: TokenFiles) -> list[list[bool]]:
    found = [files.learnt(i, 0, int(n)) for i, n in enumerate(files.lengths())]
    return [each.tolist() for each in found if each is not None]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_the_assistant_s_turns_are_learnt(tmp_path: Path, template: str) -> None:
    files = chats(tmp_path, ROWS, template)
    tokenizer = files.tokenizer
    for pieces, ids, flags in zip(TEXTS, documents(files), learnt(files), strict=True):
        expected = [(token, bool(i % 2)) for i, piece in enumerate(pieces) for token in tokenizer.encode(piece)]
        assert [*zip(ids, flags, strict=True)] == expected
    assert files.header.num_learnt == sum(map(sum, learnt(files)))
    theirs = transformers.AutoTokenizer.from_pretrained(files.folder / "tokenizer")
    options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": template == MARKED}
    for row, ids, flags in [*zip(ROWS, documents(files), learnt(files), strict=True)][::2]:
        given = theirs.apply_chat_template(row["messages"], tools=row.get("tools"), **options)
        assert given["input_ids"] == ids
        if template == MARKED:
            assert given["assistant_masks"] == flags


def test_all_turns_are_learnt(tmp_path: Path) -> None:
    files = chats(tmp_path, ROWS, FORGETFUL, "all")
    assert all(map(all, learnt(files)))
    assert files.header.num_learnt == len(files)


def test_a_turn_may_end_within_a_character_of_several_tokens(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    files = chats(tmp_path, [messages("ring", "turns 😀")], template)
    (ids,), (flags,) = documents(files), learnt(files)
    before = len(Tokenizer.load(tmp_path / "model").encode("ring"))
    assert flags == [False] * before + [True] * (len(ids) - before)


def test_a_process_that_gets_the_recipe_makes_the_same_shards(tmp_path: Path) -> None:
    files = chats(tmp_path, [messages(f"ring {i}?", f"turns {i}") for i in range(60)], shard_bytes=1500)
    assert len(files.header.shards) > 2
    recipe = pickle.loads(pickle.dumps(Recipe(files.tokenizer, chat=Chat.load(tmp_path / "model"))))
    for index, parts in enumerate(divide(find_sources(str(tmp_path / "rows.jsonl")), 1500)):
        header, was_there = make_shard(tmp_path / "made.bin", parts, recipe)
        assert (header, was_there) == (files.header.shards[index], False)
        assert (tmp_path / "made.bin").read_bytes() == shard_path(files.folder, index).read_bytes()


def test_tables_give_the_same_corpus(tmp_path: Path) -> None:
    rows = [messages(f"ring {i}?", f"turns {i}") for i in range(60)]
    one = chats(tmp_path, rows, shard_bytes=1500)
    recipe = Recipe(one.tokenizer, chat=Chat.load(tmp_path / "model"))
    turns = [[turn | {"tool_calls": None} for turn in row["messages"]] for row in rows]
    pq.write_table(pa.table({"id": range(60), "messages": turns, "tools": [None] * 60}), tmp_path / "rows.parquet")
    table = prepare(str(tmp_path / "rows.parquet"), tmp_path / "table", recipe)
    assert (documents(table), learnt(table)) == (documents(one), learnt(one))


def call(name: str, arguments: Any) -> dict[str, Any]:
    """Returns a row of a call of the tool `name`, which has a field of that name, and an answer."""
    turns = [{"role": "user", "content": "turn"}, {"role": "assistant", "content": None}]
    turns[1]["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    tool = {"type": "function", "function": {"name": name, "parameters": {name: {"type": "string"}}}}
    return {"messages": [*turns, {"role": "assistant", "content": "turned"}], "tools": [tool]}


def test_tables_give_a_call_no_arguments_of_other_calls(tmp_path: Path) -> None:
    rows = [call("turn", {"turn": "left"}), call("stop", {"stop": "now"})]
    lines = chats(tmp_path, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert read[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"turn": "left", "stop": None}
    recipe = Recipe(lines.tokenizer, chat=Chat.load(tmp_path / "model"))
    table = prepare(str(tmp_path / "rows.parquet"), tmp_path / "table", recipe)
    assert (documents(table), learnt(table)) == (documents(lines), learnt(lines))


def test_a_template_may_show_arguments_as_they_are(tmp_path: Path) -> None:
    tokens = chats(tmp_path, [call("a", '{"a": "b"}')], RAW_CALLS)
    assert '<call>a {"a": "b"}' in tokens.tokenizer.decode(documents(tokens)[0])


def test_a_message_may_name_arguments_as_python_writes_them(tmp_path: Path) -> None:
    row = call("a", {"a": "b"})
    row["messages"][0]["content"] = "call it with {'a': 'b'}"
    assert chats(tmp_path, [row]).lengths().tolist()


def test_weights_of_turns_that_are_not_learnt(tmp_path: Path) -> None:
    row = messages("a", "b")
    row["messages"][0]["weight"], row["messages"][1]["weight"] = 0, 1
    assert documents(chats(tmp_path, [row])) == documents(chats(tmp_path / "plain", [messages("a", "b")]))
    with pytest.raises(DataError, match="no `weight` of a turn to learn but 1, got 0 in message 0 in"):
        chats(tmp_path / "all", [row], learn="all")


def test_another_choice_of_turns_is_prepared_anew(tmp_path: Path) -> None:
    choices: list[tuple[str, Learn]] = [(PLAIN, "assistant"), (PLAIN, "all"), (MARKED, "assistant"), (MARKED, "all")]
    assert len({chats(tmp_path, ROWS[:1], *choice).header.key for choice in choices}) == 4
    assert (tmp_path / "to" / "tokenizer" / "chat_template.jinja").read_text().endswith(MARKED)


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"text": "a"}, PLAIN, "expected `messages` as a list, or .*got neither, of the fields text in .*line 2, byte"),
        (["a"], PLAIN, "of the fields none in"),
        ({"prompt": "a", "completion": None}, PLAIN, "of the fields completion, prompt in"),
        ({"messages": []}, PLAIN, "expected at least one message, got an empty list"),
        ({"messages": "a"}, PLAIN, "expected at least one message, got str"),
        ({"messages": ["a"]}, PLAIN, "expected messages with a `role`, .*got none in message 0"),
        ({"messages": [{"role": "user"}]}, PLAIN, "got none in message 0"),
        (
            {"messages": messages("a", "b")["messages"][1:]},
            PLAIN,
            "a turn of the user first, .*got the roles assistant in",
        ),
        (messages("a", "b", "c"), PLAIN, "one of the assistant last, got the roles user, assistant, user in"),
        (
            messages(*"abcdefghijk"),
            PLAIN,
            r"user, assistant, user, assistant, \.\.\., assistant, user, assistant, user in",
        ),
        (
            {"messages": [*messages("a")["messages"], *messages("a", "b")["messages"]]},
            STRICT,
            "got roles must alternate in",
        ),
        (
            messages("a", "b", "c", "d"),
            FORGETFUL,
            "one that changes the text before message 3 in .* Mark the .*generation",
        ),
        (messages("a", "b"), SILENT, "a template that shows the assistant's turns, got no text of the assistant in"),
        (messages("a", "b") | {"tools": [TOOL]}, SILENT, "got a template that ignores them in"),
        (messages("a", "b") | {"tools": "[]"}, PLAIN, "`tools` as a list, .*got str in"),
        (
            {
                "messages": [
                    *messages("a")["messages"],
                    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
                ]
            },
            TRIMMED,
            "contents as text, or a template that shows lists, got a list, shown as Python writes it, in message 1 in",
        ),
        (call("a", {"a": "b"}) | {"tools": None}, TRIMMED, "`tool_calls`, got one that ignores those of message 1 in"),
        (
            call("a", '{"a": "b"}'),
            PLAIN,
            "arguments of a call as an object, got text, shown as a string of JSON, in message 1 in",
        ),
        (
            call("a", {"a": "b"}),
            RAW_CALLS,
            "text, or a template that writes JSON, got an object, shown as Python writes it, in message 1 in",
        ),
        (
            {"messages": [*messages("a")["messages"], {"role": "assistant", "content": "b", "weight": 0}]},
            PLAIN,
            "no `weight` of a turn to learn but 1, got 0 in message 1 in",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "Gpt", "content": "b"},
                    *messages("c", "d")["messages"],
                ]
            },
            PLAIN,
            "the role 'assistant' of the assistant's turns, got 'Gpt' in",
        ),
    ],
)
def test_rows_that_are_no_conversations(tmp_path: Path, row: Any, template: str, message: str) -> None:
    good = [] if template == SILENT else ROWS[1:2]
    with pytest.raises(DataError, match=message):
        chats(tmp_path, [*good, row], template)
    assert not (tmp_path / "to" / "dataset.json").exists()


def test_rows_that_are_no_conversations_are_skipped(tmp_path: Path) -> None:
    swapped = {"messages": messages("a", "b")["messages"][::-1]}
    bad = [{"text": "a"}, swapped, {"messages": [*messages("a")["messages"], *messages("a", "b")["messages"]]}]
    model = write_chat_tokenizer(tmp_path / "model", STRICT)
    source = write_rows(tmp_path / "rows.jsonl", [bad[0], ROWS[0], bad[1], bad[2], ROWS[1]])
    recipe = Recipe(Tokenizer.load(model), chat=Chat.load(model), skip_bad=True)
    files = prepare(str(source), tmp_path / "to", recipe)
    alone = prepare(str(write_rows(tmp_path / "good.jsonl", ROWS[:2])), tmp_path / "alone", recipe)
    assert (documents(files), learnt(files)) == (documents(alone), learnt(alone))
    total, first = skipped_rows(files.folder, 9)
    assert total == 3
    for row, line, reason in zip(first, (1, 3, 4), ("neither", "roles assistant, user", "must alternate"), strict=True):
        assert f"rows.jsonl, line {line}, byte " in row
        assert reason in row


def test_a_run_keeps_the_template(tmp_path: Path) -> None:
    files = chats(tmp_path, ROWS)
    data = TextDataModule(str(files.folder), context_length=16)
    data.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        lightning_module=None, loggers=[None], log_dir=str(tmp_path / "run"), is_global_zero=True
    )
    data.setup("fit")
    kept = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer")
    ids = kept.apply_chat_template(ROWS[0]["messages"], return_dict=True)["input_ids"]
    assert ids == documents(files)[0]  # with the token that opens the text, which the run's configuration lacks


def test_tokenizers_without_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_chat_tokenizer(tmp_path / "model", None)
    for named in ("bytes", model, model / "tokenizer.json"):
        with pytest.raises(DataError, match="--tokenizer: expected a tokenizer with a chat template, got .*, without"):
            Chat.load(named)
    with pytest.raises(DataError, match="--tokenizer: expected a tokenizer that transformers loads, got .*nowhere: "):
        Chat.load(tmp_path / "nowhere" / "model")
    (model / "code.py").write_text("raise SystemExit('code of the folder')")
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Its", null]}}')
    with pytest.raises(DataError):
        Chat.load(model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        DataError, match=r"--chat: expected the library `transformers`, got none. Install ringflash\[hf\]"
    ):
        Chat.load(model)


def test_tokens_of_the_template_that_other_files_add(tmp_path: Path) -> None:
    template = PLAIN.replace("im_start", "turn")
    model = write_chat_tokenizer(tmp_path / "model", template)
    (model / "added_tokens.json").write_text(json.dumps({"<|turn|>": Tokenizer.load(model).vocab_size}))
    with pytest.raises(
        DataError, match=r"tokenizer.json with all tokens .* whose other files add <\|turn\|>. Write it"
    ):
        Chat.load(model)
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    theirs.save_pretrained(tmp_path / "saved")
    text = Chat.load(tmp_path / "saved").prompt("ring?")
    assert Tokenizer.load(tmp_path / "saved").encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_tokens_that_the_template_names_and_other_files_add(tmp_path: Path) -> None:
    model = write_chat_tokenizer(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<begin>"}))
    with pytest.raises(DataError, match="whose other files add <begin>. Write it"):
        Chat.load(model)
    (model / "chat_template.jinja").write_text(PLAIN.replace("{{ bos_token }}", ""))
    Chat.load(model)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = write_chat_tokenizer(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", ROWS * 5)
    command = ["prepare", str(rows), "--to", str(tmp_path / "to"), "--tokenizer", str(model), "--processes=1"]
    assert main.main([*command, "--learn=all"]) == 2
    assert "--learn: expected --chat beside it, got none" in capsys.readouterr().err
    assert main.main([*command, "--chat"]) == 0
    files = TokenFiles(tmp_path / "to")
    assert (
        f"{len(files):,} tokens, {files.header.num_learnt} of them to learn, in 15 documents" in capsys.readouterr().out
    )
    (tmp_path / "text.txt").write_text("text")
    command[1] = str(tmp_path / "text.txt")
    assert main.main([*command, "--chat"]) == 2
    assert (
        "--chat: expected rows: .jsonl, .ndjson or .parquet files, or saved data sets, got" in capsys.readouterr().err
    )
    assert main.main(command) == 0
    assert not (tmp_path / "to" / "tokenizer" / "chat_template.jinja").exists()
