"""Conversations: rows as messages, rendered by a tokenizer's chat template, and the text that training learns."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from ringflash.errors import DataError
from ringflash.train.data.sources import MAX_LINE, BadRow, Part, Skip, field_names, read_rows
from ringflash.train.data.tokenizer import BYTES, MODEL_FILE, Tokenizer

CHAT_TEMPLATE = "chat_template.jinja"  # transformers' name
FIELDS = ("messages", "tools", "prompt", "completion", "response")
ASSISTANT, INTRODUCTION = "assistant", ("system", "developer")
OTHER_NAMES = ("assistant", "ai", "bot", "chatgpt", "gpt", "model")  # of the assistant, in other forms of rows
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "Mark the assistant's text in the template with {% generation %} and {% endgeneration %}."

Learn = Literal["assistant", "all"]
Spans = list[tuple[int, int]]  # begin and end of pieces of a text, in characters


@dataclass(frozen=True)
class Chat:
    """Chat template, and the choice of turns to learn.

    Args:
        template: template in Jinja. It sets the special tokens that it uses, so that it needs no tokenizer.
        learn: "assistant" for the assistant's turns, "all" for all turns.
    """

    template: str
    learn: Learn = ASSISTANT
    option: ClassVar[str] = "--chat"  # of `ringflash prepare`
    fields: ClassVar[Sequence[str]] = FIELDS  # of rows
    has_pairs: ClassVar[bool] = False  # whether a row holds two conversations, and so makes two documents

    @classmethod
    def load(cls, tokenizer: str | Path, learn: Learn = ASSISTANT) -> Self:
        """Loads the chat template of a tokenizer's folder, or of the folder of its tokenizer.json.

        Raises:
            DataError: the tokenizer has no chat template, transformers cannot load it, or is missing. Or the template
                shows a token that transformers adds from other files, and the tokenizer.json lacks.
        """
        path = Path(tokenizer).expanduser()
        folder = path if path.is_dir() else path.parent
        if str(tokenizer) == BYTES:
            raise _no_template(BYTES)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            remedy = "Install ringflash[hf]."
            raise DataError(cls.option, expected="the library `transformers`", got="none", remedy=remedy) from error
        try:
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises many classes
            expected, remedy = "a tokenizer that transformers loads", "Name a folder of tokenizer.save_pretrained."
            raise DataError("--tokenizer", expected=expected, got=f"{folder}: {error}", remedy=remedy) from error
        try:
            template = loaded.get_chat_template()
        except ValueError as error:
            raise _no_template(str(folder)) from error
        added = _added_tokens(folder / MODEL_FILE if path.is_dir() else path)
        tokens = {name: token for name, token in loaded.special_tokens_map.items() if name in template}
        shown = [token for token in loaded.get_added_vocab() if token in template or token in tokens.values()]
        if added is not None and (lacking := [token for token in shown if token not in added]):
            raise DataError(
                "--tokenizer",
                expected=f"a {MODEL_FILE} with all tokens that the chat template shows",
                got=f"{folder}, whose other files add {', '.join(lacking[:3])}",
                remedy="Write it anew: AutoTokenizer.from_pretrained(folder).save_pretrained(new_folder).",
            )
        # A newline follows, because Jinja drops one after a block.
        names = [
            f"{{% set {name} = {json.dumps(str(token), ensure_ascii=False)} %}}\n" for name, token in tokens.items()
        ]
        return cls("".join(names) + template, learn)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines a conversation's text and the learnt part of it."""
        return hashlib.sha256(f"{self.learn}\0{self.template}".encode()).hexdigest()

    def read(self, part: Part, max_line: int = MAX_LINE, skip: Skip | None = None) -> Iterator[tuple[str, Spans]]:
        """Returns the text of each conversation of a part, and the spans of it that are learnt; see `read_rows`.

        Raises:
            DataError: a source has no rows, or a row is no conversation (see `messages_of`). Or the template does not
                render it, shows no turn of the assistant, changes the text before a message, leaves out calls of tools,
                or shows contents or arguments as Python or JSON writes them.
        """
        if part.source.kind == "text":
            raise DataError(
                self.option,
                expected="rows: .jsonl, .ndjson or .parquet files, or saved data sets",
                got=f"{part.source.path}, a file of text",
                remedy="Leave it out, for instance with a glob: folder/*.jsonl.",
            )
        is_table = part.source.kind != "lines"

        def render(row: Any) -> Sequence[tuple[str, Spans]]:
            return self._render_row(without_nulls(row) if is_table else row)

        return chain.from_iterable(read_rows(part, self.fields, render, max_line, skip))

    def prompt(self, question: str) -> str:
        """Returns a user's message as the template renders it, up to the beginning of the assistant's turn.

        Raises:
            DataError: the template does not render it.
        """
        try:
            return self._apply([[{"role": "user", "content": question}]], None, add_generation_prompt=True)[0][0]
        except BadRow as bad:
            raise DataError(bad.argument, expected=bad.expected, got=bad.got, remedy=bad.remedy) from bad

    def turn_end(self, tokenizer: Tokenizer) -> int | None:
        """Returns the special token with which the template ends the assistant's turn; None if it shows none there.

        Raises:
            DataError: the template renders no conversation of one question and one answer, or transformers is missing.
        """
        answer = "forty-two"  # no template writes it on its own
        messages = [{"role": "user", "content": "What is six times seven?"}, {"role": ASSISTANT, "content": answer}]
        try:
            text = self._apply([messages], None)[0][0]
        except (BadRow, ImportError) as error:
            remedy = "Install ringflash[hf], or set eos_token_id in the generation_config.json of the folder."
            raise DataError(CHAT_TEMPLATE, expected="a turn to render", got=str(error), remedy=remedy) from error
        after = tokenizer.encode(text.rpartition(answer)[2])
        return next((token for token in after if token in tokenizer.special_tokens), None)

    def _render_row(self, row: Any) -> Sequence[tuple[str, Spans]]:
        """Returns the conversations of a row, rendered."""
        return [self._render(row)]

    def _render(self, row: Any) -> tuple[str, Spans]:
        messages, tools = messages_of(row, self.learn), row.get("tools")
        if tools and (not isinstance(tools, list) or not re.search(r"\btools\b", self.template)):
            got = type(tools).__name__ if not isinstance(tools, list) else "a template that ignores them"
            remedy = "Leave `tools` out, or write them as a list of JSON schemas for a template that shows them."
            raise BadRow("--chat", "`tools` as a list, and a template that shows them", got, remedy)
        if self.learn == "all":
            text = self._apply([messages], tools)[0][0]
            spans = [(0, len(text))]
        elif MARKER.search(self.template):
            ((text,), (spans,)) = self._apply([messages], tools, return_assistant_tokens_mask=True)
        else:
            text, spans = self._spans_between(messages, tools)
        if not any(begin < end for begin, end in spans):
            raise BadRow("--tokenizer", "a template that shows the assistant's turns", "no text of the assistant", MARK)
        self._check_shown(messages, text)
        return text, spans

    def _check_shown(self, messages: Sequence[dict[str, Any]], text: str) -> None:
        """Raises BadRow for what a template leaves out, or writes as a string of Python or JSON, without an error."""
        said = [value for message in messages for value in message.values() if isinstance(value, str)]
        for index, message in enumerate(messages):
            content, calls = message.get("content"), message.get("tool_calls")
            if content and isinstance(content, list) and str(content) in text:
                expected, remedy = "contents as text, or a template that shows lists", "Join the list's texts."
                raise BadRow("--chat", expected, f"a list, shown as Python writes it, in message {index}", remedy)
            if calls and not re.search(r"\btool_calls\b", self.template):
                remedy = "Write the calls into `content`, or leave the row out."
                got = f"one that ignores those of message {index}"
                raise BadRow("--chat", "a template that shows `tool_calls`", got, remedy)
            given = _arguments(calls)
            if any(json.dumps(x, ensure_ascii=False) in text for x in given if isinstance(x, str)):
                expected, remedy = "arguments of a call as an object", "Write them as an object, not as JSON in text."
                raise BadRow("--chat", expected, f"text, shown as a string of JSON, in message {index}", remedy)
            shown = [fields for x in given if isinstance(x, dict) and (fields := str(x)) in text]
            if any(not any(fields in value for value in said) for fields in shown):
                expected, remedy = "arguments of a call as text, or a template that writes JSON", "Write them as JSON."
                raise BadRow("--chat", expected, f"an object, shown as Python writes it, in message {index}", remedy)

    def _spans_between(self, messages: list[Any], tools: Any) -> tuple[str, Spans]:
        """Finds each assistant's turn between the texts up to it and with it, which must begin the whole text."""
        turns = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        before = self._apply([messages[:turn] for turn in turns], tools, add_generation_prompt=True)[0]
        through = self._apply([messages[: turn + 1] for turn in turns], tools)[0]
        prefixes = [text for pair in zip(before, through, strict=True) for text in pair]
        for number, (one, following) in enumerate(pairwise(prefixes)):
            if not following.startswith(one):
                turn = turns[(number + 1) // 2]
                expected = "a chat template that only adds text for a further message"
                raise BadRow("--tokenizer", expected, f"one that changes the text before message {turn}", MARK)
        return through[-1], [(len(a), len(b)) for a, b in zip(before, through, strict=True)]

    def _apply(self, conversations: Sequence[Any], tools: Any, **options: bool) -> tuple[list[str], list[Spans]]:
        """Returns the text of each conversation, and the spans between generation markers if they are asked for."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            result: Any = render_jinja_template(list(conversations), tools or None, None, self.template, **options)
        except Exception as error:  # a template may raise anything
            remedy = "Correct the order of roles and the contents, or leave the row out."
            raise BadRow("--chat", "messages that the chat template takes", f"{error!s}", remedy) from error
        return result


def messages_of(row: Any, learn: Learn = ASSISTANT) -> list[dict[str, Any]]:
    """Returns the messages of a row: its "messages", or its "prompt" and its "completion" or "response".

    Raises:
        BadRow: neither form, no message, one without a role or content, one to learn with a weight, another name of
            the assistant, an assistant's turn first, or another's last.
    """
    known = row if isinstance(row, dict) else {}
    if (messages := known.get("messages")) is None:
        prompt, answer = known.get("prompt"), known.get("completion", known.get("response"))
        if not isinstance(prompt, str) or not isinstance(answer, str):
            expected = "`messages` as a list, or `prompt` and `completion` or `response` as text"
            got, remedy = f"neither, of the fields {field_names(row)}", "Rename or convert the fields of the rows."
            raise BadRow("--chat", expected, got, remedy)
        messages = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": answer}]
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if isinstance(messages, list) else type(messages).__name__
        raise BadRow("--chat", "at least one message", got, "Leave the row out.")
    # Tables write fields that only some messages have as None.
    messages = [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        if isinstance(message, dict)
        else message
        for message in messages
    ]
    for index, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        says = isinstance(fields.get("content"), str | list) or fields.get("tool_calls")
        if not isinstance(fields.get("role"), str) or not says:
            expected = "messages with a `role`, and `content` or `tool_calls`"
            raise BadRow("--chat", expected, f"none in message {index}", "Correct the message or leave the row out.")
        if (learn == "all" or fields["role"] == ASSISTANT) and fields.get("weight", 1) != 1:
            expected, got = "no `weight` of a turn to learn but 1", f"{fields['weight']!r} in message {index}"
            remedy = "Cut the conversation before this turn, or take `weight` out to learn the turn."
            raise BadRow("--chat", expected, got, remedy)
    roles: list[str] = [message["role"] for message in messages]  # pyright: ignore[reportAssignmentType] - checked
    if unlike := [role for role in roles if role != ASSISTANT and role.strip().lower() in OTHER_NAMES]:
        remedy = "Rename the role: turns of any other role are rendered, but not learnt."
        raise BadRow("--chat", f"the role {ASSISTANT!r} of the assistant's turns", repr(unlike[0]), remedy)
    first = next((role for role in roles if role not in INTRODUCTION), ASSISTANT)
    if first == ASSISTANT or roles[-1] != ASSISTANT:
        expected = "a turn of the user first, after any system message, and one of the assistant last"
        got = f"the roles {', '.join(roles if len(roles) < 9 else [*roles[:4], '...', *roles[-4:]])}"
        raise BadRow("--chat", expected, got, "Cut the conversation to end with an answer, or leave it out.")
    return messages


def without_nulls(value: Any) -> Any:
    """Leaves out fields that are None in a table's row: tables give each struct the fields of all others.

    Without this, the arguments of a call would name those of every other function. Messages keep an empty content.
    """
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    is_message = "role" in value
    kept = {name: x for name, x in value.items() if x is not None or (is_message and name == "content")}
    return {name: without_nulls(x) for name, x in kept.items()}


def _added_tokens(file: Path) -> frozenset[str] | None:
    """Returns the added tokens of a tokenizer.json; None if it cannot be read, of which `Tokenizer.load` informs."""
    try:
        return frozenset(token["content"] for token in json.loads(file.read_text(encoding="utf-8"))["added_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _arguments(calls: Any) -> list[Any]:
    """Returns the arguments of a message's calls that have fields: objects, or texts of one, as OpenAI has them."""
    functions = [call.get("function", call) for call in calls or () if isinstance(call, dict)]
    given = [function.get("arguments") for function in functions if isinstance(function, dict)]
    texts = [text for text in given if isinstance(text, str) and text.lstrip().startswith("{") and '"' in text]
    return [*texts, *(fields for fields in given if isinstance(fields, dict) and fields)]


def _no_template(got: str) -> DataError:
    remedy = f"Name the folder of a chat model's tokenizer, or write a template to its {CHAT_TEMPLATE}."
    return DataError(
        "--tokenizer", expected="a tokenizer with a chat template", got=f"{got}, without one", remedy=remedy
    )
