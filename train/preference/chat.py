"""Preferences: rows of a prompt with a chosen and a rejected answer, rendered as two conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ringflash.train.data.chat import ASSISTANT, MARKER, Chat, Spans
from ringflash.train.data.sources import BadRow, field_names

ANSWERS = ("chosen", "rejected")
FORMS = "`prompt`, `chosen` and `rejected`, each as text or as a list of messages"

Messages = list[Any]


@dataclass(frozen=True)
class PairChat(Chat):
    """Chat template for rows with two answers; a row makes two documents, the chosen conversation first.

    Only the answers are learnt. Turns of the assistant in the prompt are the same in both conversations, so their
    log-probabilities cancel.
    """

    option: ClassVar[str] = "--pairs"
    fields: ClassVar[Sequence[str]] = ("prompt", *ANSWERS, "tools")
    has_pairs: ClassVar[bool] = True

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the conversations' texts and the learnt parts of them."""
        return hashlib.sha256(f"pairs\0{self.template}".encode()).hexdigest()

    def _render_row(self, row: Any) -> Sequence[tuple[str, Spans]]:
        prompt, *answers = split_row(row)
        rendered: list[tuple[str, Spans]] = []
        for name, answer in zip(ANSWERS, answers, strict=True):
            try:
                text, spans = self._render({"messages": [*prompt, *answer], "tools": row.get("tools")})
                spans = spans[self._num_spans(prompt, row.get("tools")) :]
            except BadRow as bad:
                option = self.option if bad.argument == Chat.option else bad.argument
                raise BadRow(option, bad.expected, f"{bad.got}, with `{name}`,", bad.remedy) from bad
            if not any(begin < end for begin, end in spans):
                remedy = "Write the answer, or leave the row out."
                raise BadRow(self.option, f"a token to learn in `{name}`", "none", remedy)
            rendered.append((text, spans))
        if rendered[0][0] == rendered[1][0]:
            raise _same("two answers that the chat template renders alike")
        return rendered

    def _num_spans(self, prompt: Messages, tools: Any) -> int:
        """Returns how many of a conversation's spans are the prompt's: a template may mark any number in a turn."""
        if MARKER.search(self.template):
            return len(self._apply([prompt], tools, return_assistant_tokens_mask=True)[1][0])
        return sum(message["role"] == ASSISTANT for message in prompt)


def split_row(row: Any) -> tuple[Messages, Messages, Messages]:
    """Returns the messages of a row's prompt, of its chosen answer and of its rejected answer.

    Answers are texts, or lists of messages that begin with the assistant. Lists that begin with another role are whole
    conversations, with the prompt in them: their prompt is what they share.

    Raises:
        BadRow: an answer is missing or empty, both are the same or of different forms, or there is no prompt. Or whole
            conversations lack messages of the prompt.
    """
    known = row if isinstance(row, dict) else {}
    values: list[Any] = [known.get(name) for name in ("prompt", *ANSWERS)]
    prompt, chosen, rejected = values
    for name, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if not answer or not isinstance(answer, str | list) or type(answer) is not type(chosen):
            got = f"a `{name}` of type {type(answer).__name__}" if answer else f"no `{name}`"
            remedy = "Rename or convert the fields, or leave out rows without both answers."
            raise BadRow("--pairs", FORMS, f"{got}, of the fields {field_names(row)}", remedy)
    if chosen == rejected:
        raise _same("the same answer twice")
    if isinstance(chosen, str) or isinstance(rejected, str):
        chosen, rejected = ([{"role": ASSISTANT, "content": answer}] for answer in (chosen, rejected))
    elif not _role(chosen[0]) == _role(rejected[0]) == ASSISTANT:
        last = min(len(chosen), len(rejected)) - 1
        shared = next((i for i in range(last) if chosen[i] != rejected[i]), last)
        given = prompt if isinstance(prompt, list) else []
        if not shared or chosen[:shared][: len(given)] != given:
            got = "one that lacks messages of `prompt`" if shared else "two with other beginnings"
            remedy = "Begin both with all messages of the prompt."
            raise BadRow("--pairs", "conversations that share a prompt", got, remedy)
        return chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt or not isinstance(prompt, str | list):
        got = f"no `prompt`, of the fields {field_names(row)}"
        raise BadRow("--pairs", FORMS, got, "Write the prompt, or put its messages before both answers.")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, chosen, rejected


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _same(got: str) -> BadRow:
    return BadRow("--pairs", "`chosen` and `rejected` that differ", got, "Leave the row out: it teaches nothing.")
